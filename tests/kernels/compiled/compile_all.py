"""Compile the launches that test_compile.py checks for sm_90, and print the resources of each as JSON.

A process of its own, without TRITON_INTERPRET. Arguments: prefixes of launch names; without arguments all are compiled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable

import torch
import triton
from torch import Tensor
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import CompiledKernel

from stoker.core.forward_batch import ForwardBatch, KVCache, TreeMask, VerifiedRows
from stoker.core.packed_weight import PackedWeight
from stoker.distributed.group import SINGLE
from stoker.distributed.inbox import Inboxes
from stoker.kernels.reference.activation import ACTIVATIONS
from stoker.kernels.routing import Routing, RoutingParams
from stoker.kernels.triton import activation, all_reduce, embedding, norm, pages, rope, row_tokens, sampling, summands
from stoker.kernels.triton.all_reduce_kernel import Choices
from stoker.kernels.triton.aot.offline_target import compile_for, compiling, resources
from stoker.kernels.triton.attention import launch as attention
from stoker.kernels.triton.attention.tiles import AttentionTile
from stoker.kernels.triton.fused_layer import launch as fused_layer
from stoker.kernels.triton.gemm.dense import launch as linear
from stoker.kernels.triton.gemm.large import launch as large
from stoker.kernels.triton.gemm.large import tiles
from stoker.kernels.triton.gemm.quantized import fp8 as quant_fp8
from stoker.kernels.triton.gemm.quantized import int4 as quant_int4
from stoker.kernels.triton.gemm.quantized import int8 as quant_int8
from stoker.kernels.triton.gemm.quantized.activations import quantize_rows
from stoker.kernels.triton.moe import launch as moe
from stoker.kernels.triton.moe import router
from stoker.kernels.triton.recurrent import causal_conv, delta_rule, gated_norm, mamba2, selective_scan
from stoker.kernels.types import (
    PLAIN,
    AttentionParams,
    ClippedGate,
    DeltaParams,
    DrawParams,
    FusedLayer,
    FusedLinear,
    Fusion,
    HeadNorms,
    Mamba2Params,
    Rotary,
    RowTokens,
    SelectiveScanParams,
    supports_key_mean,
)
from stoker.runtime.worker.aot_trace import MetaGroup

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def index(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.int32)


def cache(kv_heads: int, block: int, size: int, value_size: int | None, dtype: torch.dtype) -> KVCache:
    scale = meta(kv_heads, dtype=FP32) if dtype in (torch.int8, FP8) else None
    values = None if value_size is None else meta(4096, kv_heads, block, value_size, dtype=dtype)
    balance = None if scale is None or values is None else meta(kv_heads, 2, size, dtype=FP32)
    mean = meta(kv_heads, 8, size, dtype=FP32) if dtype == FP8 and balance is not None and supports_key_mean(size) else None
    return KVCache(meta(4096, kv_heads, block, size, dtype=dtype), values, scale, scale, balance, mean)


def state_rows(rows: int, tokens: int, captured: bool = False) -> ForwardBatch:
    """`rows` rows of `tokens` tokens of a model with recurrent states. With at most 16 tokens, they verify drafts.

    `captured`: prompts beside decodes, both of which the device counts.
    """
    total, decodes = rows * tokens, rows if tokens == 1 else 0
    empty = index(total)
    verified = VerifiedRows(rows, total, tokens) if 1 < tokens <= 16 else None
    return ForwardBatch(
        empty, empty, empty, index(rows + 1), index(rows), index(rows, 8), decodes, tokens, 4096, state_slots=index(rows),
        verified=verified, decode_count=index(1) if captured else None, row_count=index(1) if captured else None,
    )  # fmt: skip


def convolve(tokens: int, channels: int = 8192, captured: bool = False) -> None:
    x, weight = meta(tokens * 2, 2 * channels)[:, :channels], meta(channels, 4)
    causal_conv.causal_conv(x, weight, meta(channels), meta(9, channels, 3), state_rows(2, tokens, captured), "silu")


def recur_mamba2(
    tokens: int, *, heads: int = 128, size: int = 64, state: int = 128, dtype: torch.dtype = BF16, captured: bool = False
) -> None:
    params = Mamba2Params(*(meta(heads, dtype=FP32) for _ in range(3)))
    x, b = meta(2 * tokens, heads, size, dtype=dtype), meta(2 * tokens, 8, state, dtype=dtype)
    states = meta(9, heads, size, state, dtype=FP32)
    mamba2.mamba2(x, meta(2 * tokens, heads, dtype=dtype), b, b, params, states, state_rows(2, tokens, captured))


def recur_delta(tokens: int, *, heads: int = 32, size: int = 128, dtype: torch.dtype = BF16, captured: bool = False) -> None:
    """The sizes of Qwen3-Next: 16 key heads, 32 value heads."""
    params = DeltaParams(meta(heads, dtype=FP32), meta(heads, dtype=FP32))
    q, v = meta(2 * tokens, heads // 2, size, dtype=dtype), meta(2 * tokens, heads, size, dtype=dtype)
    dt, states = meta(2 * tokens, heads, dtype=dtype), meta(9, heads, size, size, dtype=FP32)
    delta_rule.delta_rule(q, q, v, dt, dt, params, states, state_rows(2, tokens, captured))


def scan(tokens: int, features: int = 8192, captured: bool = False) -> None:
    params = SelectiveScanParams(meta(features, 16, dtype=FP32), meta(features, dtype=FP32), meta(features, dtype=FP32))
    x, b = meta(2 * tokens, features), meta(2 * tokens, 16)
    selective_scan.selective_scan(x, x, b, b, params, meta(9, features, 16, dtype=FP32), state_rows(2, tokens, captured))


def attend(
    rows: int, queries: int, *, heads: int = 32, kv_heads: int = 8, size: int = 128, value_size: int | None = 128, block: int = 64,
    dtype: torch.dtype = BF16, cache_dtype: torch.dtype = BF16, tile: AttentionTile | None = None, **features: object,
) -> None:  # fmt: skip
    tokens = rows * queries
    decodes = rows if queries == 1 else 0
    batch = ForwardBatch(index(tokens), index(tokens), index(tokens), index(rows + 1), index(rows), index(rows, 64), decodes, queries, 4096)
    if features.pop("captured", False):
        batch.decode_count, batch.row_count = index(1), index(1)
    if features.pop("by_lengths", False):
        batch.split_tokens = index(1)
    if features.pop("prefix", False):
        batch.prefix_lens = index(rows)
    if features.pop("tree", False):
        batch.tree = TreeMask(meta(tokens, dtype=torch.int64), index(rows))
    q = meta(tokens, (heads + 2 * kv_heads) * size, dtype=dtype)[:, : heads * size].view(tokens, heads, size)
    pages = cache(kv_heads, block, size, value_size, cache_dtype)
    out = meta(tokens, heads, size if value_size is None else value_size, dtype=dtype)
    (attention.decode if decodes else attention.prefill)(q, pages, batch, AttentionParams(0.1, **features), out, tile)  # type: ignore[arg-type]


def norms(size: int, normed: bool) -> HeadNorms | None:
    return HeadNorms(meta(size), meta(size), 1e-6) if normed else None


def rope_attend(
    rows: int, interleaved: bool = False, size: int = 128, dim: int = 128, by_lengths: bool = False, normed: bool = False,
    cache_dtype: torch.dtype = BF16, kv_heads: int = 8,
) -> None:  # fmt: skip
    """Decode rows whose last keys and values are not in the cache yet."""
    parts = (32, kv_heads, kv_heads)
    heads = meta(rows, sum(parts), size)
    batch = ForwardBatch(index(rows), index(rows), index(rows), index(rows + 1), index(rows), index(rows, 64), rows, 1, 4096)
    if by_lengths:
        batch.split_tokens = index(1)
    rotary = Rotary(batch.positions, meta(8192, dim, dtype=FP32) if dim else None, interleaved, norms(size, normed))
    params = AttentionParams(0.1, before_fused_layer=rows == 2)
    attention.rope_attention(*heads.split(parts, 1), rotary, cache(kv_heads, 64, size, size, cache_dtype), batch, params)


def rope_store(tokens: int, cache_dtype: torch.dtype, interleaved: bool = False, dim: int = 128, normed: bool = False) -> None:
    fused = meta(tokens, 6144)
    q, k, v = fused[:, :4096].view(tokens, 32, 128), fused[:, 4096:5120].view(tokens, 8, 128), fused[:, 5120:].view(tokens, 8, 128)
    pages = cache(8, 64, 128, 128, cache_dtype)
    rope.rope_store(q, k, v, Rotary(index(tokens), meta(8192, dim, dtype=FP32), interleaved, norms(128, normed)), pages, index(tokens))


def sample(rows: int, dtype: torch.dtype, all_greedy: bool) -> None:
    reals = (meta(rows, dtype=FP32) for _ in range(3))
    draw = DrawParams(next(reals), index(rows), next(reals), next(reals), meta(rows, dtype=torch.int64), index(rows), all_greedy)
    sampling.sample(meta(rows, 128256, dtype=dtype), draw)


def sample_shard(rows: int, dtype: torch.dtype, num_ranks: int = 2) -> None:
    sampling.largest_over_ranks(sampling.largest_of_shard(meta(rows, 64128, dtype=dtype), 64128, 1, num_ranks))


def verify(nodes: int) -> None:
    masks = meta(4 * nodes, dtype=torch.int64)
    sampling.verify(index(4 * nodes), index(4 * nodes), index(4 * nodes), index(5), index(4 * nodes), masks, nodes - 1)


def row_tokens_of(width: int, has_drafts: bool) -> None:
    known = RowTokens(index(257), index(257, width) if width else None)
    batch = ForwardBatch(index(64), index(64), index(64), index(9), index(8), index(8, 256), 0, 8, 4096, state_slots=index(8))
    row_tokens.continue_rows(batch, index(8), index(9) if has_drafts else None, index(64), known, 64)
    row_tokens.append_tokens(known, index(8), index(8, 8 if has_drafts else 1), index(8) if has_drafts else None)


def linear_of(rows: int, gated: bool, dtype: torch.dtype = BF16, n: int = 4096, k: int = 4096) -> None:
    fusion = Fusion("rms", meta(k, dtype=dtype), None, 1e-5, "silu") if gated else Fusion(residual=meta(rows, n, dtype=dtype))
    linear.linear(meta(rows, k, dtype=dtype), meta(n * (2 if gated else 1), k, dtype=dtype), None, fusion)


def quantized(kind: str, rows: int, gated: bool = False, n: int = 4096, k: int = 4096, group: int = 128, dtype: torch.dtype = BF16) -> None:
    """The launches of one linear with n outputs; `gated`: after a norm, with 2 × n weight rows."""
    fusion = Fusion("rms", meta(k), None, 1e-5, "silu") if gated else PLAIN
    x, n = meta(rows, k, dtype=dtype), n * (2 if gated else 1)
    if kind in ("fp8", "fp8 weights"):
        activations = "token" if kind == "fp8" else "none"
        quant_fp8.packed_linear(x, PackedWeight("fp8", meta(n, k, dtype=FP8), meta(n, dtype=FP32), activations=activations), fusion)
    elif kind == "block":
        quant_fp8.packed_linear(x, block_fp8(n // 128, k // 128, values=meta(n, k, dtype=FP8)), fusion)
    elif kind in ("int8", "w8a8"):
        activations = "token" if kind == "w8a8" else "none"
        weight = PackedWeight("int8", meta(n, k, dtype=torch.int8), meta(n, dtype=FP32), activations=activations)
        quant_int8.packed_linear(x, weight, fusion)
    elif kind == "fp4":
        weight = PackedWeight("int4", meta(n, k // 2, dtype=torch.uint8), meta(n, k // group), None, group, is_fp4=True)
        if group == 16:
            weight = dataclasses.replace(weight, row_scale=meta(n, dtype=FP32))
        quant_int4.packed_linear(x, quant_int4.prepare_weight(weight), fusion)
    else:
        grid = meta(n, k // group, dtype=torch.float16)
        weight = PackedWeight("int4", meta(n, k // 2, dtype=torch.uint8), grid, meta(*grid.shape, dtype=torch.uint8), group)
        quant_int4.packed_linear(x, quant_int4.prepare_weight(weight), fusion)


def block_fp8(*grid: int, values: Tensor) -> PackedWeight:
    return PackedWeight("fp8", values, meta(*grid, dtype=FP32), group_size=128, block_rows=128, activations="group")


def routing_of(rows: int, top_k: int, count: int) -> Routing:
    return Routing(meta(rows, top_k, dtype=FP32), index(rows * top_k), index(count + 1), experts=index(top_k) if rows == 1 else None)


def experts(
    rows: int, dtype: torch.dtype, activations: str = "none", count: int = 8, top_k: int = 2, n: int = 4096, k: int = 4096
) -> None:  # fmt: skip
    routing = routing_of(rows, top_k, count)
    if dtype == BF16:
        weight = PackedWeight("dense", meta(count, n, k))
    else:
        name = "fp8" if dtype == FP8 else "int8"
        weight = PackedWeight(name, meta(count, n, k, dtype=dtype), meta(count, n, dtype=FP32), activations=activations)
    moe.expert_down(meta(rows * top_k, k), weight, routing, meta(rows, n))


def int4_experts(rows: int, group: int, zero: str, count: int = 8, top_k: int = 2, n: int = 4096, k: int = 4096) -> None:
    """The launches of an up and a down projection; with `zero` \"int\" each expert has a column order of its own."""
    routing = routing_of(rows, top_k, count)
    grid = meta(count, n, k // group, dtype=torch.float16)
    zeros = {"none": None, "int": meta(*grid.shape, dtype=torch.uint8), "float": grid, "e2m1": None}[zero]
    order, is_fp4 = index(count, k) if zero == "int" else None, zero == "e2m1"
    weight = PackedWeight("int4", meta(count, n, k // 2, dtype=torch.uint8), grid, zeros, group, column_order=order, is_fp4=is_fp4)
    weight = quant_int4.prepare_weight(weight)
    moe.expert_up(meta(rows, k), weight, routing)
    if is_fp4:
        moe.expert_up(meta(rows, k), weight, routing, "silu")
        moe.expert_up(meta(rows, k), weight, routing, ClippedGate(7.0, 1.702))
    moe.expert_down(meta(rows * top_k, k), weight, routing)


def int8_experts(rows: int, group: int, shifted: bool, count: int = 8, top_k: int = 2, n: int = 4096, k: int = 4096) -> None:
    routing = routing_of(rows, top_k, count)
    scale = meta(count, n, k // group, dtype=FP32)
    weight = PackedWeight("int8", meta(count, n, k, dtype=torch.int8), scale, scale if shifted else None, group)
    moe.expert_up(meta(rows, k), weight, routing)
    moe.expert_down(meta(rows * top_k, k), weight, routing)


def block_experts(rows: int, count: int = 256, top_k: int = 8, n: int = 7168, k: int = 2048) -> None:
    routing = routing_of(rows, top_k, count)
    weight = block_fp8(count, n // 128, k // 128, values=meta(count, n, k, dtype=FP8))
    moe.expert_up(meta(rows, k), weight, routing)
    moe.expert_down(meta(rows * top_k, k), weight, routing)


def all_reduce_of(ranks: int, algorithm: int) -> None:
    """The all-reduce of 32 rows of Llama-70B."""
    inboxes = Inboxes([1 << 40] * ranks, 1, torch.device("meta"))
    all_reduce.sum_through_inbox(meta(32, 8192), meta(32, 8192), inboxes.all_reduces[algorithm])


def all_reduce_of_choices(ranks: int, tokens: int) -> None:
    """The all-reduce that combines the results of Mixtral's experts, as tiles and as the library store them."""
    inboxes, top_k, size = Inboxes([1 << 40] * ranks, 1, torch.device("meta")), 2, 4096
    for rows in (None, index(tokens * top_k)):
        choices = Choices(meta(tokens, top_k, dtype=FP32), rows)
        all_reduce.sum_through_inbox(meta(tokens * top_k, size), meta(tokens, size), inboxes.all_reduces[-1], choices=choices)


def copied_summands(features: int) -> None:
    """The end of a sum over two ranks, for half of the rows of a long step."""
    a, b, residual, out = (meta(4099, features) for _ in range(4))
    summands.add_summands((a, b), residual, out)


SPARSEMIXER_ROUTING = RoutingParams(2, "sparsemixer", renormalize=False)
RMS_2880 = Fusion("rms", meta(2880), None, 1e-5)
DEEPSEEK_ROUTING = RoutingParams(8, "sigmoid", num_groups=8, top_groups=4, group_score="top2")
LATENT = {"heads": 128, "kv_heads": 1, "size": 576, "value_size": None}
EVERY_FEATURE = {"window": 512, "softcap": 30.0, "alibi_slopes": meta(32, dtype=FP32), "sinks": meta(32, dtype=FP32)}


LLAMA_70B = (8192, 8192, 28672, 10240)


def fused_layer_of(
    form: str, zero: str = "none", *, rows: int = 1, group: int = 128, last: bool = False, biased: bool = False,
    sizes: tuple[int, ...] = (4096, 4096, 14336, 6144), ranks: int = 1,
) -> None:  # fmt: skip
    """A fused layer, by default of Llama-3.1-8B. `sizes`: features of the heads, of the residual stream, of the MLP, and of q, k and v.

    Of several ranks, it is the shard of the first one.
    """
    everyone, hidden = SINGLE if ranks == 1 else MetaGroup(0, ranks), sizes[1]
    heads, size, qkv = (features // ranks for features in (sizes[0], *sizes[2:]))
    norm = Fusion("rms", meta(hidden), None, 1e-5)

    def linear_of(n: int, k: int, fusion: Fusion) -> FusedLinear:
        bias = meta(n) if biased else None
        if form == "int4":
            grid = meta(256 // group * -(-k // 256), n, dtype=torch.float16 if not last else BF16)
            zeros = {"none": None, "int": meta(*grid.shape, dtype=torch.uint8), "float": grid}[zero]
            values = meta(n, -(-k // 256) * 128, dtype=torch.uint8)
            weight = PackedWeight("int4", values, grid, zeros, group, bias=bias, layout="paired")
        elif form in ("bfloat16", "float16"):
            weight = PackedWeight("dense", meta(n, k, dtype=getattr(torch, form)), bias=bias)
        elif form == "fp8":
            weight = PackedWeight("fp8", meta(n, k, dtype=FP8), meta(n, dtype=FP32), bias=bias, activations="token")
        else:
            weight = PackedWeight("int8", meta(n, k, dtype=torch.int8), meta(n, dtype=FP32), bias=bias)
        return FusedLinear(lambda x, fusion: x, weight, fusion)

    up = linear_of(2 * size, hidden, dataclasses.replace(norm, gate="gelu" if last else "silu"))
    after = None if last else linear_of(qkv, hidden, norm)
    made = FusedLayer(linear_of(hidden, heads, PLAIN), up, linear_of(hidden, size, PLAIN), after, everyone)
    assert fused_layer.supports_fused_layer(made, rows)
    fused_layer.fused_layer(meta(rows, heads), meta(rows, hidden), made)


def large_gemm(
    dtype: torch.dtype, gate: str | None = None, residual: bool = False, bias: bool = False, tile: tiles.LargeGemmTile = tiles.TILE
) -> Tensor:
    rows, kind = (2048 if gate else 1024), BF16 if dtype == FP8 else dtype
    scales = {"x_scale": meta(4096, dtype=FP32), "weight_scale": meta(rows, dtype=FP32)} if dtype == FP8 else {}
    added = {"bias": meta(rows, dtype=kind) if bias else None, "residual": meta(4096, 1024, dtype=kind) if residual else None}
    return large.large_gemm(meta(4096, 512, dtype=dtype), meta(rows, 512, dtype=dtype), tile, **scales, **added, gate=gate)


def large_gemm_of_digits(dtype: torch.dtype, bias: bool = False) -> Tensor:
    x = quantize_rows(meta(300, 512, dtype=dtype), "slabs", 512)
    scales = {"x_scale": x.scale, "weight_scale": meta(1024, dtype=FP32)}
    added = meta(1024, dtype=dtype) if bias else None
    return large.large_gemm(x.values, meta(1024, 512, dtype=torch.int8), **scales, bias=added, digits=large.Digits(300, dtype))


def large_gemm_of_experts(tile: tiles.LargeGemmTile, dtype: torch.dtype = FP8, gate: str | None = None, bias: bool = False) -> Tensor:
    count, n = 8, 2048 if gate else 1024
    scales = {"x_scale": meta(4096, dtype=FP32), "weight_scale": meta(count, n, dtype=FP32)} if dtype == FP8 else {}
    offsets, added = meta(count + 1, dtype=torch.int32), meta(count, n) if bias else None
    return large.large_gemm(
        meta(4096, 512, dtype=dtype), meta(count, n, 512, dtype=dtype), tile, **scales, bias=added, gate=gate, offsets=offsets
    )


LAUNCHES: dict[str, Callable[[], object]] = {
    "large gemm bfloat16, gated": lambda: large_gemm(BF16, gate="silu"),
    "large gemm float16, gated, with bias and residual": lambda: large_gemm(torch.float16, "gelu_tanh", residual=True, bias=True),
    "large gemm fp8, with residual": lambda: large_gemm(FP8, residual=True),
    "large gemm fp8, gated, with bias": lambda: large_gemm(FP8, "silu", bias=True),
    "large gemm fp8, 128 × 128, with residual": lambda: large_gemm(FP8, residual=True, tile=tiles.NARROW_TILE),
    "large gemm fp8, 128 × 128, gated": lambda: large_gemm(FP8, "silu", tile=tiles.NARROW_TILE),
    "large gemm fp8, 192 × 128, with residual": lambda: large_gemm(FP8, residual=True, tile=tiles.TALL_TILE),
    "large gemm fp8, 192 × 128, with bias": lambda: large_gemm(FP8, bias=True, tile=tiles.TALL_TILE),
    "large gemm of experts": lambda: large_gemm_of_experts(tiles.TILE),
    "large gemm of experts, gated, with bias": lambda: large_gemm_of_experts(tiles.TILE, FP8, "silu", bias=True),
    "large gemm of experts, bfloat16, with bias": lambda: large_gemm_of_experts(tiles.TILE, BF16, bias=True),
    "large gemm of experts, 128 × 128": lambda: large_gemm_of_experts(tiles.NARROW_TILE),
    "large gemm of experts, 192 × 128": lambda: large_gemm_of_experts(tiles.TALL_TILE),
    "large gemm of digits bfloat16": lambda: large_gemm_of_digits(BF16),
    "large gemm of digits float16, with bias": lambda: large_gemm_of_digits(torch.float16, bias=True),
    "large gemm bfloat16, 64 × 128, gated": lambda: large_gemm(BF16, "silu", tile=tiles.SMALL_TILE),
    "large gemm bfloat16, 64 × 128, in slices, with residual": lambda: large_gemm(
        BF16, residual=True, tile=tiles.SMALL_TILE._replace(max_slices=8)
    ),
    "large gemm bfloat16, in slices, gated, with bias and residual": lambda: large_gemm(
        BF16, "silu", residual=True, bias=True, tile=tiles.DIVIDED_TILE
    ),
    "large gemm bfloat16, 192 × 128, in slices, with residual": lambda: large_gemm(
        BF16, residual=True, tile=tiles.TALL_TILE._replace(max_slices=8)
    ),
    "large gemm fp8, two slices": lambda: large_gemm(FP8, tile=tiles.SPLIT_TILE),
    "large gemm fp8, two slices, with bias and residual": lambda: large_gemm(FP8, residual=True, bias=True, tile=tiles.SPLIT_TILE),
    "large gemm fp8, two slices, gated, with bias": lambda: large_gemm(FP8, "silu", bias=True, tile=tiles.SPLIT_TILE),
    "fused layer bfloat16": lambda: fused_layer_of("bfloat16"),
    "fused layer float16 135M, with biases": lambda: fused_layer_of("float16", biased=True, sizes=(576, 576, 1536, 960)),
    "fused layer fp8": lambda: fused_layer_of("fp8"),
    "fused layer int8 70B, last, with biases": lambda: fused_layer_of("bytes", last=True, biased=True, sizes=LLAMA_70B),
    "fused layer int4": lambda: fused_layer_of("int4", "int"),
    "fused layer int4 in groups of 32": lambda: fused_layer_of("int4", "float", group=32),
    "fused layer int4 of 2 rows in groups of 64": lambda: fused_layer_of("int4", "none", rows=2, group=64),
    "fused layer int4 of 2 rows": lambda: fused_layer_of("int4", "int", rows=2),
    "fused layer bfloat16 of 2 rows": lambda: fused_layer_of("bfloat16", rows=2),
    "fused layer bfloat16 of 5 rows": lambda: fused_layer_of("bfloat16", rows=5),
    "fused layer fp8 of 4 rows": lambda: fused_layer_of("fp8", rows=4),
    "fused layer fp8 of 4 rows 70B": lambda: fused_layer_of("fp8", rows=4, sizes=LLAMA_70B),
    "fused layer ranks 2, fp8 70B": lambda: fused_layer_of("fp8", sizes=LLAMA_70B, ranks=2),
    "fused layer ranks 2, fp8 of 4 rows 70B, with biases": lambda: fused_layer_of("fp8", rows=4, biased=True, sizes=LLAMA_70B, ranks=2),
    "fused layer ranks 4, int4 of 3 rows 70B": lambda: fused_layer_of("int4", "int", rows=3, sizes=LLAMA_70B, ranks=4),
    "fused layer ranks 8, bfloat16 of 6 rows 70B": lambda: fused_layer_of("bfloat16", rows=6, sizes=LLAMA_70B, ranks=8),
    "fused layer of 6 rows": lambda: fused_layer_of("int4", "int", rows=6),
    "fused layer of 16 rows, last, with biases": lambda: fused_layer_of("int4", "float", rows=16, last=True, biased=True),
    "fused layer of 32 rows": lambda: fused_layer_of("int4", "int", rows=32),
    "fused layer of 64 rows": lambda: fused_layer_of("int4", "int", rows=64),
    "fused layer of 32 rows in groups of 32": lambda: fused_layer_of("int4", "float", rows=32, group=32),
    "fused layer of 64 rows in groups of 64": lambda: fused_layer_of("int4", "int", rows=64, group=64),
    "fused layer of 64 rows 70B": lambda: fused_layer_of("int4", "none", rows=64, sizes=LLAMA_70B),
    "fused layer int4, of one block": lambda: fused_layer_of("int4", "float", last=True, sizes=(256, 256, 768, 512)),
    "norm": lambda: norm.norm(meta(1, 4096), meta(4096), None, 1e-5, "rms"),
    "norm of heads": lambda: norm.norm(meta(64, 32, 128), meta(128), None, 1e-5, "rms"),
    "recurrent conv decode": lambda: convolve(1),
    "recurrent conv verify": lambda: convolve(8),
    "recurrent mamba2 verify": lambda: recur_mamba2(8),
    "recurrent delta verify": lambda: recur_delta(8),
    "recurrent scan verify": lambda: scan(8),
    "recurrent conv captured": lambda: convolve(300, captured=True),
    "recurrent mamba2 captured": lambda: recur_mamba2(300, captured=True),
    "recurrent mamba2 captured, of 256 states": lambda: recur_mamba2(300, state=256, captured=True),
    "recurrent delta captured": lambda: recur_delta(300, captured=True),
    "recurrent scan captured": lambda: scan(300, captured=True),
    "recurrent conv prefill": lambda: convolve(300),
    "recurrent mamba2 decode": lambda: recur_mamba2(1),
    "recurrent mamba2 prefill": lambda: recur_mamba2(300),
    "recurrent mamba2 prefill of 256 states": lambda: recur_mamba2(300, state=256),
    "recurrent mamba2 prefill fp32": lambda: recur_mamba2(300, heads=24, dtype=FP32),
    "recurrent delta decode": lambda: recur_delta(1),
    "recurrent delta prefill": lambda: recur_delta(300),
    "recurrent delta prefill fp32": lambda: recur_delta(300, dtype=FP32),
    "recurrent scan decode": lambda: scan(1),
    "recurrent scan prefill": lambda: scan(300),
    "recurrent norm": lambda: gated_norm.gated_norm(meta(4, 8192), meta(4, 16384)[:, :8192], meta(8192), 1e-5, 8, True),
    "recurrent norm of heads": lambda: gated_norm.gated_norm(meta(64, 4096), meta(64, 4096), meta(128), 1e-6, 32, False),
    "norm wide": lambda: norm.norm(meta(8, 16384), meta(16384), meta(16384), 1e-5, "layer"),
    **{f"gated {name}": lambda name=name: activation.gated(meta(64, 28672), name) for name in ACTIVATIONS},  # type: ignore[misc]
    "xielu": lambda: activation.xielu(meta(64, 21504), meta(4, dtype=FP32)),
    "rotate heads": lambda: rope.rotate_heads(meta(64, 40, 128), index(64), meta(8192, 128, dtype=FP32), False),
    "activate gelu": lambda: activation.activate(meta(64, 3072), "gelu"),
    "embedding": lambda: embedding.embedding(index(64), meta(128256, 4096)),
    "embedding int8": lambda: quant_int8.packed_embedding(
        index(64), PackedWeight("int8", meta(128256, 4096, dtype=torch.int8), meta(128256, dtype=FP32)), BF16
    ),
    "resolve": lambda: embedding.resolve(index(64), index(257)),
    "remember": lambda: embedding.remember(index(257), index(64), index(64)),
    **{
        f"linear, {rows} rows{', gated' if gated else ''}": lambda rows=rows, gated=gated: linear_of(rows, gated)  # type: ignore[misc]
        for rows in (1, 8, 32, 64)
        for gated in (False, True)
    },
    "linear fp32": lambda: linear_of(20, True, FP32),
    "sample greedy": lambda: sample(256, BF16, True),
    "sample drawn": lambda: sample(256, BF16, False),
    "sample drawn fp32": lambda: sample(1, FP32, False),
    "sample shard": lambda: sample_shard(256, BF16),
    "sample shard of three": lambda: sample_shard(256, BF16, 3),
    "rope decode": lambda: rope_store(1, BF16),
    "rope prefill": lambda: rope_store(8192, BF16),
    "rope fp8": lambda: rope_store(8192, FP8),
    "rope fp8 of 768 tokens": lambda: rope_store(768, FP8),
    "rope fp8 of 512 tokens": lambda: rope_store(512, FP8),
    "rope int8": lambda: rope_store(64, torch.int8),
    "rope int8 of 300 tokens, interleaved, partial": lambda: rope_store(300, torch.int8, True, 64),
    "rope interleaved, partial": lambda: rope_store(64, BF16, True, 64),
    "rope decode, normed": lambda: rope_store(8, BF16, normed=True),
    "rope prefill, normed": lambda: rope_store(8192, BF16, normed=True),
    "rope fp8, normed": lambda: rope_store(8192, FP8, normed=True),
    "rope int8, normed": lambda: rope_store(64, torch.int8, normed=True),
    "rope interleaved, partial, normed": lambda: rope_store(64, BF16, True, 64, normed=True),
    "decode 1": lambda: attend(1, 1),
    "decode and rotate 1": lambda: rope_attend(1),
    "decode and rotate 64": lambda: rope_attend(64),
    "decode and rotate 64, 80 wide, interleaved": lambda: rope_attend(64, True, 80, 32),
    "decode and store 1, without rotation": lambda: rope_attend(1, dim=0),
    "decode and store 64, without rotation": lambda: rope_attend(64, dim=0),
    "decode and rotate 1, fp8": lambda: rope_attend(1, cache_dtype=FP8),
    "decode and rotate 1, fp8, half of Llama-3.1-70B": lambda: rope_attend(1, cache_dtype=FP8, kv_heads=4),
    "decode and rotate 2, fp8": lambda: rope_attend(2, cache_dtype=FP8),
    "decode and rotate 1, fp8, 16 heads of a group": lambda: rope_attend(1, cache_dtype=FP8, kv_heads=2),
    "decode and rotate 1, fp8, normed": lambda: rope_attend(1, cache_dtype=FP8, normed=True),
    "decode and rotate 1, fp8, 64 wide": lambda: rope_attend(1, size=64, dim=64, cache_dtype=FP8),
    "decode and rotate 1, fp8, 256 wide, interleaved, partial": lambda: rope_attend(1, True, 256, 128, cache_dtype=FP8),
    "decode and store 1, int8, normed, without rotation": lambda: rope_attend(1, dim=0, cache_dtype=torch.int8, normed=True),
    "decode and rotate 1, int8": lambda: rope_attend(1, cache_dtype=torch.int8),
    "decode 64": lambda: attend(64, 1),
    "decode 256": lambda: attend(256, 1),
    "decode fp8": lambda: attend(64, 1, cache_dtype=FP8),
    "decode fp8 512": lambda: attend(512, 1, cache_dtype=FP8),
    "decode 64, split by lengths": lambda: attend(64, 1, by_lengths=True),
    "decode fp8, split by lengths": lambda: attend(64, 1, cache_dtype=FP8, by_lengths=True),
    "decode fp8 256, split by lengths": lambda: attend(256, 1, cache_dtype=FP8, by_lengths=True, captured=True),
    "decode int8, split by lengths": lambda: attend(64, 1, cache_dtype=torch.int8, by_lengths=True),
    "decode latent, split by lengths": lambda: attend(64, 1, by_lengths=True, **LATENT),  # type: ignore[arg-type]
    "decode and rotate 1, normed": lambda: rope_attend(1, normed=True),
    "decode and rotate 64, normed": lambda: rope_attend(64, normed=True),
    "decode and rotate 64, normed, 256 wide, partial": lambda: rope_attend(64, size=256, dim=64, normed=True),
    "decode and store 64, normed, without rotation": lambda: rope_attend(64, dim=0, normed=True),
    "decode and rotate 64, normed, split by lengths": lambda: rope_attend(64, by_lengths=True, normed=True),
    "decode and rotate 256, normed, split by lengths": lambda: rope_attend(256, by_lengths=True, normed=True),
    "decode and rotate 64, split by lengths": lambda: rope_attend(64, by_lengths=True),
    "decode and rotate 256, split by lengths": lambda: rope_attend(256, by_lengths=True),
    "decode fp8 captured": lambda: attend(256, 1, cache_dtype=FP8, captured=True),
    "decode fp8, every feature": lambda: attend(64, 1, cache_dtype=FP8, **EVERY_FEATURE),  # type: ignore[arg-type]
    "decode int8": lambda: attend(64, 1, cache_dtype=torch.int8),
    "decode fp32": lambda: attend(4, 1, dtype=FP32, cache_dtype=FP32),
    "decode 64 wide": lambda: attend(64, 1, heads=12, kv_heads=12, size=64, value_size=64, block=32),
    "decode 80 wide": lambda: attend(64, 1, size=80, value_size=80, block=16),
    "decode 256 wide": lambda: attend(64, 1, size=256, value_size=256),
    "decode latent": lambda: attend(64, 1, **LATENT),  # type: ignore[arg-type]
    "decode, every feature": lambda: attend(64, 1, **EVERY_FEATURE),  # type: ignore[arg-type]
    "prefill 128 wide": lambda: attend(4, 2048),
    "prefill 128 wide, 512 tokens": lambda: attend(1, 512),
    "prefill 128 wide, window and sinks": lambda: attend(4, 2048, window=128, sinks=meta(32, dtype=FP32)),
    "prefill 128 tokens": lambda: attend(1, 128),
    "prefill block 16": lambda: attend(4, 2048, block=16),
    "prefill fp8": lambda: attend(4, 2048, cache_dtype=FP8),
    "prefill fp8, captured": lambda: attend(8, 256, cache_dtype=FP8, captured=True),
    "prefill fp8, window": lambda: attend(4, 2048, cache_dtype=FP8, window=300),
    "prefill fp8, 64 wide": lambda: attend(4, 2048, size=64, value_size=64, cache_dtype=FP8),
    "prefill fp8, 448 tokens": lambda: attend(1, 448, cache_dtype=FP8),
    "prefill fp8, every feature": lambda: attend(4, 2048, cache_dtype=FP8, prefix=True, **EVERY_FEATURE),  # type: ignore[arg-type]
    "prefill int8": lambda: attend(4, 2048, cache_dtype=torch.int8),
    "prefill fp32": lambda: attend(4, 512, dtype=FP32, cache_dtype=FP32),
    "prefill 64 wide": lambda: attend(4, 2048, heads=12, kv_heads=12, size=64, value_size=64),
    "prefill 80 wide": lambda: attend(4, 2048, size=80, value_size=80),
    "prefill 96 wide, fp8": lambda: attend(4, 2048, size=96, value_size=96, cache_dtype=FP8),
    "prefill 96 wide": lambda: attend(4, 2048, size=96, value_size=96),
    "prefill 192 wide, values 128": lambda: attend(4, 2048, heads=16, kv_heads=16, size=192, value_size=128),
    "prefill 256 wide": lambda: attend(4, 2048, size=256, value_size=256),
    "prefill latent": lambda: attend(4, 512, **LATENT),  # type: ignore[arg-type]
    "prefill, every feature": lambda: attend(4, 2048, prefix=True, **EVERY_FEATURE),  # type: ignore[arg-type]
    "four drafted tokens": lambda: attend(8, 4),
    "tree of 8": lambda: attend(8, 8, tree=True),
    "tree of 64, fp8": lambda: attend(1, 64, cache_dtype=FP8, tree=True),
    "tree of 64, latent": lambda: attend(1, 64, tree=True, **LATENT),  # type: ignore[arg-type]
    "verify": lambda: verify(8),
    "tokens of rows": lambda: row_tokens_of(32768, True),
    "tokens of rows with a drafter": lambda: row_tokens_of(0, False),
    "verify 64": lambda: verify(64),
    "move tokens": lambda: pages.move_tokens([cache(8, 64, 128, 128, BF16), cache(8, 64, 128, 128, FP8)], index(5, 2)),
    **{
        f"quant {kind}, {rows} rows{', gated' if gated else ''}": lambda kind=kind, rows=rows, gated=gated: quantized(kind, rows, gated)  # type: ignore[misc]
        for kind in ("fp8", "block", "int8", "w8a8", "int4")
        for rows in (1, 32, 64, 256)
        for gated in (False, True)
    },
    **{
        f"skinny {kind}, 8 rows{', gated' if gated else ''}": lambda kind=kind, gated=gated: quantized(kind, 8, gated)  # type: ignore[misc]
        for kind in ("fp8", "int8", "int4")
        for gated in (False, True)
    },
    "quant fp8 rows of 14336, gated": lambda: quantize_rows(meta(8192, 2 * 14336), "fp8", 14336, gate="silu"),
    "quant fp8 rows of 28672, gated": lambda: quantize_rows(meta(8192, 2 * 28672), "fp8", 28672, gate="silu"),
    "quant fp8 rows of 4096, normed": lambda: quantize_rows(meta(8192, 4096), "fp8", 4096, norm_weight=meta(4096), eps=1e-5),
    "quant fp8 weights, 64 rows": lambda: quantized("fp8 weights", 64),
    "quant int4 in groups of 16, 32 rows of float32": lambda: quantized("int4", 32, group=16, dtype=FP32),
    "quant int4 in groups of 32, 1 row": lambda: quantized("int4", 1, True, group=32),
    "quant int4 in groups of 32, 64 rows": lambda: quantized("int4", 64, True, group=32),
    "quant int4 in groups of 32, 256 rows": lambda: quantized("int4", 256, True, group=32),
    "quant fp4, 1 row": lambda: quantized("fp4", 1, True, group=32),
    "quant fp4 in groups of 16, 64 rows of float16": lambda: quantized("fp4", 64, group=16, dtype=torch.float16),
    "quant fp4, 64 rows of float32": lambda: quantized("fp4", 64, group=32, dtype=FP32),
    "quant fp4, 256 rows": lambda: quantized("fp4", 256, True, group=32),
    **{
        f"experts {dtype}, {rows} rows": (
            lambda rows=rows, dtype=dtype: experts(rows, dtype, "token" if dtype == FP8 else "none")  # type: ignore[misc]
        )
        for dtype in (BF16, FP8, torch.int8)
        for rows in (1, 64, 2048)
    },
    "experts torch.int8 with int8 activations, 64 rows": lambda: experts(64, torch.int8, "token"),
    **{
        f"experts int4 in groups of {group}, {zero}, {rows} rows": (
            lambda rows=rows, group=group, zero=zero: int4_experts(rows, group, zero)  # type: ignore[misc]
        )
        for group, zero in ((128, "int"), (32, "float"), (16, "none"), (64, "float"), (32, "e2m1"))
        for rows in (1, 64, 2048)
    },
    **{
        f"experts int8 in groups of {group}, {rows} rows": (
            lambda rows=rows, group=group: int8_experts(rows, group, shifted=group == 32)  # type: ignore[misc]
        )
        for group in (16, 32, 128)
        for rows in (1, 64, 2048)
    },
    **{f"experts block, {rows} rows": lambda rows=rows: block_experts(rows) for rows in (1, 64, 2048)},  # type: ignore[misc]
    **{
        f"sum of {ranks} ranks {'in two shots' if two else 'in one shot'}": lambda ranks=ranks, two=two: all_reduce_of(ranks, two)  # type: ignore[misc]
        for ranks, two in ((2, 0), (4, 0), (4, 1), (8, 0), (8, 1))
    },
    **{
        f"sum of the choices of {tokens} tokens over {ranks} ranks": lambda ranks=ranks, tokens=tokens: all_reduce_of_choices(ranks, tokens)  # type: ignore[misc]
        for ranks, tokens in ((2, 768), (4, 64))
    },
    **{
        f"sum of two copied summands, {features} features": lambda features=features: copied_summands(features)  # type: ignore[misc]
        for features in (8192, 72)
    },
    "route": lambda: router.route(meta(64, 256, dtype=FP32), meta(256, dtype=FP32), DEEPSEEK_ROUTING),
    "route a token by groups": lambda: router.route(meta(1, 256, dtype=FP32), meta(256, dtype=FP32), DEEPSEEK_ROUTING),
    **{
        f"route {rows} tokens by a router": lambda rows=rows: router.route_tokens(  # type: ignore[misc]
            meta(rows, 2880), meta(32, 2880, dtype=FP32), meta(32, dtype=FP32), None, RoutingParams(4, "softmax_topk"), RMS_2880
        )
        for rows in (1, 7, 64)
    },
    **{
        f"route {rows} tokens by the router of Qwen3-30B-A3B": lambda rows=rows: router.route_tokens(  # type: ignore[misc]
            meta(rows, 2048), meta(128, 2048, dtype=FP32), None, None, RoutingParams(8), Fusion("rms", meta(2048), None, 1e-5)
        )
        for rows in (8, 16, 64, 448)
    },
    "route 448 tokens by the router of DeepSeek-V3": lambda: router.route_tokens(
        meta(448, 7168), meta(256, 7168, dtype=FP32), None, meta(256, dtype=FP32), DEEPSEEK_ROUTING, Fusion("rms", meta(7168), None, 1e-5)
    ),
    "route 448 tokens by the router of Granite-3.1-1B-A400M": lambda: router.route_tokens(
        meta(448, 1024), meta(32, 1024, dtype=FP32), None, None, RoutingParams(8), Fusion("rms", meta(1024), None, 1e-5)
    ),
    "route 448 tokens by the router of gpt-oss-20b": lambda: router.route_tokens(
        meta(448, 2880), meta(32, 2880, dtype=FP32), meta(32, dtype=FP32), None, RoutingParams(4, "softmax_topk"), RMS_2880
    ),
    "route 768 tokens by the router of Mixtral-8x7B": lambda: router.route_tokens(
        meta(768, 4096), meta(8, 4096, dtype=FP32), None, None, RoutingParams(2), Fusion("rms", meta(4096), None, 1e-5)
    ),
    "route 768 tokens by the router of Phi-3.5-MoE": lambda: router.route_tokens(
        meta(768, 4096),
        meta(16, 4096, dtype=FP32),
        None,
        None,
        SPARSEMIXER_ROUTING,
        Fusion("layer", meta(4096), meta(4096), 1e-5),
    ),
    "route 8 tokens": lambda: router.route(meta(8, 128, dtype=FP32), None, RoutingParams(8)),
    "route 64 tokens": lambda: router.route(meta(64, 32, dtype=FP32), None, RoutingParams(4, "softmax_topk")),
    "route by SparseMixer": lambda: router.route(meta(64, 16, dtype=FP32), None, SPARSEMIXER_ROUTING),
    "clipped gate": lambda: activation.gated(meta(64, 5760), ClippedGate(7.0, 1.702)),
}


def record_reports() -> dict[str, str]:
    """PTX that Triton assembles from now on: the report of its ptxas. Assembling takes half of the time of a compilation."""
    reports: dict[str, str] = {}
    make_cubin = CUDABackend.make_cubin

    def recorded(self: CUDABackend, ptx: str, *args: object) -> bytes:
        with contextlib.redirect_stdout(io.StringIO()) as report:
            cubin: bytes = make_cubin(self, ptx, *args)
        reports[ptx] = report.getvalue()
        return cubin

    CUDABackend.make_cubin = recorded
    triton.knobs.nvidia.dump_ptxas_log = True
    return reports


def from_a_signature() -> dict[str, object]:
    """The embedding kernel by `compile_for`, from types instead of a launch."""
    constexprs = {"USE_PDL": True, "SIZE": 4096, "BLOCK": 2048}
    types = {"token_ids_ptr": "*i32", "table_ptr": "*bf16", "out_ptr": "*bf16", "vocab_size": "i32", "stride_row": "i64"}
    kernel = compile_for(embedding.embedding_kernel, types, constexprs, num_warps=8)
    return {"launch": "from a signature", "kernels": [dataclasses.asdict(resources(kernel))], "wgmma": False, "illegal": []}


def illegal_copies(kernel: CompiledKernel) -> list[str]:
    """The asynchronous copies whose cache policy is not in an even uniform register.

    ptxas 12.8 assembles these when the address is the sum of a uniform register and another one. A device stops at them with an illegal
    instruction.
    """
    if ".L2::cache_hint" not in kernel.asm["ptx"]:
        return []
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return re.findall(r"LDGSTS[^;]*desc\[UR\d*[13579]\][^;]*;", listing)


def main() -> None:
    print(json.dumps(from_a_signature()))
    reports = record_reports()
    for name, launch in LAUNCHES.items():
        if not name.startswith(tuple(sys.argv[1:]) or ""):
            continue
        with compiling(90) as kernels:
            launch()
        taken = [dataclasses.asdict(resources(kernel, reports.get(kernel.asm["ptx"]))) for kernel in kernels]
        ptx = kernels[-1].asm["ptx"]
        scratch = [int(offset) for offset in re.findall(r"global_smem\+(\d+)", ptx)]
        found = {"launch": name, "kernels": taken, "wgmma": "wgmma.mma_async" in ptx, "scratch": min(scratch, default=None)}
        print(json.dumps({**found, "illegal": [copy for kernel in kernels for copy in illegal_copies(kernel)]}), flush=True)


if __name__ == "__main__":
    main()
