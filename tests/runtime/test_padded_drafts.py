"""Steps as captured graphs run them, padded to fixed shapes, with a draft engine. The graph is replaced by a call of the same function."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from drive import Driven, request

from stoker.runtime.worker.cuda_graphs import Graphs, PlainStep, run_parts
from stoker.runtime.worker.drafter import DraftInputs
from stoker.runtime.worker.inputs import PackedStep, split_buffer
from stoker.runtime.worker.model_runner import ModelRunner
from stoker.runtime.worker.row_tracker import RowTracker


class CalledSteps(Graphs):
    """Runs the function that would be captured, on the static buffers."""

    num_runs = 0

    def __init__(self, runner: ModelRunner, max_drafts: int) -> None:
        sizes = {"max_rows": 8, "max_seq_len": runner.max_seq_len, "max_tokens": 128}
        super().__init__(runner._forward, runner._launch_all, runner.inputs, **sizes, max_drafts=max_drafts, device=runner.device)
        self.wanted: list[int | None] = []

    def run(self, packed: PackedStep, all_greedy: bool, num_wanted: int | None = None) -> PlainStep:
        self.num_runs += 1
        self.wanted.append(num_wanted)
        tables = self._tables[: packed.shape.rows]
        self.inputs.send(packed, self._static, tables)
        views = split_buffer(self._static, packed.sizes)
        inputs = self.inputs.step_inputs(packed, [*views[:15], tables.view(-1), *views[16:]])
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
    model = MagicMock(wraps=runner.model)
    monkeypatch.setattr(runner, "model", model)
    for shape in steps.verifications()[:3]:
        steps.trace(shape)
    assert model.call_count == 3, "once for both kinds of sampling"


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
