"""Draft tokens on a GPU: captured and launched verification gives the tokens of plain decoding."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.base.config import Limits, RuntimeConfig
from stoker.base.types import SamplingParams
from stoker.kernels import ops
from stoker.kernels.reference import sampling as reference
from stoker.profiling.mailbox import SynchronousMailbox
from stoker.runtime.executor import Executor
from stoker.runtime.load import load_executor
from stoker.runtime.request import ExecutorStats, TokenRequest
from stoker.runtime.worker.cuda_graphs import CapturedStep

sys.path.append(str(Path(__file__).parents[1] / "builder"))
sys.path.append(str(Path(__file__).parents[1] / "runtime"))

PROMPTS = [[(7 * i + 13 * j) % 300 + 3 for j in range(5 + 9 * i)] for i in range(6)]
FEATURES: list[dict[str, Any]] = [
    {}, {}, {"temperature": 0.9, "seed": 5}, {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "seed": 2}, {"logprobs": 2},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.4},
]  # fmt: skip
TREE = ",".join([*(f"[{i}]" for i in range(12)), *(f"[{i},{j}]" for i in range(4) for j in range(4)), "[0,0,0]", "[1,0,0]"])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of three layers in float32, so that steps of different shapes give the same tokens."""
    import tiny

    from stoker.builder.build import build
    from stoker.builder.config import BuildConfig

    folder = tmp_path_factory.mktemp("speculation")
    checkpoint = tiny.save(tiny.model(), folder / "checkpoint")
    limits = Limits(max_batch_size=8, max_input_len=180, max_output_len=64, max_num_tokens=128, tokens_per_block=16)
    return build(checkpoint, folder / "engine", BuildConfig(device="cuda", dtype="float32", limits=limits), verify="files").path


def load(engine: Path, **settings: Any) -> Executor:
    return load_executor(
        engine, RuntimeConfig(kv_cache_tokens=2048, adaptive_drafts="speculate" not in settings, **settings), SynchronousMailbox
    )


def answers(engine: Path, calls: list[TokenRequest], **settings: Any) -> tuple[list[list[int]], ExecutorStats]:
    """The tokens of each request, and the statistics of the executor."""
    return run(load(engine, **settings), calls)


def run(executor: Executor, calls: list[TokenRequest]) -> tuple[list[list[int]], ExecutorStats]:
    """The same with an executor, which is closed."""
    assert isinstance(executor.mailbox, SynchronousMailbox)
    executor.mailbox.submit(calls)
    found: dict[str, list[int]] = {call.request_id: [] for call in calls}
    executor.turn(0.0)
    while executor.is_busy:
        executor.turn(0.0)
        for output in executor.mailbox.pop_outputs():
            assert output.error is None
            found[output.request_id] += output.token_ids
    executor.close()
    return list(found.values()), executor.snapshot()


@pytest.mark.parametrize("settings", [{}, {"cuda_graphs": False}, {"overlap": False}, {"draft_tokens": 2}], ids=str)
def test_the_tokens_are_those_of_plain_decoding(engine: Path, settings: dict[str, Any]) -> None:
    """Drafts are the plain answers, of which every eighth token is wrong."""
    calls = feature_calls()
    expected, plain = answers(engine, calls)
    for call, tokens in zip(calls, expected, strict=True):
        call.draft_ids = [token if i % 8 else 299 for i, token in enumerate(tokens)]
    found, stats = answers(engine, calls, speculate="request", **settings)
    assert found == expected
    # With overlap, rows with drafts wait for their step and others do not, so that they run in alternating steps.
    assert stats.num_steps < 0.7 * plain.num_steps or settings.get("overlap", True)
    found, _ = answers(engine, calls, speculate="ngram", **settings)
    assert found == expected


@pytest.mark.parametrize("name", ["medusa-vllm", "eagle", "eagle3"])
def test_draft_heads(engine: Path, name: str, tmp_path: Path) -> None:
    """Captured and launched steps with heads give the tokens of plain decoding, and verify the same drafts."""
    import tiny
    from head_oracles import ORACLES, write

    oracle = ORACLES[name](tiny.model())
    path = str(write(tmp_path / name, oracle.config, oracle.files))
    bias = {"logit_bias": dict.fromkeys((5, 8, 20), 4.0)}  # so that some drafts of the small draft vocabularies are accepted
    calls = [
        TokenRequest(request_id=str(i), prompt_ids=prompt, params=SamplingParams(max_tokens=40, **bias if i % 2 else {}))
        for i, prompt in enumerate(PROMPTS)
    ]
    expected, _ = answers(engine, calls)
    for settings in ({}, {"cuda_graphs": False}):
        assert answers(engine, calls, speculate=path, draft_tokens=3, **settings)[0] == expected


@pytest.mark.parametrize("settings", [{}, {"cuda_graphs": False}], ids=str)
@pytest.mark.parametrize("speculate", ["ngram", "medusa-vllm", "eagle"])
def test_drafts_that_are_planned_before_ids_are_known(engine: Path, tmp_path: Path, speculate: str, settings: dict[str, Any]) -> None:
    """Lookups on the device and heads, greedy and sampled, while the host does not know the ids of the step before."""
    import tiny
    from head_oracles import ORACLES, write

    if speculate != "ngram":
        oracle = ORACLES[speculate](tiny.model())
        speculate = str(write(tmp_path / "heads", oracle.config, oracle.files))
    params: list[dict[str, Any]] = [{}, {"temperature": 0.2, "seed": 5}, {"logprobs": 2}]
    calls = [
        TokenRequest(
            request_id=str(i), prompt_ids=(prompt[:8] * 4)[: 12 + 4 * i], params=SamplingParams(max_tokens=60 - i, **params[i % 3]),
            end_ids=(120, 77) if i == 4 else (),
        )
        for i, prompt in enumerate(PROMPTS)
    ]  # fmt: skip
    for chosen in (calls, [call for call in calls if call.params.logprobs is None]):  # with log-probabilities no step is captured
        expected, _ = answers(engine, chosen)
        executor = load(engine, speculate=speculate, draft_tokens=3, **settings)
        launch, num_ahead = executor.runner.launch, 0

        def counted(plan: Any, launch: Any = launch) -> Any:
            nonlocal num_ahead
            num_ahead += sum(-1 in drafts for drafts in plan.drafts)
            return launch(plan)

        executor.runner.launch = counted  # type: ignore[method-assign]
        found, stats = run(executor, chosen)
        assert found == expected and num_ahead > 30
        assert stats.num_accepted_draft_tokens > 20 or speculate != "ngram"


def test_corrected_rows_equal_the_reference() -> None:
    from stoker.core.forward_batch import ForwardBatch
    from stoker.kernels.types import RowTokens

    counts, width = torch.tensor([1, 1, 4, 8, 8, 64]), 1 << 15
    starts = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
    text = torch.randint(0, 12, (8, width), dtype=torch.int32)
    lengths = torch.tensor([900, 3, 40_000, 1, 70_001, 20, 5_000, 1 << 30], dtype=torch.int32)
    rows, late = torch.tensor([3, 0, 5, 1, 4, 2], dtype=torch.int32), torch.tensor([0, 7, 0, 2, 5, 63])
    begins = lengths[rows] - 1 + late
    positions = torch.cat([torch.arange(int(begin), int(begin + count)) for begin, count in zip(begins, counts, strict=True)]).int()
    ids = torch.full_like(positions, -1)

    def corrected(device: str) -> list[torch.Tensor]:
        batch = ForwardBatch(
            ids.clone().to(device), positions.clone().to(device), torch.zeros_like(positions).to(device), starts.to(device),
            (begins + counts).int().to(device), torch.arange(6 * 5000, dtype=torch.int32).view(6, 5000).to(device), 0, 64, 1 << 17,
            state_slots=rows.to(device),
        )  # fmt: skip
        counters, known = (positions + 1).to(device), RowTokens(lengths.clone().to(device), text.clone().to(device))
        ops.continue_rows(batch, rows.to(device), starts.to(device), counters, known, 16)
        yielded = torch.arange(6 * 3, dtype=torch.int32).view(6, 3).to(device)
        ops.append_tokens(known, rows.to(device), yielded, torch.tensor([0, 1, 2, 0, 1, 2], dtype=torch.int32, device=device))
        assert known.text is not None
        return [batch.token_ids, batch.positions, batch.slots, batch.seq_lens, counters, known.lengths, known.text]

    for one, other in zip(corrected("cpu"), corrected("cuda"), strict=True):
        assert torch.equal(one, other.cpu())


def test_verification_equals_the_reference() -> None:
    counts = torch.randint(1, 7, (300,))
    starts = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
    sampled, token_ids = (torch.randint(-1, 2, (int(starts[-1]) + 1,), dtype=torch.int32) for _ in range(2))
    masks = torch.full((len(token_ids),), -1)
    nodes = torch.cat([torch.arange(int(count)) for count in counts])
    masks[:-1] = (2 << nodes) - 1
    parents = (nodes - 1).clamp(min=0).int()
    arguments = (sampled[:-1], token_ids, torch.arange(int(starts[-1]), dtype=torch.int32), starts, parents, masks)
    expected = reference.verify(*arguments, 5)
    found = ops.verify(*(tensor.cuda() for tensor in arguments), 5)
    assert all(torch.equal(one, other.cpu()) for one, other in zip(expected, found, strict=True))


@pytest.mark.parametrize("settings", [{}, {"cuda_graphs": False}, {"overlap": False}], ids=str)
def test_a_draft_engine_equal_to_the_model(engine: Path, settings: dict[str, Any]) -> None:
    """Captured and launched steps give the tokens of plain decoding: greedy, sampled, and with features.

    The number of steps is that of the slowest row. Drafts have no penalties, so that the row with penalties needs nearly as many steps as
    plain decoding, and a row with features makes the whole step run without a graph. The rows without features therefore run alone, too.
    A draft is computed by kernels for other numbers of rows than the token that verifies it. The rounding of their float32 sums changes a
    token only where two are almost equally likely, or a random number lies between them: a few of a hundred drafts at most.
    """
    calls = feature_calls()
    expected, plain = answers(engine, calls)
    found, _ = answers(engine, calls, speculate=str(engine), draft_tokens=4, **settings)
    assert found == expected
    found, stats = answers(engine, calls[:4], speculate=str(engine), draft_tokens=4, **settings)
    assert found == expected[:4]
    assert stats.num_accepted_draft_tokens >= 0.9 * stats.num_draft_tokens > 0
    assert stats.num_steps < 0.6 * plain.num_steps


def feature_calls() -> list[TokenRequest]:
    return [
        TokenRequest(request_id=str(i), prompt_ids=prompt, params=SamplingParams(max_tokens=48, **params))
        for i, (prompt, params) in enumerate(zip(PROMPTS, FEATURES, strict=True))
    ]


@pytest.mark.parametrize("overlap", [True, False])
def test_captured_steps_compute_the_drafts_that_are_wanted(engine: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    """Steps without drafts replay the model only, the draft engine catches up, and its drafts are accepted as if it had run always."""
    calls = feature_calls()[:4]
    expected, _ = answers(engine, calls)
    executor = load(engine, speculate=str(engine), draft_tokens=4, overlap=overlap)
    replayed: list[int | None] = []
    replay = CapturedStep.replay
    monkeypatch.setattr(CapturedStep, "replay", lambda self, num_wanted=None: (replayed.append(num_wanted), replay(self, num_wanted))[1])
    monkeypatch.setattr(executor.scheduler.draft_length, "limit", lambda *_: (0, 0, 1, 3)[executor.stats.num_steps // 6 % 4])
    found, stats = run(executor, calls)
    assert found == expected and {None, 1, 3} <= set(replayed)
    assert stats.num_accepted_draft_tokens >= 0.9 * stats.num_draft_tokens > 20


def test_a_drafter_that_never_drafts_never_runs(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At full load, where no draft pays, all captured steps are those without a drafter."""
    calls = feature_calls()[:4]
    expected, plain = answers(engine, calls)
    executor = load(engine, speculate=str(engine), draft_tokens=4)
    replayed: list[int | None] = []
    replay = CapturedStep.replay
    monkeypatch.setattr(CapturedStep, "replay", lambda self, num_wanted=None: (replayed.append(num_wanted), replay(self, num_wanted))[1])
    monkeypatch.setattr(executor.scheduler.draft_length, "limit", lambda *_: 0)
    found, stats = run(executor, calls)
    assert found == expected and set(replayed) == {None} and stats.num_steps <= plain.num_steps + 2


@pytest.mark.parametrize(("name", "tree"), [("medusa", TREE), ("eagle3", TREE), ("eagle3", "dynamic:3,4,12"), ("eagle", "dynamic:5,3,30")])
@pytest.mark.parametrize("settings", [{}, {"cuda_graphs": False}, {"overlap": False}], ids=str)
def test_trees_of_heads(engine: Path, tmp_path: Path, name: str, tree: str, settings: dict[str, Any]) -> None:
    """Captured and launched steps with trees give the tokens of plain decoding: greedy, sampled, and with features."""
    import tiny
    from head_oracles import ORACLES, write

    oracle = ORACLES[name](tiny.model())
    path = str(write(tmp_path / name, oracle.config, oracle.files))
    calls = feature_calls()
    expected, _ = answers(engine, calls)
    found, stats = answers(engine, calls, speculate=path, draft_tree=tree, **settings)
    assert found == expected and stats.num_draft_tokens > 100


def test_moves_equal_the_reference() -> None:
    from stoker.core.forward_batch import KVCache
    from stoker.kernels.reference import pages

    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        keys, values = (torch.randint(0, 120, (6, 2, 16, 48), dtype=torch.uint8).view(dtype) for _ in range(2))
        expected, found = KVCache(keys.clone(), values.clone()), KVCache(keys.cuda(), values.cuda())
        moves = torch.tensor([(17, 15), (18, 16), (33, 17), (80, 40)], dtype=torch.int32)
        pages.move_tokens([expected], moves)
        ops.move_tokens([found], moves.cuda())
        for one, other in ((expected.keys, found.keys), (expected.values, found.values)):
            assert one is not None and other is not None and torch.equal(one.view(torch.uint8), other.cpu().view(torch.uint8))
