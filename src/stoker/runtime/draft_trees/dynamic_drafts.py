"""Dynamic trees of drafts, as in EAGLE-2 (arXiv 2406.16858): their shape follows the probabilities of the drafter.

The score of a node is the product of the drafter's probabilities on the path to it. After each of the W best nodes of a depth, the drafter
proposes its W most likely tokens; the W best of these W × W candidates are the nodes that are expanded at the next depth. Of all
candidates, the N best are the tree. A score is at most that of the parent, so that the parent of a chosen node is chosen, and precedes it:

    depth 1     W candidates, all expanded
    depth 2     W × W candidates, the W best expanded
    ...
    depth D     W × W candidates

The same tokens are accepted as of static trees: verification compares them with the tokens that the model chooses, whatever the shape.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from stoker.base.draft_tree import PARENT_SHIFT, DynamicTree
from stoker.runtime.draft_trees.level_drafts import DraftStep, LevelDrafts, LevelModel
from stoker.runtime.draft_trees.sampled_drafts import choose_scored
from stoker.runtime.worker.drafter import DraftInputs


class DynamicDrafts(LevelDrafts):
    """Drafts dynamic trees."""

    def __init__(self, model: LevelModel, tree: DynamicTree, device: torch.device) -> None:
        super().__init__(model)
        self.tree = tree
        self._bits = 1 << torch.arange(tree.num_expanded, device=device)

    def drafts(self, inputs: DraftInputs, step: DraftStep, states: Tensor, logits: Tensor) -> Iterator[Tensor]:
        """int32 [N, S]: each draft and its parent, see `PARENT_SHIFT`, the best ones first."""
        count, width, model = len(inputs.rows), self.tree.width, self.model
        # Of the nodes that are expanded, [S, P]: scores, indices among all candidates from 1 on, and masks of their attention.
        scores = states.new_zeros(count, 1, dtype=torch.float32)
        nodes, masks = torch.zeros(2, count, 1, dtype=torch.int64, device=states.device)
        found: list[tuple[Tensor, Tensor, Tensor]] = []  # token, score and parent of the candidates of each depth
        num_found, num_parents = 0, 1
        for depth in range(self.tree.max_depth):
            counters = step.counters(depth, num_parents)
            scored = choose_scored(logits, model.target_ids, inputs, counters, model.num_ids, width)
            tokens, logprobs = (part.view(count, -1) for part in scored)
            candidates = scores.repeat_interleave(width, 1) + logprobs
            found.append((tokens, candidates, nodes.repeat_interleave(width, 1)))
            if depth + 1 == self.tree.max_depth:
                break
            scores, best = candidates.topk(width, dim=1)
            parents, first = best // width, depth * width
            nodes = num_found + 1 + best
            masks = masks.gather(1, parents) | self._bits[first : first + width]
            num_found += num_parents * width
            states = states.unflatten(0, (count, num_parents))
            states = states.gather(1, parents.unsqueeze(2).expand(-1, -1, states.shape[2])).flatten(0, 1)
            batch = self.level_batch(tokens.gather(1, best).flatten(), step, 1 + depth, width, first, masks.flatten())
            states, logits = model.compute_level(states, batch)
            num_parents = width
        yield self._best(*(torch.cat(parts, dim=1) for parts in zip(*found, strict=True))).t()

    def _best(self, tokens: Tensor, scores: Tensor, parents: Tensor) -> Tensor:
        """int32 [S, N], the best of the candidates [S, M]. `parents` are indices of candidates from 1 on."""
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, : len(self.tree)]  # stable: a parent precedes its children
        numbers = torch.arange(1, 1 + best.shape[1], device=best.device).expand_as(best)
        chosen = parents.new_zeros(len(parents), 1 + parents.shape[1]).scatter(1, 1 + best, numbers)
        return (tokens.gather(1, best) | chosen.gather(1, parents.gather(1, best)) << PARENT_SHIFT).int()
