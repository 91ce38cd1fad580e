"""Dynamic trees of drafts of a recurrent head, as in EAGLE-2 (arXiv 2406.16858): their shape follows the probabilities of the head.

The score of a node is the product of the head's probabilities on the path to it. After each of the W best nodes of a depth, the head
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
from stoker.core.forward_batch import KVCache
from stoker.runtime.heads.head import RecurrentHead
from stoker.runtime.heads.recurrent_drafts import RecurrentDrafts
from stoker.runtime.heads.sampled_drafts import choose_scored
from stoker.runtime.worker.accepted_batch import AcceptedBatch
from stoker.runtime.worker.draft_batch import SpareBlocks
from stoker.runtime.worker.drafter import DraftInputs


class DynamicDrafts(RecurrentDrafts):
    """Runs a recurrent head that drafts dynamic trees."""

    def __init__(self, head: RecurrentHead, caches: list[KVCache], spare: SpareBlocks, vocab_size: int, tree: DynamicTree) -> None:
        """As of `RecurrentDrafts`."""
        super().__init__(head, caches, spare, vocab_size)
        self.tree = tree
        self._bits = 1 << torch.arange(tree.num_expanded, device=caches[0].keys.device)

    def drafts(self, inputs: DraftInputs, x: Tensor, accepted: AcceptedBatch) -> Iterator[Tensor]:
        """int32 [N, S]: each draft and its parent, see `PARENT_SHIFT`, the best ones first. `x` are the outputs of `compute`."""
        step, count, width = self._first_step(inputs, accepted), len(inputs.rows), self.tree.width
        # Of the nodes that are expanded, [S, P]: scores, indices among all candidates from 1 on, and masks of the head's attention.
        scores, nodes, masks = x.new_zeros(count, 1, dtype=torch.float32), *torch.zeros(2, count, 1, dtype=torch.int64, device=x.device)
        found: list[tuple[Tensor, Tensor, Tensor]] = []  # token, score and parent of the candidates of each depth
        num_found = 0
        for depth in range(self.tree.depth):
            num_parents = len(x) // count
            logits, counters = self.head.logits(x), step.counters(depth, num_parents)
            scored = choose_scored(logits, self.head.target_ids, inputs, counters, self.vocab_size, width)
            tokens, logprobs = (part.view(count, -1) for part in scored)
            candidates = scores.repeat_interleave(width, 1) + logprobs
            found.append((tokens, candidates, nodes.repeat_interleave(width, 1)))
            if depth + 1 == self.tree.depth:
                break
            scores, best = candidates.topk(width, dim=1)
            parents, first = best // width, depth * width
            nodes = num_found + 1 + best
            masks = masks.gather(1, parents) | self._bits[first : first + width]
            num_found += num_parents * width
            x = x.view(count, num_parents, -1)
            x = x.gather(1, parents.unsqueeze(2).expand(-1, -1, x.shape[2])).flatten(0, 1)
            x = self.head(
                x, self._level_batch(tokens.gather(1, best).flatten(), step, 1 + depth, width, first, masks.flatten()), self.caches
            )
        yield self._best(*(torch.cat(parts, dim=1) for parts in zip(*found, strict=True))).t()

    def _best(self, tokens: Tensor, scores: Tensor, parents: Tensor) -> Tensor:
        """int32 [S, N], the best of the candidates [S, M]. `parents` are indices of candidates from 1 on."""
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, : len(self.tree)]  # stable: a parent precedes its children
        numbers = torch.arange(1, 1 + best.shape[1], device=best.device).expand_as(best)
        chosen = parents.new_zeros(len(parents), 1 + parents.shape[1]).scatter(1, 1 + best, numbers)
        return (tokens.gather(1, best) | chosen.gather(1, parents.gather(1, best)) << PARENT_SHIFT).int()
