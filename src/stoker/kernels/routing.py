"""Values of the mixture-of-experts ops."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RoutingParams:
    """How router logits become expert choices."""

    top_k: int
    score: str = "softmax"  # softmax, sigmoid: over all experts; softmax_topk: softmax over the chosen logits
    renormalize: bool = True  # the chosen weights are divided by their sum
    scale: float = 1.0  # then multiplied by this
    num_groups: int = 1  # experts are chosen from the `top_groups` best of so many equal groups
    top_groups: int = 1
    group_score: str = "max"  # a group's score: its best expert (max) or the sum of its two best (top2)


@dataclass(frozen=True, slots=True)
class Routing:
    """The choices of a step: T tokens, k experts each. A choice is token × k + its number."""

    weights: Tensor  # float32 [T, k]
    order: Tensor  # int32 [T × k]: choices sorted by expert, then by token
    offsets: Tensor  # int32 [num_experts + 1]: choices order[offsets[e] : offsets[e + 1]] are expert e's
    # Where experts are on several ranks, `offsets` are a rank's own, and do not cover all of order: rows of the rest are zeros.
    is_whole: bool = True

    @property
    def top_k(self) -> int:
        return self.weights.shape[1]
