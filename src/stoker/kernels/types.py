"""Values that ops share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

MAX_MEAN_HEAD_SIZE = 128  # features of the largest head whose keys are stored less a mean; smaller ones are powers of two
MEAN_TOKENS = 1024  # positions whose keys have one mean (`KVCache.key_mean`); tiles of keys are powers of two, and divide it


def supports_key_mean(head_size: int) -> bool:
    """Whether kernels take keys of so many features stored less a mean."""
    return head_size <= MAX_MEAN_HEAD_SIZE and head_size & (head_size - 1) == 0


class Rotary(NamedTuple):
    """How a step's tokens rotate: see `ops.rope_store`."""

    positions: Tensor  # int32 [T]
    cos_sin: Tensor | None
    interleaved: bool


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What differs between attention layers."""

    scale: float  # multiplies q · k
    window: int | None = None  # a query sees itself and window - 1 keys before it
    chunk: int | None = None  # a query sees keys of its own chunk of positions only
    softcap: float | None = None  # scores become cap × tanh(scores ÷ cap)
    alibi_slopes: Tensor | None = None  # float32 [heads]: slope × (key position - query position) is added to the scaled scores
    sinks: Tensor | None = None  # float32 [heads]: a logit that joins the softmax and has no value
    before_fused_layer: bool = False  # of few tokens, what follows is `ops.fused_layer`, which asks for its weights while this still runs


@dataclass(slots=True)
class DrawParams:
    """How each of L rows draws its token. Tensors are [L] on the logits' device."""

    temperature: Tensor  # float32; 0 is greedy
    top_k: Tensor  # int32; 0 is off
    top_p: Tensor  # float32; 1 is off
    min_p: Tensor  # float32; 0 is off
    seeds: Tensor  # int64
    counters: Tensor  # int32, the position of the token to draw: a (seed, counter) pair makes one number
    all_greedy: bool  # known on the host: every temperature is 0


@dataclass(frozen=True, slots=True)
class Fusion:
    """What is computed around a linear's product: gate(norm(x) Wᵀ + bias) + residual. Each part is optional."""

    norm_kind: str | None = None  # rms or layer, over x's last axis
    norm_weight: Tensor | None = None  # [in_features]
    norm_bias: Tensor | None = None
    norm_eps: float = 0.0
    gate: str | None = None  # the weight's first half makes gates, the second what they gate: act(gate) × up
    residual: Tensor | None = None  # [T, out_features], dense; added last
    input_gate: str | None = None  # x holds gates, then what they gate: the input is act(gates) × it

    @property
    def norm_apart(self) -> bool:
        """Whether the norm needs a pass before the product: kernels fold an RMS norm with weights into it, and no other."""
        return self.norm_kind is not None and (self.norm_kind != "rms" or self.norm_weight is None)


PLAIN = Fusion()
