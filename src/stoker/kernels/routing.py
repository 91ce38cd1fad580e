"""Argument types of the mixture-of-experts ops."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RoutingParams:
    """How experts are chosen from router logits."""

    top_k: int
    # softmax or sigmoid of all logits; softmax_topk: softmax of the chosen logits. sparsemixer (arXiv 2409.12136): the weight of the i-th
    # expert is its softmax over the experts that were not chosen before it and whose logits are near its own, as `jitter` says.
    score: str = "softmax"
    renormalize: bool = True  # divide the chosen weights by their sum
    scale: float = 1.0  # multiplies the weights after that
    num_groups: int = 1  # experts are chosen from the `top_groups` best of this number of equal groups
    top_groups: int = 1
    jitter: float = 0.01  # sparsemixer: near are logits x with (best - x) / max(|x|, best) of at most 2 × jitter
    group_score: str = "max"  # the score of a group: of its best expert (max), or the sum of its two best (top2)


@dataclass(frozen=True, slots=True)
class Routing:
    """The k experts of each of the T tokens of a step. Choice token × k + i is the i-th expert of a token."""

    weights: Tensor  # float32 [T, k]
    order: Tensor  # int32 [T × k]: choices sorted by expert, then by token
    offsets: Tensor  # int32 [num_experts + 1]: choices order[offsets[e] : offsets[e + 1]] belong to expert e
    # False with expert parallelism: `offsets` covers the experts of this rank only, and rows of other experts are zeros.
    is_whole: bool = True
    # int32 [k]: the expert of each choice in `order`; of one token, so that kernels need not search `offsets`. None: they do.
    experts: Tensor | None = None

    @property
    def top_k(self) -> int:
        """The number k of experts per token."""
        return self.weights.shape[1]

    @property
    def tokens(self) -> Tensor:
        """int32 [T × k]: the token of each choice in `order`."""
        return self.order // self.top_k
