"""The drafters of draft heads: they read the model's hidden states of a step, and run the heads on them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from stoker.core.forward_batch import KVCache
from stoker.layers.decoder import Decoder
from stoker.runtime.heads.head import ParallelHead, RecurrentHead
from stoker.runtime.heads.recurrent_drafts import RecurrentDrafts
from stoker.runtime.heads.sampled_drafts import choose
from stoker.runtime.worker.draft_batch import SpareBlocks
from stoker.runtime.worker.drafter import Drafter, DraftInputs


class StateRecorder:
    """Records hidden states of the newest step of a model. `layers`: the numbers of layers before them; empty: after the final norm."""

    def __init__(self, model: Decoder, layers: tuple[int, ...]) -> None:
        self.model, self.layers = model, layers
        self._wanted = set(layers) or {model.config.num_layers}
        self._states: dict[int, Tensor] = {}
        model.observe_layers = self._observe

    def _observe(self, num_layers: int, x: Tensor) -> None:
        if num_layers in self._wanted:
            self._states[num_layers] = x

    def pop(self, index: Tensor | None = None) -> Tensor:
        """The states of all tokens, or of those at `index`: [T, hidden], those of several layers side by side. They are then released."""
        states, self._states = self._states, {}
        rows = {n: x if index is None else x.index_select(0, index) for n, x in states.items()}
        if self.layers:
            return torch.cat([rows[n] for n in self.layers], dim=-1)
        (last,) = rows.values()
        return last if self.model.norm is None else self.model.norm(last)


class ParallelDrafter(Drafter):
    """Runs parallel heads on the last valid state of each sequence."""

    def __init__(self, model: Decoder, head: ParallelHead, num_drafts: int) -> None:
        self.head, self.num_drafts, self.states = head, num_drafts, StateRecorder(model, ())
        self._vocab_size = model.config.vocab_size

    def compute(self, inputs: DraftInputs) -> Tensor:
        """The states of the last valid tokens."""
        return self.states.pop(inputs.last_indices)

    def drafts(self, inputs: DraftInputs, computed: Tensor) -> Iterator[Tensor]:
        positions = inputs.batch.positions.index_select(0, inputs.last_indices)
        for i in range(self.num_drafts):
            # The newest token has position + 1; the first draft has the random number of position + 2.
            yield choose(self.head.logits(i, computed), self.head.target_ids, inputs, positions + 2 + i, self._vocab_size)


class RecurrentDrafter(Drafter):
    """Runs a recurrent head on all tokens of a step, and then on its own drafts."""

    def __init__(self, model: Decoder, head: RecurrentHead, caches: list[KVCache], spare: SpareBlocks, num_drafts: int) -> None:
        self.num_drafts, self.caches, self.states = num_drafts, caches, StateRecorder(model, head.layers)
        self.head, self._recurrent = head, RecurrentDrafts(head, caches, spare, model.config.vocab_size)

    def compute(self, inputs: DraftInputs) -> Tensor:
        """The outputs of the head at the last valid tokens."""
        return self._recurrent.compute(inputs, self.states.pop())

    def drafts(self, inputs: DraftInputs, computed: Tensor) -> Iterator[Tensor]:
        return self._recurrent.drafts(inputs, computed, self.num_drafts)
