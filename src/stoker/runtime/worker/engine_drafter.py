"""How a draft engine drafts: a second, smaller engine that drafts tokens for the first one, in the same executor.

After each step, the draft engine computes the tokens of the step and the newest token of each sequence in one pass, which yields the first
draft, and then one pass for each further draft of a chain, or for each further depth of a tree (`draft_trees/level_drafts.py`). A draft is
sampled with the parameters of the sequence and with the random number of its position. The model samples the same position with the same
number, so that both choose the same token where their distributions agree. The tokens are those of plain decoding with the same seed, and
so is their distribution.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from stoker.base.draft_tree import DraftTree, DynamicTree
from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.layers.decoder import Decoder
from stoker.runtime.draft_trees.kinds import make_drafts
from stoker.runtime.draft_trees.level_drafts import DraftStep, LevelModel
from stoker.runtime.worker.accepted_batch import accepted_batch
from stoker.runtime.worker.draft_batch import SpareBlocks, without_logits
from stoker.runtime.worker.drafter import Drafter, DraftInputs


class EngineDrafter(Drafter, LevelModel):
    """Drafts with the model of an engine. Its caches have the blocks of the model that verifies, and spare blocks."""

    def __init__(self, model: Decoder, caches: list[KVCache], spare: SpareBlocks, tree: DraftTree | DynamicTree, num_ids: int) -> None:
        """`num_ids`: the smaller one of the vocabularies of both models. Larger ids are padding, which is never drafted."""
        self.model, self.caches, self.num_ids, self.block_size = model, caches, num_ids, spare.block_size
        self.num_drafts, self.is_tree = len(tree), not tree.is_chain
        self._spare, self._drafts, self._limit = spare, make_drafts(self, tree, model.device), model.config.max_positions

    def compute(self, inputs: DraftInputs) -> tuple[DraftStep, Tensor] | None:
        """Where drafts are computed, and the logits of the first ones; None if no sequence samples."""
        if not len(inputs.rows):
            self.catch_up(inputs.batch)
            return None
        batch, step = self._spare.first_pass(inputs, accepted_batch(inputs), self._limit)
        return step, self._logits(batch)

    def drafts(self, inputs: DraftInputs, computed: tuple[DraftStep, Tensor]) -> Iterator[Tensor]:
        step, logits = computed
        return self._drafts.drafts(inputs, step, logits.new_empty(len(logits), 0), logits)

    def compute_level(self, states: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """No states: the keys of the ancestors are all that a node needs. Nodes behind the last position are never verified."""
        batch.positions = batch.positions.clamp(max=self._limit - 1)
        if not batch.is_decode:
            batch.logits_idx = torch.arange(batch.num_tokens, dtype=torch.int32, device=states.device)
        return states.new_empty(batch.num_tokens, 0), self._logits(batch)

    def catch_up(self, batch: ForwardBatch) -> None:
        self._logits(without_logits(batch))

    def _logits(self, batch: ForwardBatch) -> Tensor:
        """Logits after a batch. Ids that the draft engine does not have are padding of the model's vocabulary; it reads another id."""
        batch.token_ids = batch.token_ids.clamp(max=self.model.config.vocab_size - 1)
        return self.model(batch, list(self.caches))[:, : self.num_ids]
