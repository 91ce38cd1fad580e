"""The one place where a device is looked at: each op runs its Triton launcher on CUDA tensors, its reference elsewhere.

Every op is a quartet: the name here, a launcher and a kernel in `triton/`, and a plain-torch `reference/` with the same
file name and signature, which is the CPU path and the test oracle. For steps of few rows some have a C kernel too, in `native/`,
which runs on the CPU where there is a compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stoker.distributed.group import Group
from stoker.kernels.quantized import FusedLayer, GroupedInt8Weight, Int4Weight, RowWeight, StoredExperts
from stoker.kernels.reference import activation as activation_ref
from stoker.kernels.reference import all_reduce as all_reduce_ref
from stoker.kernels.reference import attention as attention_ref
from stoker.kernels.reference import embedding as embedding_ref
from stoker.kernels.reference import fused_layer as fused_layer_ref
from stoker.kernels.reference import linear as linear_ref
from stoker.kernels.reference import moe as moe_ref
from stoker.kernels.reference import norm as norm_ref
from stoker.kernels.reference import quant_fp8 as fp8_ref
from stoker.kernels.reference import quant_int4 as int4_ref
from stoker.kernels.reference import quant_int8 as int8_ref
from stoker.kernels.reference import rope as rope_ref
from stoker.kernels.reference import sampling as sampling_ref
from stoker.kernels.routing import Routing, RoutingParams
from stoker.kernels.types import PLAIN, AttentionParams, DrawParams, Fusion, Rotary

if TYPE_CHECKING:
    from stoker.core.forward_batch import ForwardBatch, KVCache

_GPU: dict[ModuleType, ModuleType] = {}


def use_launchers() -> None:
    """Bind the Triton launchers. Without a device they take meta tensors, to be compiled ahead (`kernels.triton.ahead`)."""
    from stoker.kernels.triton import activation, all_reduce, embedding, norm, rope, sampling
    from stoker.kernels.triton.attention import launch as attention
    from stoker.kernels.triton.fused_layer import launch as fused_layer_launcher
    from stoker.kernels.triton.gemm.dense import launch as linear
    from stoker.kernels.triton.gemm.quantized import fp8 as quant_fp8
    from stoker.kernels.triton.gemm.quantized import int4 as quant_int4
    from stoker.kernels.triton.gemm.quantized import int8 as quant_int8
    from stoker.kernels.triton.moe import launch as moe

    _GPU.update({
        activation_ref: activation, all_reduce_ref: all_reduce, attention_ref: attention, embedding_ref: embedding, linear_ref: linear,
        moe_ref: moe, norm_ref: norm, fp8_ref: quant_fp8, int4_ref: quant_int4, int8_ref: quant_int8, rope_ref: rope,
        sampling_ref: sampling, fused_layer_ref: fused_layer_launcher,
    })  # fmt: skip


if torch.cuda.is_available():
    use_launchers()


@cache
def _cpu() -> dict[ModuleType, ModuleType]:
    """The launchers of C kernels; they are compiled by the first op of a CPU, if they were not yet."""
    from stoker.kernels.native import attention, fused_layer, library, linear, quant_int4, quant_int8, rope

    if isinstance(library.kernels(), str):
        return {}
    return {
        attention_ref: attention, linear_ref: linear, int4_ref: quant_int4, int8_ref: quant_int8, rope_ref: rope,
        fused_layer_ref: fused_layer,
    }  # fmt: skip


def _pick(x: Tensor, reference: ModuleType) -> ModuleType:
    return (_cpu() if x.is_cpu else _GPU).get(reference, reference)


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str) -> Tensor:
    """RMS norm (arXiv 1910.07467) or layer norm over the last axis; `kind` is rms or layer. Arithmetic in float32."""
    return _pick(x, norm_ref).norm(x, weight, bias, eps, kind)


def all_reduce(x: Tensor, group: Group, residual: Tensor | None = None) -> Tensor:
    """The sum of x over the group's ranks, + `residual`, on every rank, bit for bit the same. May overwrite x.

    A GPU kernel does both, for messages of a decode step.
    """
    return _pick(x, all_reduce_ref).all_reduce(x, group, residual)


def check_inboxes(group: Group) -> None:
    """Before the first sum: let a group whose devices cannot write into each other's memory do without. Every rank calls it."""
    if group.inboxes is not None:
        from stoker.kernels.triton import all_reduce

        all_reduce.check_inboxes(group)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """act(gate) × up for [..., 2 × size] holding gate then up. Returns [..., size]."""
    return _pick(gate_up, activation_ref).gated(gate_up, activation)


def activate(x: Tensor, activation: str) -> Tensor:
    """act(x), elementwise."""
    return _pick(x, activation_ref).activate(x, activation)


def resolve(token_ids: Tensor, last_ids: Tensor) -> Tensor:
    """token_ids [T] int32, where -1 - r stands for last_ids[r]: a token that was sampled but not read back."""
    return _pick(token_ids, embedding_ref).resolve(token_ids, last_ids)


def remember(last_ids: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """last_ids[rows[i]] = token_ids[i], for `resolve`; int32. -1, where there was no token, becomes 0: some token that exists."""
    _pick(token_ids, embedding_ref).remember(last_ids, rows, token_ids)


def embedding(token_ids: Tensor, table: Tensor) -> Tensor:
    """Rows of `table` [vocab, hidden] for int32 `token_ids` [T]."""
    return _pick(table, embedding_ref).embedding(token_ids, table)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, fusion: Fusion = PLAIN) -> Tensor:
    """x [M, K] × weight [N, K] transposed, + bias [N], and what `fusion` puts around it. Returns [M, N], or [M, N / 2] when gated."""
    return _pick(x, linear_ref).linear(x, weight, bias, fusion)


def around(x: Tensor, fusion: Fusion, product: Callable[[Tensor], Tensor]) -> Tensor:
    """What a linear without fused kernels does: the fusion's input gate and norm, `product`, then the gate and the residual."""
    if fusion.input_gate is not None:
        x = gated(x, fusion.input_gate)
    if fusion.norm_kind is not None:
        x = norm(x, fusion.norm_weight, fusion.norm_bias, fusion.norm_eps, fusion.norm_kind)
    y = product(x)
    if fusion.gate is not None:
        y = gated(y, fusion.gate)
    return y if fusion.residual is None else y + fusion.residual


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, fusion: Fusion = PLAIN) -> Tensor:
    """`linear` with weight int8 [N, K] × scale float32 [N]; activations stay as they are.

    A GPU kernel widens a tile of the weight in registers to x's dtype, sums in float32, and multiplies by scale once at the end.
    """
    return _pick(x, int8_ref).int8_linear(x, weight, scale, bias, fusion)


def takes_int8_groups(weight: GroupedInt8Weight) -> bool:
    """Whether `grouped_int8_linear` reads the weight as it is stored; else it is better widened once, at load."""
    return weight.codes.is_cpu and _pick(weight.codes, int8_ref).takes_groups(weight)


def grouped_int8_linear(x: Tensor, weight: GroupedInt8Weight, bias: Tensor | None = None, fusion: Fusion = PLAIN) -> Tensor:
    """`linear` with int8 in groups, where `takes_int8_groups`: on a CPU, whose kernel widens codes in registers."""
    return _pick(x, int8_ref).grouped_int8_linear(x, weight, bias, fusion)


def int8_embedding(token_ids: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of weight int8 [vocab, hidden] × scale float32 [vocab] in `dtype`, for int32 `token_ids` [T]."""
    return _pick(weight, int8_ref).int8_embedding(token_ids, weight, scale, dtype)


def w8a8_linear(
    x: Tensor, weight: Tensor, scale: Tensor, input_scale: Tensor | None, bias: Tensor | None = None, fusion: Fusion = PLAIN
) -> Tensor:
    """`linear` of int8 × int8: weight int8 [N, K] × scale float32 [N].

    Activations become round(x ÷ s) within ± 127, s being `input_scale` float32 [1], or each row's largest magnitude ÷ 127 when that
    is None. A GPU kernel rounds in the norm or activation before it, sums in int32, and multiplies by s × scale in the epilogue.
    """
    return _pick(x, int8_ref).w8a8_linear(x, weight, scale, input_scale, bias, fusion)


def pack_int4(weight: Int4Weight) -> Int4Weight:
    """The weight with what its device's `int4_linear` reads, if that is not what is stored. Called once, at load."""
    return _pick(weight.codes, int4_ref).pack_int4(weight)


def int4_linear(x: Tensor, weight: Int4Weight, bias: Tensor | None = None, fusion: Fusion = PLAIN) -> Tensor:
    """`linear` with a groupwise int4 weight.

    A GPU kernel widens codes in registers; few rows: one pass over the codes, at the speed of memory; many rows: tiles for tensor cores.
    """
    return _pick(x, int4_ref).int4_linear(x, weight, bias, fusion)


def int4_row_weight(weight: Int4Weight, bias: Tensor | None) -> RowWeight | None:
    """A packed weight [N, K / 2] for `fused_layer`, where its device's packing and its groups are such."""
    return _pick(weight.codes, int4_ref).int4_row_weight(weight, bias)


def prepare_fp8(weight: Tensor) -> Tensor:
    """The weight as its device's `fp8_linear` reads it: as stored, or widened where there is no e4m3 arithmetic. Called once, at load."""
    return _pick(weight, fp8_ref).prepare_fp8(weight)


def prepare_block_fp8(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """The same for `block_fp8_linear`."""
    return _pick(weight, fp8_ref).prepare_block_fp8(weight, scale, block)


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    activations: str,
    input_scale: Tensor | None = None,
    bias: Tensor | None = None,
    fusion: Fusion = PLAIN,
) -> Tensor:
    """`linear` with weight float8_e4m3fn [N, K] × scale float32 [N].

    `activations`: none (as they are), token (e4m3 by each row's largest magnitude ÷ 448) or static (e4m3 by `input_scale` float32 [1]).
    A GPU kernel multiplies e4m3 by e4m3 (`torch._scaled_mm` for many rows) and sums in float32.
    """
    return _pick(x, fp8_ref).fp8_linear(x, weight, scale, activations, input_scale, bias, fusion)


def block_fp8_linear(
    x: Tensor, weight: Tensor, scale: Tensor, block: tuple[int, int], bias: Tensor | None = None, fusion: Fusion = PLAIN
) -> Tensor:
    """`linear` with weight float8_e4m3fn [N, K] and scale float32 [ceil(N / rows), ceil(K / columns)], one a block of (rows, columns).

    Activations are rounded to e4m3 with a scale for every `columns` neighbours of a row (arXiv 2412.19437, section 3.3.2).
    """
    return _pick(x, fp8_ref).block_fp8_linear(x, weight, scale, block, bias, fusion)


def supports_fused_layer(layer: FusedLayer, rows: int) -> bool:
    """Whether `fused_layer` computes `rows` rows with these weights, on their device, in one launch."""
    weight = layer.out.weight
    return weight is not None and _pick(weight.weight, fused_layer_ref).supports_fused_layer(layer, rows)


def fused_layer(x: Tensor, residual: Tensor, layer: FusedLayer) -> tuple[Tensor, Tensor | None]:
    """Everything between the attention of one layer and the attention of the next.

    x [T, K] is the output of attention, `residual` [T, hidden] the residual stream before it. Computes

        h = residual + out(x)
        y = h + down(up(norm(h)))        # up is gated: act(gate) × up
        qkv = next_qkv(norm(y))

    and returns (y [T, hidden], qkv [T, qkv features]); qkv is None after the last layer. Where `supports_fused_layer` holds, a GPU kernel
    does all four products in one launch.
    """
    return _pick(x, fused_layer_ref).fused_layer(x, residual, layer)


def rope_store(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor | None, interleaved: bool, cache: KVCache, slots: Tensor
) -> Tensor:
    """Rotate q and k (the first `cos_sin.shape[1]` features of each head), store k and v in the cache, return q.

    q [T, heads, D], k [T, kv_heads, D], v [T, kv_heads, Dv]: views with unit stride in the last axis; q may be rotated in place.
    cos_sin float32 [max_positions, dim] holds dim/2 cosines, then dim/2 sines; None: no rotation.
    slots int32 [T]: block × block_size + offset; -1 stores nowhere. A quantized cache stores round(x ÷ scale),
    and with `key_balance` it has other coordinates (`reference.rope.spread`), in which q is returned. With `key_mean`, `positions` are
    the tokens' places in their sequences.
    """
    return _pick(q, rope_ref).rope_store(q, k, v, positions, cos_sin, interleaved, cache, slots)


def attention(q: Tensor, cache: KVCache, batch: ForwardBatch, params: AttentionParams) -> Tensor:
    """Causal attention of the step's queries [T, heads, D] over the paged cache. Returns [T, heads × Dv].

    Row r's queries are q[query_starts[r] : query_starts[r + 1]], the last of its seq_lens[r] tokens; its keys are found through
    block_tables[r]. Softmax in float32.
    """
    return _pick(q, attention_ref).attention(q, cache, batch, params)


def rope_attention(q: Tensor, k: Tensor, v: Tensor, rotary: Rotary, cache: KVCache, batch: ForwardBatch, params: AttentionParams) -> Tensor:
    """`rope_store`, then `attention` of what it gives: on a GPU one launch, where each row has one token and the cache q's dtype."""
    launcher = None if q.is_cpu else _GPU.get(attention_ref)
    if launcher is None:
        return attention(rope_store(q, k, v, *rotary, cache, batch.slots), cache, batch, params)
    return launcher.rope_attention(q, k, v, rotary, cache, batch, params)


def sample(logits: Tensor, params: DrawParams) -> Tensor:
    """A token id for each row of logits [L, V]: int32 [L], -1 for a row whose largest logit is no number (NaN, or everything banned).

    Greedy, or drawn after temperature, top-k, top-p and min-p, in that order.
    """
    return _pick(logits, sampling_ref).sample(logits, params)


def logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Natural-log probabilities in float32: of token_ids [L], and of the num_top best [L, num_top] with their int32 ids."""
    return _pick(logits, sampling_ref).logprobs(logits, token_ids, num_top)


def route(logits: Tensor, correction: Tensor | None, params: RoutingParams) -> Routing:
    """Choose experts by router logits [T, num_experts]. `correction` float32 [num_experts] sways the choice, not the weights."""
    return _pick(logits, moe_ref).route(logits, correction, params)


def expert_up(x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing) -> Tensor:
    """Each token of x [T, K] through its chosen experts' weight [num_experts, N, K] (+ bias [num_experts, N]).

    Returns [T × k, N] in the order of routing.order.
    """
    return _pick(x, moe_ref).expert_up(x, weight, bias, routing)


def expert_down(x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing) -> Tensor:
    """The weighted sum of each token's choices, [T, N].

    x [T × k, K], in the order of routing.order, goes through weight [num_experts, N, K] (+ bias [num_experts, N]) first.
    """
    return _pick(x, moe_ref).expert_down(x, weight, bias, routing)


def quant_expert_up(x: Tensor, weight: StoredExperts, bias: Tensor | None, routing: Routing) -> Tensor:
    """`expert_up` with quantized weights. On a GPU a small step reads the codes of the chosen experts once."""
    return _pick(x, moe_ref).quant_expert_up(x, weight, bias, routing)


def quant_expert_down(x: Tensor, weight: StoredExperts, bias: Tensor | None, routing: Routing) -> Tensor:
    """`expert_down` with quantized weights."""
    return _pick(x, moe_ref).quant_expert_down(x, weight, bias, routing)


def clipped_gate(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    """(up + 1) × gate × sigmoid(alpha × gate), gate clamped to at most `limit` and up to ± limit (gpt-oss).

    [..., 2 × size] holding gate then up → [..., size].
    """
    return _pick(gate_up, moe_ref).clipped_gate(gate_up, limit, alpha)
