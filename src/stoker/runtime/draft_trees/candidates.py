"""The candidates of dynamic trees, as in EAGLE-2 (arXiv 2406.16858): the shape of a tree follows the probabilities of the drafter.

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

import torch
from torch import Tensor

from stoker.base.draft_tree import PARENT_SHIFT, DynamicTree


class Candidates:
    """The candidates of S sequences, which are added depth by depth. At first, the root of each sequence is expanded."""

    def __init__(self, tree: DynamicTree, num_sequences: int, device: torch.device) -> None:
        self.tree = tree
        # Of the P nodes that are expanded, [S, P]: logarithms of scores, and indices among all candidates from 1 on.
        self._scores = torch.zeros(num_sequences, 1, device=device)
        self._nodes = torch.zeros(num_sequences, 1, dtype=torch.int64, device=device)
        self._found: list[tuple[Tensor, Tensor, Tensor]] = []  # token, score and parent of the candidates of each depth
        self._num_before = 0  # candidates of the depths before the newest one

    def add(self, tokens: Tensor, logprobs: Tensor) -> None:
        """Add W candidates after each of the P nodes: int32 [S, P, W], and the logarithms of their probabilities, float32."""
        scores = (self._scores.unsqueeze(2) + logprobs).flatten(1)
        self._found.append((tokens.flatten(1), scores, self._nodes.repeat_interleave(self.tree.width, 1)))

    def expand(self) -> tuple[Tensor, Tensor]:
        """Expand the W best of the newest candidates. Returns their tokens and the indices of their parents among the P nodes, [S, W]."""
        tokens, scores, _ = self._found[-1]
        self._scores, best = scores.topk(self.tree.width, dim=1)
        self._nodes = self._num_before + 1 + best
        self._num_before += scores.shape[1]
        return tokens.gather(1, best), best // self.tree.width

    def best(self) -> Tensor:
        """int32 [N, S]: each draft of the tree and its parent, see `PARENT_SHIFT`, the best ones first."""
        tokens, scores, parents = (torch.cat(parts, dim=1) for parts in zip(*self._found, strict=True))
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, : len(self.tree)]  # stable: a parent precedes its children
        numbers = torch.arange(1, 1 + best.shape[1], device=best.device).expand_as(best)
        chosen = parents.new_zeros(len(parents), 1 + parents.shape[1]).scatter(1, 1 + best, numbers)
        return (tokens.gather(1, best) | chosen.gather(1, parents.gather(1, best)) << PARENT_SHIFT).int().t()
