"""The drafters of draft heads: they read the model's hidden states of a step, and run the heads on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from stoker.base.draft_tree import DraftTree, DynamicTree
from stoker.layers.decoder import Decoder
from stoker.runtime.draft_trees.candidates import Candidates
from stoker.runtime.draft_trees.kinds import make_drafts
from stoker.runtime.draft_trees.sampled_drafts import choose, choose_scored
from stoker.runtime.heads.head import ParallelHead
from stoker.runtime.heads.head_passes import HeadPasses
from stoker.runtime.worker.accepted_batch import AcceptedBatch, accepted_batch
from stoker.runtime.worker.drafter import Drafter, DraftInputs


class StateRecorder:
    """Records hidden states of the newest step of a model. `layers`: the numbers of layers before them; empty: after the final norm."""

    def __init__(self, model: Decoder, layers: tuple[int, ...]) -> None:
        self.model, self.layers = model, layers
        self._first = model.stage.layers(model.config.num_layers).start
        self._wanted = set(layers) or {model.config.num_layers}
        self._states: dict[int, Tensor] = {}
        self._retains = False
        model.observe_layers = self._observe

    def _observe(self, num_layers: int, x: Tensor) -> None:
        number = self._first + num_layers
        if number in self._wanted:
            self._states[number] = x

    def pop(self, index: Tensor | None = None) -> Tensor:
        """The states of all tokens, or of those at `index`: [T, hidden], those of several layers side by side.

        They are then released, except within `retained`.
        """
        states = self._states
        if not self._retains:
            self._states = {}
        rows = {n: x if index is None else x.index_select(0, index) for n, x in states.items()}
        if self.layers:
            return torch.cat([rows[n] for n in self.layers], dim=-1)
        (last,) = rows.values()
        return last if self.model.norm is None else self.model.norm(last)

    @contextmanager
    def retained(self) -> Iterator[None]:
        """Release the states at the end of the block."""
        self._retains = True
        try:
            yield
        finally:
            self._retains, self._states = False, {}


class ParallelDrafter(Drafter):
    """Runs parallel heads on the last valid state of each sequence. All nodes of the tree at one depth have the candidates of one head."""

    def __init__(self, model: Decoder, head: ParallelHead, tree: DraftTree | DynamicTree) -> None:
        self.head, self.tree, self.num_drafts, self.states = head, tree, len(tree), StateRecorder(model, ())
        self.is_tree = not tree.is_chain
        self._vocab_size = model.config.vocab_size

    def compute(self, inputs: DraftInputs) -> Tensor:
        """The states of the last valid tokens."""
        return self.states.pop(inputs.last_indices)

    def retained_states(self) -> AbstractContextManager[None]:
        """A context in which the states of a step are not released."""
        return self.states.retained()

    def drafts(self, inputs: DraftInputs, computed: Tensor) -> Iterator[Tensor]:
        positions = inputs.batch.positions.index_select(0, inputs.last_indices) + 2  # of the first drafts; the newest token is before them
        if isinstance(self.tree, DynamicTree):
            yield self._dynamic(self.tree, inputs, computed, positions)
            return
        levels: list[Tensor] = []
        for i, ranks in enumerate(self.tree.ranks_by_depth()):
            logits = self.head.logits(i, computed)
            levels.append(choose(logits, self.head.target_ids, inputs, positions + i, self._vocab_size, 1 + max(ranks)))
            if not self.is_tree:
                yield levels[-1][:, 0]
        if self.is_tree:
            nodes = zip(self.tree.depths, self.tree.ranks, strict=True)
            yield torch.stack([levels[depth - 1][:, rank] for depth, rank in nodes])

    def _dynamic(self, tree: DynamicTree, inputs: DraftInputs, computed: Tensor, positions: Tensor) -> Tensor:
        """int32 [N, S]: the most probable paths, if the token of each head does not depend on those before it."""
        candidates, num_nodes = Candidates(tree, len(inputs.rows), computed.device), 1
        for i in range(tree.max_depth):
            if i:
                candidates.expand()
                num_nodes = tree.width
            logits = self.head.logits(i, computed)
            scored = choose_scored(logits, self.head.target_ids, inputs, positions + i, self._vocab_size, tree.width)
            candidates.add(*(part.unsqueeze(1).expand(-1, num_nodes, -1) for part in scored))
        return candidates.best()


class RecurrentDrafter(Drafter):
    """Runs a recurrent head on all tokens of a step, and then on its own drafts."""

    def __init__(self, model: Decoder, passes: HeadPasses, tree: DraftTree | DynamicTree) -> None:
        self.head, self.num_drafts, self.caches = passes.head, len(tree), passes.caches
        self.states, self._passes = StateRecorder(model, passes.head.layers), passes
        self.is_tree, self._drafts = not tree.is_chain, make_drafts(passes, tree, model.device)

    def compute(self, inputs: DraftInputs) -> tuple[Tensor, AcceptedBatch]:
        """The outputs of the head at the last valid tokens, and the batch of the step."""
        accepted = accepted_batch(inputs)
        return self._passes.compute(inputs, accepted, self.states.pop()), accepted

    def retained_states(self) -> AbstractContextManager[None]:
        """A context in which the states of a step are not released."""
        return self.states.retained()

    def drafts(self, inputs: DraftInputs, computed: tuple[Tensor, AcceptedBatch]) -> Iterator[Tensor]:
        states, accepted = computed
        return self._drafts.drafts(inputs, self._passes.draft_step(inputs, accepted), states, self.head.logits(states))
