"""Small dense linears for 1 to 64 tokens: the weight is read once, and norm, bias, gate and residual are part of the same kernel.

    out[t, r] = act(Σ_k norm(x)[t, k] × w[r, k] + b[r]) + residual[t, r]                      r < n
    gated:      act(Σ_k norm(x)[t, k] × w[r, k] + b[r]) × (Σ_k norm(x)[t, k] × w[n + r, k] + b[n + r]) + residual[t, r]

    x [m, k], w [n, k] or gated [2 × n, k] (n gate rows, then the rows that they gate), residual and out [m, n]; one dtype, or x in
    16 bits and the others in float32; float32 sums

The RMS norm needs no pass of its own: norm(x) · Wᵀ = (x ⊙ g) · Wᵀ ÷ rms(x), and the sum of squares accumulates in the same loop over k.

Grid. `gemv_kernel` (one token): blocks of BLOCK_N outputs. `small_gemm_kernel` (2 to 64 tokens): blocks of BLOCK_N outputs × SPLITS slices
of the reduction dimension. Weights are the left operand of the product, since the tokens would fill only a part of its 64-row side:

    acc [BLOCK_N, BLOCK_M] += w [BLOCK_N, BLOCK_K] × xᵀ [BLOCK_K, BLOCK_M]           BLOCK_M: m rounded up to 16, 32 or 64

    split-K: partial [tile, split]   | acc  BLOCK_N × BLOCK_M | acc_up (gated) | squares  1 × BLOCK_M |
    The last CTA of a tile to finish adds the slices of all splits.

Theoretical floor: the bytes of the weight ÷ 4.42 TB/s (the read bandwidth of an H200). Llama-3.1-8B in bfloat16, µs of qkv, out, up
(gated), down, head with their norms (benchmarks/results/h200_linear_tiles.json); floor 11.4, 7.6, 53.1, 26.6, 237.7:

    | tokens | these kernels                    | of the floor, %     | cuBLAS and separate kernels       |
    | 1      | 14.3,  9.9, 57.7, 29.0, 237.3    | 80, 77, 92, 92, 100 | 17.7, 13.6, 64.1, 33.6, 254.7     |
    | 16     | 17.2, 11.2, 60.7, 31.5, 245.1    | 66, 68, 88, 84, 97  | 18.0, 14.3, 61.6, 34.8, 259.8     |
    | 64     | 20.8, 12.5, 63.7, 34.4, 257.9    | 55, 61, 83, 77, 92  | 18.6, 13.5, 67.7, 37.9, 286.5     |
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.activation import activated
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_wait


@triton.jit
def load_columns(pointers, is_column, EVEN_K: tl.constexpr):
    """Load the values at `pointers`. Unless EVEN_K, values are zero where `is_column` is False (columns from k on)."""
    if EVEN_K:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=is_column, other=0.0)


@triton.jit
def gemv_kernel(
    # Pointers
    x_ptr,  # [k]
    weight_ptr,  # [n or 2 × n, k], dense
    bias_ptr,  # [n or 2 × n] or None
    norm_weight_ptr,  # [k]; None: no norm
    residual_ptr,  # [n] or None
    out_ptr,  # [n]
    # Sizes
    n,
    k,
    eps,  # of the norm
    # Constants
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,  # whether BLOCK_K divides k
    USE_PDL: tl.constexpr,
):
    """One CTA: BLOCK_N outputs of one token, by multiply-adds. In a matrix instruction 15 of 16 columns would be padding."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = rows < n
    loaded_rows = tl.where(is_row, rows, 0).to(tl.int64)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_up = acc
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, k, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K)
        is_column = cols < k
        w = load_columns(weight_ptr + loaded_rows[:, None] * k + cols[None, :], is_column[None, :], EVEN_K)  # [BLOCK_N, BLOCK_K]
        v = load_columns(x_ptr + cols, is_column, EVEN_K).to(tl.float32)  # [BLOCK_K]
        if GATED:
            w_up = load_columns(weight_ptr + (loaded_rows + n)[:, None] * k + cols[None, :], is_column[None, :], EVEN_K)
        if norm_weight_ptr is not None:
            squares += v * v
            v = v * load_columns(norm_weight_ptr + cols, is_column, EVEN_K).to(tl.float32)
        acc += w.to(tl.float32) * v[None, :]
        if GATED:
            acc_up += w_up.to(tl.float32) * v[None, :]
    y = tl.sum(acc, 1)  # [BLOCK_N]
    scale = 1.0
    if norm_weight_ptr is not None:
        scale = tl.rsqrt(tl.sum(squares, 0) / k + eps)
        y = y * scale
    if bias_ptr is not None:
        y += tl.load(bias_ptr + loaded_rows).to(tl.float32)
    if GATED:
        up = tl.sum(acc_up, 1) * scale
        if bias_ptr is not None:
            up += tl.load(bias_ptr + loaded_rows + n).to(tl.float32)
        y = activated(y, ACTIVATION) * up
    if residual_ptr is not None:
        y += tl.load(residual_ptr + loaded_rows).to(tl.float32)
    tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), mask=is_row)


@triton.jit
def store_outputs(
    y,  # float32 [BLOCK_N, BLOCK_M]
    up,  # float32 [BLOCK_N, BLOCK_M] (GATED)
    squares,  # float32 [BLOCK_M]: sums of squares of each token (norm)
    rows,  # [BLOCK_N]
    tokens,  # [BLOCK_M]
    m,
    n,
    k,
    eps,
    bias_ptr,
    residual_ptr,
    out_ptr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Apply the norm's factor, bias, gate and residual to the sums y (and `up`) of a tile, and store the result.

    `squares` are the tokens' sums of x²; `rows` and `tokens` are the indices of the tile's rows and tokens.
    """
    is_row = rows < n
    if NORM:
        scale = tl.rsqrt(squares / k + eps)
        y = y * scale[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if NORM:
            up = up * scale[None, :]
        if bias_ptr is not None:
            up += tl.load(bias_ptr + n + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
        y = activated(y, ACTIVATION) * up
    offsets = tokens[None, :].to(tl.int64) * n + rows[:, None]
    inside = is_row[:, None] & (tokens < m)[None, :]
    if residual_ptr is not None:
        y += tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["m"])
def small_gemm_kernel(
    # Pointers
    x_ptr,  # [m, k]
    weight_ptr,  # [n or 2 × n, k], dense
    bias_ptr,  # [n or 2 × n] or None
    norm_weight_ptr,  # [k]; None: no norm
    residual_ptr,  # [m, n] or None
    out_ptr,  # [m, n]
    partial_ptr,  # float32 [tiles, SPLITS, (1 or 2) × BLOCK_N + 1, BLOCK_M]; None without split-K
    finished_ptr,  # int32 [tiles]: CTAs that have stored their slice; zero between launches
    # Sizes and strides
    m,
    n,
    k,
    stride_x,
    eps,  # of the norm
    # Constants
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr,  # whether BLOCK_K divides k
    USE_PDL: tl.constexpr,
):
    """One CTA: a split-K slice of BLOCK_N outputs of up to BLOCK_M tokens.

    The last CTA of a tile combines the slices and stores the result.
    """
    NORM: tl.constexpr = norm_weight_ptr is not None
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = rows < n
    loaded_rows = tl.where(is_row, rows, 0).to(tl.int64)
    tokens = tl.arange(0, BLOCK_M)
    token_ptrs = x_ptr + tl.minimum(tokens, m - 1).to(tl.int64)[None, :] * stride_x  # [1, BLOCK_M]
    is_token = (tokens < m)[None, :]  # padding is not loaded: all CTAs would read the same lines from one slice of L2
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_up = acc
    squares = tl.zeros([BLOCK_M], tl.float32)
    split_k = tl.cdiv(tl.cdiv(k, BLOCK_K), SPLITS) * BLOCK_K
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    for start in range(split * split_k, tl.minimum(k, (split + 1) * split_k), BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K)
        is_column = cols < k
        w = load_columns(weight_ptr + loaded_rows[:, None] * k + cols[None, :], is_column[None, :], EVEN_K)  # [BLOCK_N, BLOCK_K]
        is_loaded = is_token if EVEN_K else is_token & is_column[:, None]
        v = tl.load(token_ptrs + cols[:, None], mask=is_loaded, other=0.0).to(w.dtype)  # [BLOCK_K, BLOCK_M]
        if NORM:
            wide = v.to(tl.float32)
            squares += tl.sum(wide * wide, 0)
            g = load_columns(norm_weight_ptr + cols, is_column, EVEN_K)
            v = (wide * g.to(tl.float32)[:, None]).to(v.dtype)
        acc = tl.dot(w, v, acc, input_precision="ieee")
        if GATED:
            w_up = load_columns(weight_ptr + (loaded_rows + n)[:, None] * k + cols[None, :], is_column[None, :], EVEN_K)
            acc_up = tl.dot(w_up, v, acc_up, input_precision="ieee")
    if SPLITS == 1:
        store_outputs(acc, acc_up, squares, rows, tokens, m, n, k, eps, bias_ptr, residual_ptr, out_ptr, NORM, GATED, ACTIVATION)
    else:
        PARTIAL_ROWS: tl.constexpr = (2 if GATED else 1) * BLOCK_N + 1
        row = tl.arange(0, BLOCK_N)[:, None]
        slice_ptr = partial_ptr + (tile * SPLITS + split).to(tl.int64) * (PARTIAL_ROWS * BLOCK_M)
        tl.store(slice_ptr + row * BLOCK_M + tokens[None, :], acc)
        if GATED:
            tl.store(slice_ptr + (BLOCK_N + row) * BLOCK_M + tokens[None, :], acc_up)
        tl.store(slice_ptr + (PARTIAL_ROWS - 1) * BLOCK_M + tokens, squares)
        tl.debug_barrier()  # orders the stores of all threads before the atomic of one
        if tl.atomic_add(finished_ptr + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            tl.store(finished_ptr + tile, 0)
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            total_up = total
            total_squares = tl.zeros([BLOCK_M], tl.float32)
            for other in range(SPLITS):
                other_ptr = partial_ptr + (tile * SPLITS + other).to(tl.int64) * (PARTIAL_ROWS * BLOCK_M)
                total += tl.load(other_ptr + row * BLOCK_M + tokens[None, :])
                if GATED:
                    total_up += tl.load(other_ptr + (BLOCK_N + row) * BLOCK_M + tokens[None, :])
                total_squares += tl.load(other_ptr + (PARTIAL_ROWS - 1) * BLOCK_M + tokens)
            store_outputs(
                total, total_up, total_squares, rows, tokens, m, n, k, eps, bias_ptr, residual_ptr, out_ptr, NORM, GATED, ACTIVATION
            )
