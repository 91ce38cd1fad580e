"""Short steps that are replayed from recordings of their C calls compute exactly what the layers do."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cases import GROUPED, native
from harness import Harness
from torch import Tensor

from stoker.base.config import Limits
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.kernels import ops
from stoker.kernels.native import attention, library, linear, recording
from stoker.kernels.native.recording import Recording, Recordings
from stoker.kernels.types import AttentionParams

needs_compiler = pytest.mark.skipif(isinstance(library.kernels(), str), reason="no C kernels")
SIZE, BLOCK = 32, 4
WIDE = GROUPED | {"hidden_size": 96, "intermediate_size": 128, "head_dim": SIZE}  # sizes that the C kernels support


RECORDS = """
import sys
from stoker import LLM, SamplingParams
from stoker.kernels.native import recording

calls, record = [], recording.record
recording.record = lambda *args: calls.append(args) or record(*args)
with LLM(sys.argv[1]) as llm:
    llm.generate("abc", SamplingParams(max_tokens=6, ignore_eos=True))
assert calls and "torch._dynamo" not in sys.modules
"""


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each replayed step."""
    found: list[int] = []
    run = Recording.run

    def counted(self: Recording, x: Tensor, batch: ForwardBatch) -> Tensor | None:
        found.append(len(x))
        return run(self, x, batch)

    monkeypatch.setattr(Recording, "run", counted)
    return found


def decoded(folder: Path) -> list[Tensor]:
    """The logits of one row, then two, then drafts after the first one, then the other one. Block tables grow."""
    model = Harness(folder, 128)
    first, second = model.start([7, 3, 11, 5, 2]), model.start([9, 4, 8])
    model.step([(first, 5)])
    for _ in range(20):
        model.step([(first, 1)])
    model.step([(second, 3)])
    for _ in range(20):
        model.step([(first, 1), (second, 1)])
    for _ in range(4):
        first.tokens += [4, 8]
        model.step([(first, 3), (second, 1)])
    model.preempt(first)
    for _ in range(30):
        model.step([(second, 1)])
    return [sequence.logits[i] for sequence in (first, second) for i in sorted(sequence.logits)]


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "quantization", "is_recorded"),
    [
        ("Llama", "NO_QUANT", True),
        ("Mistral", "WEIGHTS_ONLY_INT4", True),
        ("Qwen2", "WEIGHTS_ONLY_INT8", True),
        ("Llama", "FP8", True),
        ("Qwen3", "NO_QUANT", True),
        ("Olmo", "NO_QUANT", False),  # the limit of queries, keys and values is no C kernel
    ],
)
def test_replayed_steps_equal_the_layers(
    kind: str, quantization: str, is_recorded: bool, tmp_path: Path, tokenizer: Path, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    native(kind, **WIDE, **({"clip_qkv": 0.5} if kind == "Olmo" else {})).save(tmp_path / "hf")
    limits = Limits(max_input_len=32, max_output_len=96, max_num_tokens=64, max_batch_size=2, tokens_per_block=16)
    config = BuildConfig(tokenizer=str(tokenizer), device="cpu", dtype="float32", limits=limits, quantization=quantization)
    build(tmp_path / "hf", tmp_path / "engine", config, verify="none")
    monkeypatch.setattr(recording, "_MIN_WIDTH", 1)
    found = decoded(tmp_path / "engine")
    # Each number of rows and width comes once before it is recorded: 1, 2 and 4 blocks with one row, 2 and 4 with two.
    counts = [replays.count(tokens) for tokens in (1, 2, 4)]
    assert counts == ([20 + 30 - 3, 20 - 2, 4 - 1] if is_recorded else [0, 0, 0])
    monkeypatch.setattr(Recordings, "run", lambda self, layers, x, batch, caches: layers(x, batch, caches))
    for replayed, separate in zip(found, decoded(tmp_path / "engine"), strict=True):
        assert torch.equal(replayed, separate)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def step(*lengths: int) -> ForwardBatch:
    """A decode step of rows with these numbers of keys, in blocks of their own."""
    rows, positions = len(lengths), ints(*(length - 1 for length in lengths))
    tables = torch.arange(4 * rows, dtype=torch.int32).view(rows, 4)
    return ForwardBatch(
        token_ids=positions, positions=positions, slots=positions, query_starts=torch.arange(rows + 1, dtype=torch.int32),
        seq_lens=ints(*lengths), block_tables=tables, num_decodes=rows, max_query_len=1, max_seq_len=max(lengths),
    )  # fmt: skip


def pages() -> list[KVCache]:
    return [KVCache(torch.randn(8, 1, BLOCK, SIZE), torch.randn(8, 1, BLOCK, SIZE))]


def attend(x: Tensor, batch: ForwardBatch, caches: list[KVCache]) -> Tensor:
    return attention.attention(x.view(len(x), 1, SIZE), caches[0], batch, AttentionParams(0.2))


@needs_compiler
@torch.inference_mode()
def test_a_replay_reads_the_inputs_of_its_step(replays: list[int]) -> None:
    recordings, caches = Recordings(), pages()
    for lengths in ((3, 5), (4, 6), (16, 1), (7, 9)):
        x, batch = torch.randn(2, SIZE), step(*lengths)
        before = x.clone()
        assert torch.equal(ops.replay(recordings, attend, x, batch, caches), attend(x, batch, caches)) and torch.equal(x, before)
    assert replays == [2, 2, 2]


@needs_compiler
def test_steps_in_and_outside_of_inference_mode(replays: list[int]) -> None:
    recordings, caches, x, batch = Recordings(), pages(), torch.randn(2, SIZE), step(3, 5)
    for enabled in (True, True, False, False, True):
        with torch.inference_mode(enabled):
            assert torch.equal(recordings.run(attend, x, batch, caches), attend(x, batch, caches))
    assert replays == [2, 2, 2]


@needs_compiler
@torch.inference_mode()
def test_other_caches_are_not_replayed(replays: list[int]) -> None:
    recordings, batch, x = Recordings(), step(3, 5), torch.randn(2, SIZE)
    for caches in (pages(), pages()):
        for _ in range(3):
            assert torch.equal(recordings.run(attend, x, batch, caches), attend(x, batch, caches))
    assert replays == [2] * 4


@needs_compiler
@torch.inference_mode()
def test_layers_run_when_a_kernel_refuses_an_index(replays: list[int]) -> None:
    recordings, caches, x = Recordings(), pages(), torch.randn(2, SIZE)
    for _ in range(2):
        recordings.run(attend, x, step(3, 5), caches)
    outside = step(3, 5)
    outside.block_tables[1, 1] = 8
    ran: list[ForwardBatch] = []

    def layers(x: Tensor, batch: ForwardBatch, caches: list[KVCache]) -> Tensor:
        ran.append(batch)
        return x

    assert recordings.run(layers, x, outside, caches) is x and ran == [outside]
    assert torch.equal(recordings.run(layers, x, step(4, 4), caches), attend(x, step(4, 4), caches)) and len(ran) == 1


@needs_compiler
@torch.inference_mode()
def test_layers_with_other_operations_are_not_recorded(replays: list[int]) -> None:
    recordings, caches, x = Recordings(), pages(), torch.randn(2, SIZE)
    ran: list[int] = []

    def layers(x: Tensor, batch: ForwardBatch, caches: list[KVCache]) -> Tensor:
        ran.append(len(x))
        return attend(x, batch, caches) + 1

    for _ in range(5):
        assert torch.equal(recordings.run(layers, x, step(3, 5), caches), attend(x, step(3, 5), caches) + 1)
    assert not replays and len(ran) == 6  # one of them to record


@needs_compiler
@torch.inference_mode()
def test_a_limited_number_of_shapes_is_recorded(monkeypatch: pytest.MonkeyPatch, replays: list[int]) -> None:
    monkeypatch.setattr(recording, "_MAX_SHAPES", 2)
    recordings, caches = Recordings(), pages()
    for rows in (1, 2, 1, 2, 3, 3, 1, 3):
        x, batch = torch.randn(rows, SIZE), step(*[5] * rows)
        batch.block_tables[:] = 1
        assert torch.equal(recordings.run(attend, x, batch, caches), attend(x, batch, caches))
    assert replays == [1, 2, 3] and len(recordings._seen) == 2


@needs_compiler
@torch.inference_mode()
def test_layers_share_buffers() -> None:
    weights = [torch.randn(SIZE, SIZE) for _ in range(10)]

    def layers(x: Tensor, batch: ForwardBatch, caches: list[KVCache]) -> Tensor:
        for weight in weights:
            x = linear.linear(x, weight)
        return x

    x, batch = torch.randn(2, SIZE), step(3, 5)
    recorded = recording.record(layers, x, batch, [], 4)
    assert recorded is not None and len(recorded.buffers) == 2
    other = torch.randn(2, SIZE)
    found = recorded.run(other, batch)
    assert found is not None and torch.equal(found, layers(other, batch, []))


@torch.inference_mode()
def equals_one_thread(threads: int, rows: int, seed: int) -> bool:
    """Whether replays with `threads` threads, which the calling thread starts, have the bits of one thread."""
    draw = torch.Generator().manual_seed(seed)
    weights = [torch.randn(512, 512, generator=draw) / 16 for _ in range(6)]  # large enough for several threads

    def layers(x: Tensor, batch: ForwardBatch, caches: list[KVCache]) -> Tensor:
        for weight in weights:
            x = linear.linear(x, weight)
        return x

    torch.set_num_threads(threads)
    x, batch = torch.randn(rows, 512, generator=draw), step(*[5] * rows)
    recorded = recording.record(layers, x, batch, [], 4)
    assert recorded is not None
    for _ in range(20):
        x = torch.randn(rows, 512, generator=draw)
        found = recorded.run(x, batch)
        torch.set_num_threads(1)
        if found is None or not torch.equal(found, layers(x, batch, [])):
            return False
        torch.set_num_threads(threads)
    return True


@needs_compiler
@pytest.mark.parametrize("rows", [1, 3])
def test_replays_of_several_threads_with_teams_of_several(rows: int) -> None:
    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(equals_one_thread, [1, 2, 4, 3, 2, 2], [rows] * 6, range(6)))


@needs_compiler
def test_calls_of_other_threads_are_not_recorded() -> None:
    x, weight, calls = torch.randn(2, SIZE), torch.randn(SIZE, SIZE), list[library.Call]()
    with library.recorded_calls(calls):
        thread = threading.Thread(target=linear.linear, args=(x, weight))
        thread.start()
        thread.join()
        assert not calls
        linear.linear(x, weight)
    linear.linear(x, weight)
    assert len(calls) == 1


@needs_compiler
def test_the_first_recording_does_not_import_the_compiler_of_torch(tiny_engine: Path) -> None:
    """The import takes a second, in which no step runs."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", RECORDS, str(tiny_engine)], env=environment, check=True)
