"""Dynamic trees of a drafter that computes one level after another."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from stoker.base.draft_tree import DynamicTree
from stoker.runtime.draft_trees.candidates import Candidates
from stoker.runtime.draft_trees.level_drafts import DraftStep, LevelDrafts, LevelModel
from stoker.runtime.draft_trees.sampled_drafts import choose_scored
from stoker.runtime.worker.drafter import DraftInputs


class DynamicDrafts(LevelDrafts):
    """Drafts dynamic trees: the nodes that `Candidates` expands at one depth are a level."""

    def __init__(self, model: LevelModel, tree: DynamicTree, device: torch.device) -> None:
        super().__init__(model)
        self.tree = tree
        self._bits = 1 << torch.arange(tree.num_expanded, device=device)

    def drafts(self, inputs: DraftInputs, step: DraftStep, states: Tensor, logits: Tensor) -> Iterator[Tensor]:
        """int32 [N, S]: see `Candidates.best`."""
        count, width, model = len(inputs.rows), self.tree.width, self.model
        candidates, num_nodes = Candidates(self.tree, count, states.device), 1
        masks = torch.zeros(count, 1, dtype=torch.int64, device=states.device)  # of the attention of the nodes that are expanded
        for depth in range(self.tree.max_depth):
            if depth:
                tokens, parents = candidates.expand()
                first = (depth - 1) * width
                masks = masks.gather(1, parents) | self._bits[first : first + width]
                states = states.unflatten(0, (count, num_nodes))
                states = states.gather(1, parents.unsqueeze(2).expand(-1, -1, states.shape[2])).flatten(0, 1)
                batch = self.level_batch(tokens.flatten(), step, depth, width, first, masks.flatten())
                states, logits = model.compute_level(states, batch)
                num_nodes = width
            counters = step.counters(depth, num_nodes)
            scored = choose_scored(logits, model.target_ids, inputs, counters, model.num_ids, width)
            candidates.add(*(part.unflatten(0, (count, num_nodes)) for part in scored))
        yield candidates.best()
