"""Steps as captured graphs run them, padded to fixed shapes, with a draft engine. The graph is replaced by a call of the same function."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from drive import Driven, request
from torch import Tensor

from stoker.core.forward_batch import ForwardBatch
from stoker.runtime.sampling.sampler import DrawTable
from stoker.runtime.worker.accepted_batch import accepted_batch
from stoker.runtime.worker.cuda_graphs import Graphs, PlainStep, run_parts
from stoker.runtime.worker.draft_batch import SpareBlocks
from stoker.runtime.worker.drafter import DraftInputs
from stoker.runtime.worker.inputs import BLOCK_TABLES, PackedStep, Shape, split_buffer
from stoker.runtime.worker.model_runner import ModelRunner
from stoker.runtime.worker.row_tracker import RowTracker


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class CalledSteps(Graphs):
    """Runs the function that would be captured, on the static buffers."""

    num_runs = 0

    def __init__(self, runner: ModelRunner, max_drafts: int) -> None:
        sizes = {"max_rows": 8, "max_seq_len": runner.max_seq_len, "max_tokens": 128}
        super().__init__(runner._forward, runner._launch_all, runner.inputs, **sizes, max_drafts=max_drafts, device=runner.device)
        self.wanted: list[int | None] = []

    def is_captured(self, shape: Shape) -> bool:
        return True

    def run(self, packed: PackedStep, all_greedy: bool, num_wanted: int | None = None) -> PlainStep:
        self.num_runs += 1
        self.wanted.append(num_wanted)
        tables = self._tables[: packed.shape.rows]
        self.inputs.send(packed, self._static, tables)
        views = split_buffer(self._static, packed.sizes)
        inputs = self.inputs.step_inputs(packed, [*views[:BLOCK_TABLES], tables.view(-1), *views[BLOCK_TABLES + 1 :]])
        parts = self.forward(inputs, packed.shape.max_drafts, all_greedy)
        result = next(parts)
        return run_parts(itertools.chain([result], parts), result, num_wanted)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.2, "seed": 5}], ids=["greedy", "sampled"])
def test_padding_has_no_effect_on_drafts(
    drive: Callable[..., Driven], prompts: list[list[int]], tiny_engine: Path, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [request(prompt, max_tokens=30, **params) for prompt in prompts]
    expected = [answer.tokens for answer in drive().run(*cases)]
    driven = drive(speculate=str(tiny_engine), draft_tokens=4, adaptive_drafts=False)
    runner = driven.executor.runner
    assert isinstance(runner, ModelRunner)
    runner.graphs = steps = CalledSteps(runner, 4)
    assert [answer.tokens for answer in driven.run(*cases)] == expected
    stats = driven.stats
    assert steps.num_runs > 5 and stats.num_accepted_draft_tokens == stats.num_draft_tokens > 100
    layers = MagicMock(wraps=runner.model.hidden_states)
    monkeypatch.setattr(runner.model, "hidden_states", layers)
    for shape in steps.shapes.verifications()[:3]:
        steps.trace(shape)
    assert layers.call_count == 3, "once for both kinds of sampling"


def test_a_captured_step_computes_the_drafts_that_are_wanted(
    drive: Callable[..., Driven], prompts: list[list[int]], tiny_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With k = 0 for all rows, the drafter does not run; otherwise each row has the largest number of drafts of a row."""
    cases = [request(prompt, max_tokens=40) for prompt in prompts]
    expected = [answer.tokens for answer in drive().run(*cases)]
    driven = drive(speculate=str(tiny_engine), draft_tokens=4, adaptive_drafts=False)
    runner = driven.executor.runner
    assert isinstance(runner, ModelRunner) and runner.draft_runner is not None
    runner.graphs = steps = CalledSteps(runner, 4)
    num_passes = 0
    compute = runner.draft_runner.drafter.compute

    def counted(inputs: DraftInputs) -> Any:
        nonlocal num_passes
        num_passes += 1
        return compute(inputs)

    monkeypatch.setattr(runner.draft_runner.drafter, "compute", counted)
    monkeypatch.setattr(driven.executor.scheduler.draft_length, "limit", lambda seq, _: (0, 0, 1, 3)[len(seq.tokens) // 8 % 4])
    assert [answer.tokens for answer in driven.run(*cases)] == expected
    stats = driven.stats
    assert stats.num_accepted_draft_tokens == stats.num_draft_tokens > 40
    assert {None, 1, 3} <= set(steps.wanted) and steps.wanted.count(None) > 1
    assert num_passes <= stats.num_steps - steps.wanted.count(None)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.15, "seed": 5}], ids=["greedy", "sampled"])
def test_padded_steps_that_are_planned_before_ids_are_known(
    drive: Callable[..., Driven], prompts: list[list[int]], params: dict[str, Any]
) -> None:
    """Captured steps look up their drafts, and correct positions of rows with and without drafts; padding is not changed."""
    cases = [request((prompt[:8] * 4)[:29], max_tokens=60 + i, **params) for i, prompt in enumerate(prompts)]
    expected = [answer.tokens for answer in drive().run(*cases)]
    driven = drive(speculate="ngram", draft_tokens=4, adaptive_drafts=False)
    runner = driven.executor.runner
    assert isinstance(runner, ModelRunner)
    runner.graphs = steps = CalledSteps(runner, 4)
    runner.tracker = RowTracker(runner.inputs.num_rows, runner.max_seq_len, runner.inputs.block_size, runner.device, looks_up=True)
    driven.executor._depth = 2
    assert [answer.tokens for answer in driven.run(*cases)] == expected
    assert steps.num_runs > 20 and driven.stats.num_accepted_draft_tokens > 10
    assert int(runner.tracker.tokens.lengths[-1]) == 1 << 30


def test_decodes_have_two_tokens_in_the_first_pass_of_a_draft_engine() -> None:
    """A captured step counts its decodes on the device: two, before a prompt of three tokens and a row of padding."""
    batch = ForwardBatch(
        *(torch.zeros(8, dtype=torch.int32) for _ in range(3)), query_starts=int32([0, 1, 2, 5, 5]), seq_lens=int32([9, 4, 3, 0]),
        block_tables=torch.zeros(4, 4, dtype=torch.int32), num_decodes=0, max_query_len=8, max_seq_len=40,
        logits_idx=int32([0, 1, 4, 0]), decode_count=int32([2]), row_count=int32([3]),
    )  # fmt: skip
    rows = int32([5, 2, 7, 8])  # the last one is padding
    inputs = DraftInputs(batch, rows, rows, None, None, DrawTable(9, torch.device("cpu")), all_greedy=True)
    first, _ = SpareBlocks(10, 8, 2, 4, torch.device("cpu")).first_pass(inputs, accepted_batch(inputs), 40)
    assert first.query_starts.tolist() == [0, 2, 4, 8, 8] and first.num_decodes == 0
    assert first.decode_count is None and first.row_count is batch.row_count
