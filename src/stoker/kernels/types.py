"""Argument types of several ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.distributed.group import SINGLE, Group

MAX_MEAN_HEAD_SIZE = 128  # the largest head size for which keys can be stored less a mean (`KVCache.key_mean`)
MEAN_TOKENS = 1024  # positions that share a mean; a multiple of every key tile
SHORT_SPLIT = 512  # tokens: splits of decode rows are at least as long. Shorter ones take longer to combine than they save
LONG_SPLIT = 8192  # tokens: longer splits are cut again, so that the CTAs of one row do not outlast the rest of the batch


def supports_key_mean(head_size: int) -> bool:
    """Whether kernels support heads of `head_size` features if a mean is subtracted from keys before they are stored."""
    return head_size <= MAX_MEAN_HEAD_SIZE and head_size & (head_size - 1) == 0


class HeadNorms(NamedTuple):
    """RMS norms over the features of each head of queries and keys. Weights are those of all heads, [D]; None: no weights."""

    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float


class Rotary(NamedTuple):
    """The rotary position embedding of a step, and the norms before it: see `ops.rope_store`."""

    positions: Tensor  # int32 [T]
    cos_sin: Tensor | None  # float32 [max_positions, dim]: dim / 2 cosines, then dim / 2 sines; None: no rotation
    interleaved: bool  # features 2i and 2i + 1 are a pair; otherwise i and i + dim / 2
    norms: HeadNorms | None = None  # of queries and keys before they are rotated


class ClippedGate(NamedTuple):
    """The gate of gpt-oss: (up + 1) × gate × sigmoid(alpha × gate), with gate clamped to at most `limit`, and up to ± limit."""

    limit: float
    alpha: float


Gate = str | ClippedGate  # act(gate) × up with an activation of `reference.activation.ACTIVATIONS`, or the gate of gpt-oss


class TokenScores(NamedTuple):
    """How well the logits of some positions predict their next tokens: see `ops.score_tokens`."""

    likelihoods: Tensor  # float32 [T]: log_softmax(logits)[target]
    best: Tensor  # int32 [T]: argmax(logits)


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """The options of attention that may differ between layers."""

    scale: float  # score = scale × q · k
    window: int | None = None  # a query attends to itself and the window − 1 keys before it
    chunk: int | None = None  # a query attends to keys of its own chunk of positions only
    softcap: float | None = None  # scores become softcap × tanh(scores ÷ softcap)
    alibi_slopes: Tensor | None = None  # float32 [heads]: slope × (key position - query position) is added to the scaled scores
    sinks: Tensor | None = None  # float32 [heads]: a logit in the softmax that has no value
    # The next launch of a decode step of one or two rows is `ops.fused_layer`, whose kernel loads weights while attention still runs.
    before_fused_layer: bool = False


@dataclass(frozen=True, slots=True)
class Mamba2Params:
    """The parameters of the recurrence of a Mamba 2 block: see `ops.mamba2`. Tensors are float32 [heads]."""

    a: Tensor  # below 0: the state decays by exp(a × time step)
    dt_bias: Tensor  # added to the time step before the softplus
    skip: Tensor  # multiplies the input that is added to the output
    min_step: float = 0.0
    max_step: float | None = None


@dataclass(frozen=True, slots=True)
class SelectiveScanParams:
    """The parameters of the recurrence of a Mamba block: see `ops.selective_scan`. Tensors are float32."""

    a: Tensor  # [features, elements], below 0: elements of the state decay by exp(a × time step)
    dt_bias: Tensor  # [features], added to the time step before the softplus
    skip: Tensor  # [features], multiplies the input that is added to the output


@dataclass(frozen=True, slots=True)
class DeltaParams:
    """The parameters of the recurrence of a gated delta net: see `ops.delta_rule`. Tensors are float32 [heads]."""

    a: Tensor  # below 0: the state decays by exp(a × time step)
    dt_bias: Tensor  # added to the time step before the softplus


class RowTokens(NamedTuple):
    """What the device knows of the tokens of the N rows of the device buffers, and of a last row for padding."""

    lengths: Tensor  # int32 [N + 1], prompt and generated tokens
    text: Tensor | None  # int32 [N + 1, W]: the newest W tokens of each row, position p at p mod W; None: drafts are not looked up


@dataclass(slots=True)
class DrawParams:
    """The sampling parameters of L rows. Tensors are [L], on the device of the logits."""

    temperature: Tensor  # float32; 0 is greedy
    top_k: Tensor  # int32; 0 is off
    top_p: Tensor  # float32; 1 is off
    min_p: Tensor  # float32; 0 is off
    seeds: Tensor  # int64
    counters: Tensor  # int32: the position of the token to draw. Each (seed, counter) gives one random number
    all_greedy: bool  # True if the host can tell that every temperature is 0


@dataclass(frozen=True, slots=True)
class Fusion:
    """What is computed around the product of a linear: gate(norm(input_gate(x)) Wᵀ + bias) + residual. Each part is optional."""

    norm_kind: str | None = None  # rms or layer, over the last axis
    norm_weight: Tensor | None = None  # [in_features]
    norm_bias: Tensor | None = None
    norm_eps: float = 0.0
    gate: str | None = None  # an activation: the first half of the rows computes gates, the second half ups; the result is act(gate) × up
    residual: Tensor | None = None  # [T, out_features], dense; added last
    input_gate: str | None = None  # an activation: x contains gates, then ups; the input is act(gate) × up

    @property
    def needs_separate_norm(self) -> bool:
        """Whether the norm needs a separate pass before the product: kernels fuse only an RMS norm with weights."""
        return self.norm_kind is not None and (self.norm_kind != "rms" or self.norm_weight is None)


PLAIN = Fusion()


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """One linear of a `FusedLayer`."""

    alone: Callable[[Tensor, Fusion], Tensor]  # the linear as a call of its own
    weight: PackedWeight | None  # None: the linear does more than a product with one weight, so no kernel of several linears supports it
    fusion: Fusion

    @property
    def outputs(self) -> int:
        """The number of output features: half of the rows of a gated weight."""
        assert self.weight is not None
        return self.weight.out_features // (1 if self.fusion.gate is None else 2)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class FusedLayer:
    """The linears from a layer's attention to the queries, keys and values of the next layer (None after the last layer)."""

    out: FusedLinear  # of the attention output; the residual stream is added
    up: FusedLinear  # of the normed residual stream; gated
    down: FusedLinear  # the residual stream is added
    qkv: FusedLinear | None  # of the normed residual stream
    group: Group = SINGLE  # over which the results of `out` and `down` are summed; their `alone` includes the sum

    @property
    def linears(self) -> tuple[FusedLinear, ...]:
        """The three or four linears that exist, in the order of computation."""
        return (self.out, self.up, self.down) if self.qkv is None else (self.out, self.up, self.down, self.qkv)
