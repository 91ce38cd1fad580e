"""Runs a drafter after the sampler of each step, and stores its drafts on the device for the next step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from stoker.core.forward_batch import ForwardBatch
from stoker.kernels import ops
from stoker.runtime.sampling.sampler import DrawTable
from stoker.runtime.sampling.verification import Verified
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.worker.drafter import Drafter, DraftInputs
from stoker.runtime.worker.inputs import InputBuilder, StepInputs


class DraftRunner:
    """A drafter, and where its drafts are stored."""

    def __init__(self, drafter: Drafter, table: DrawTable, last_ids: Tensor, inputs: InputBuilder) -> None:
        """`last_ids`: see `ModelRunner`. It has room for the drafts of each row after the newest tokens. `inputs` packs catch-ups."""
        self.drafter, self._table, self._last_ids, self._inputs = drafter, table, last_ids, inputs

    def run(
        self, batch: ForwardBatch, inputs: StepInputs, newest: Tensor, verified: Verified | None, num_wanted: int | None, all_greedy: bool
    ) -> Tensor:
        """The drafts of the next step, int32 [D, S], D <= `num_wanted`. `num_wanted` None: the drafter does not run, and D is 0."""
        count = min(num_wanted or 0, self.drafter.num_drafts) if len(newest) else 0
        drafts = newest.new_empty(count, len(newest))
        if num_wanted is not None:
            for _ in itertools.islice(self.parts(batch, inputs, newest, verified, drafts, all_greedy), 1 + count):
                pass
        return drafts

    def parts(
        self, batch: ForwardBatch, inputs: StepInputs, newest: Tensor, verified: Verified | None, drafts: Tensor, all_greedy: bool
    ) -> Iterator[None]:
        """Run the drafter's pass over the step, then one draft after another, and pause after each.

        `newest` int32 [S] are the newest tokens. Drafts are written to `drafts`, int32 [D, S], and those of chains to `last_ids`.
        """
        rows, size = inputs.newest_rows, self._inputs.num_rows + 1
        given = DraftInputs(batch, rows, newest, verified, inputs.starts, self._table, all_greedy)
        computed = self.drafter.compute(given)
        yield
        for i, token_ids in enumerate(self.drafter.drafts(given, computed)):
            if token_ids.dim() == 2:  # a tree, whose ids the host reads before it plans the next step
                drafts.copy_(token_ids[: len(drafts)])
            else:
                ops.remember(self._last_ids[(i + 1) * size : (i + 2) * size], rows, token_ids)
                drafts[i].copy_(token_ids)
            yield

    def buffer(self, newest: Tensor) -> Tensor:
        """Room for all drafts of the sequences of a step, int32 [num_drafts, S]."""
        return torch.empty(self.drafter.num_drafts, len(newest), dtype=torch.int32, device=newest.device)

    def catch_up(self, plan: StepPlan) -> None:
        """Compute the tokens of earlier steps in which the drafter did not run, as far as the plan lists them."""
        if plan.catch_up is not None:
            self.drafter.catch_up(self._inputs.unpack(self._inputs.pack(plan.catch_up)).batch)
