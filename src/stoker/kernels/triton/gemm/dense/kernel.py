"""Linears of few rows: the weights are streamed once, and what surrounds the product is fused into the stream.

    y = act(norm(x) Wᵀ + b) + residual

An RMS norm needs no pass of its own: norm(x) Wᵀ = (x ⊙ g) Wᵀ ÷ rms(x), and the sum of squares grows along the same loop over K.
A gated weight holds the gate's rows, then the up projection's: a program reads a tile of each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.activation import activated
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_wait


@triton.jit
def gemv(
    x, weight, bias, norm_weight, residual, out, n, k, eps,
    HAS_BIAS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, ADD: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """One row of x: plain multiply-adds, since a matrix instruction's tile would be 15/16 padding. Grid: (ceil(n / BLOCK_N),)."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    kept = rows < n
    safe = tl.where(kept, rows, 0).to(tl.int64)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_up = acc
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, k, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K)
        if EVEN_K:
            w = tl.load(weight + safe[:, None] * k + cols[None, :])
            v = tl.load(x + cols).to(tl.float32)
        else:
            w = tl.load(weight + safe[:, None] * k + cols[None, :], mask=(cols < k)[None, :], other=0.0)
            v = tl.load(x + cols, mask=cols < k, other=0.0).to(tl.float32)
        if GATED:
            if EVEN_K:
                w_up = tl.load(weight + (safe + n)[:, None] * k + cols[None, :])
            else:
                w_up = tl.load(weight + (safe + n)[:, None] * k + cols[None, :], mask=(cols < k)[None, :], other=0.0)
        if NORM:
            squares += v * v
            if EVEN_K:
                v = v * tl.load(norm_weight + cols).to(tl.float32)
            else:
                v = v * tl.load(norm_weight + cols, mask=cols < k, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * v[None, :]
        if GATED:
            acc_up += w_up.to(tl.float32) * v[None, :]
    y = tl.sum(acc, 1)
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / k + eps)
        y = y * scale
    if HAS_BIAS:
        y += tl.load(bias + safe).to(tl.float32)
    if GATED:
        up = tl.sum(acc_up, 1) * scale
        if HAS_BIAS:
            up += tl.load(bias + safe + n).to(tl.float32)
        y = activated(y, ACT) * up
    if ADD:
        y += tl.load(residual + safe).to(tl.float32)
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=kept)


@triton.jit
def finish(
    y, up, squares, rows, kept, tokens, m, bias, residual, out, n, k, eps,
    HAS_BIAS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """From sums [BLOCK_N, BLOCK_M] to the output: norm's factor, bias, activation, residual."""
    if NORM:
        scale = tl.rsqrt(squares / k + eps)
        y = y * scale[None, :]
    if HAS_BIAS:
        y += tl.load(bias + rows, mask=kept, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if NORM:
            up = up * scale[None, :]
        if HAS_BIAS:
            up += tl.load(bias + n + rows, mask=kept, other=0.0).to(tl.float32)[:, None]
        y = activated(y, ACT) * up
    place = tokens[None, :].to(tl.int64) * n + rows[:, None]
    inside = kept[:, None] & (tokens < m)[None, :]
    if ADD:
        y += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["m"])
def small_linear(
    x, weight, bias, norm_weight, residual, out, partial, arrived, m, n, k, stride_x, eps,
    HAS_BIAS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, ADD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, EVEN_K: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK_M rows of x. The weights are the left operand, so that a matrix instruction's long side is full of them.

    Grid: (ceil(n / BLOCK_N), SPLITS). With SPLITS > 1 the K axis is cut; the last program of a tile to arrive sums the parts, which
    lie in partial float32 [tiles, SPLITS, (1 or 2) × BLOCK_N + 1, BLOCK_M] (the last line holds the sums of squares), and resets `arrived`.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    kept = rows < n
    safe = tl.where(kept, rows, 0).to(tl.int64)
    tokens = tl.arange(0, BLOCK_M)
    token_rows = x + tl.minimum(tokens, m - 1).to(tl.int64)[None, :] * stride_x
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_up = acc
    squares = tl.zeros([BLOCK_M], tl.float32)
    share = tl.cdiv(tl.cdiv(k, BLOCK_K), SPLITS) * BLOCK_K
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    for start in range(split * share, tl.minimum(k, (split + 1) * share), BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K)
        if EVEN_K:
            w = tl.load(weight + safe[:, None] * k + cols[None, :])
            v = tl.load(token_rows + cols[:, None])
        else:
            w = tl.load(weight + safe[:, None] * k + cols[None, :], mask=(cols < k)[None, :], other=0.0)
            v = tl.load(token_rows + cols[:, None], mask=(cols < k)[:, None], other=0.0)
        if NORM:
            wide = v.to(tl.float32)
            squares += tl.sum(wide * wide, 0)
            if EVEN_K:
                g = tl.load(norm_weight + cols)
            else:
                g = tl.load(norm_weight + cols, mask=cols < k, other=0.0)
            v = (wide * g.to(tl.float32)[:, None]).to(v.dtype)
        acc = tl.dot(w, v, acc, input_precision="ieee")
        if GATED:
            if EVEN_K:
                w_up = tl.load(weight + (safe + n)[:, None] * k + cols[None, :])
            else:
                w_up = tl.load(weight + (safe + n)[:, None] * k + cols[None, :], mask=(cols < k)[None, :], other=0.0)
            acc_up = tl.dot(w_up, v, acc_up, input_precision="ieee")
    if SPLITS == 1:
        finish(acc, acc_up, squares, rows, kept, tokens, m, bias, residual, out, n, k, eps, HAS_BIAS, NORM, GATED, ACT, ADD)
    else:
        LINES: tl.constexpr = (2 if GATED else 1) * BLOCK_N + 1
        lane = tl.arange(0, BLOCK_N)
        mine = partial + (tile * SPLITS + split).to(tl.int64) * (LINES * BLOCK_M)
        tl.store(mine + lane[:, None] * BLOCK_M + tokens[None, :], acc)
        if GATED:
            tl.store(mine + (BLOCK_N + lane)[:, None] * BLOCK_M + tokens[None, :], acc_up)
        tl.store(mine + (LINES - 1) * BLOCK_M + tokens, squares)
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            tl.store(arrived + tile, 0)
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            total_up = total
            sums = tl.zeros([BLOCK_M], tl.float32)
            for other in range(SPLITS):
                theirs = partial + (tile * SPLITS + other).to(tl.int64) * (LINES * BLOCK_M)
                total += tl.load(theirs + lane[:, None] * BLOCK_M + tokens[None, :])
                if GATED:
                    total_up += tl.load(theirs + (BLOCK_N + lane)[:, None] * BLOCK_M + tokens[None, :])
                sums += tl.load(theirs + (LINES - 1) * BLOCK_M + tokens)
            finish(total, total_up, sums, rows, kept, tokens, m, bias, residual, out, n, k, eps, HAS_BIAS, NORM, GATED, ACT, ADD)
