"""Steps as captured graphs run them, padded to fixed shapes, with a draft engine. The graph is replaced by a call of the same function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drive import Driven, request

from stoker.runtime.worker.cuda_graphs import Graphs, PlainStep
from stoker.runtime.worker.inputs import PackedStep
from stoker.runtime.worker.model_runner import ModelRunner


class CalledSteps(Graphs):
    """Runs the function that would be captured, on the static buffers."""

    num_runs = 0

    def run(self, packed: PackedStep, all_greedy: bool) -> PlainStep:
        self.num_runs += 1
        inputs = self.inputs.unpack(packed, self._static, self._tables[: packed.shape.rows])
        return self.forward(inputs, packed.shape.max_drafts, all_greedy)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.2, "seed": 5}], ids=["greedy", "sampled"])
def test_padding_has_no_effect_on_drafts(
    drive: Callable[..., Driven], prompts: list[list[int]], tiny_engine: Path, params: dict[str, Any]
) -> None:
    cases = [request(prompt, max_tokens=30, **params) for prompt in prompts]
    expected = [answer.tokens for answer in drive().run(*cases)]
    driven = drive(speculate=str(tiny_engine), draft_tokens=4, adaptive_drafts=False)
    runner = driven.executor.runner
    assert isinstance(runner, ModelRunner)
    runner.graphs = steps = CalledSteps(
        runner._forward, runner.inputs, max_rows=8, max_seq_len=runner.max_seq_len, max_tokens=128, max_drafts=4, device=runner.device
    )
    assert [answer.tokens for answer in driven.run(*cases)] == expected
    stats = driven.stats
    assert steps.num_runs > 5 and stats.num_accepted_draft_tokens == stats.num_draft_tokens > 100
    for shape in steps.verifications()[:3]:
        steps.trace(shape, True)
