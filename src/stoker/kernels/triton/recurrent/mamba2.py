"""The recurrence of Mamba 2 (`ops.mamba2`): single tokens of decode rows and of rows that verify drafts, and chunks of prefill rows
(arXiv 2405.21060, section 6).

    state = exp(step × a) × state + step × x bᵀ        out = state c + skip × x        step = softplus(dt + dt_bias)

In a chunk of L tokens, with total[i] the sum of step × a up to token i, all outputs are products of matrices:

    out = ((C Bᵀ) ∘ exp(total[i] - total[j] for j ≤ i)) (step × X) + exp(total) × (C stateᵀ) + skip × X
    state = exp(total[L - 1]) × state + (step × X)ᵀ (exp(total[L - 1] - total) × B)

Grid: axis 0 has the rows, axis 1 the heads, axis 2 blocks of BLOCK_P features of a head. The state of a CTA, float32 [BLOCK_P, N], stays in
registers from the first chunk to the last. Products have TF32 operands (`chunk_tile`).

Theoretical floor of a decode: reading and writing the states at the speed of memory. 64 rows of Mamba-Codestral-7B
reach 92 % of it on an H100 (184 µs), 1 row 6 µs, the time of a launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels.triton.integers import cdiv, next_power_of_2
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait
from stoker.kernels.triton.recurrent.rows import Mode, chunk_tile, launches, row_of, row_tokens, softplus
from stoker.kernels.types import Mamba2Params

if TYPE_CHECKING:
    from stoker.core.forward_batch import ForwardBatch

_NO_LIMIT = 3.0e38  # of the time step


class Mamba2Inputs(NamedTuple):
    """Runtime: the inputs of T tokens, usually views of one projection. Strides are in elements; the last axis is dense."""

    x_ptr: Tensor  # [T, H, P]
    dt_ptr: Tensor  # [T, H]
    b_ptr: Tensor  # [T, G, N]
    c_ptr: Tensor  # [T, G, N]
    stride_x: int  # between tokens
    stride_dt: int
    stride_b: int
    stride_c: int


class Mamba2Parameters(NamedTuple):
    """Runtime: the parameters of the block. Tensors are float32 [H]."""

    a_ptr: Tensor
    dt_bias_ptr: Tensor
    skip_ptr: Tensor
    min_step: float
    max_step: float


class Mamba2Sizes(NamedTuple):
    """Constants: the heads and the features of the state [P, N] of each."""

    heads: int
    heads_per_group: int
    head_size: int  # P
    state_size: int  # N
    block_n: int  # N, rounded up to a power of two


@triton.jit
def time_steps(dt, bias, block):
    """The step of each token, from the float32 output of the projection."""
    return tl.minimum(tl.maximum(softplus(dt + bias), block.min_step), block.max_step)


@triton.jit
def mamba2_decode_kernel(
    inputs,  # Mamba2Inputs
    block,  # Mamba2Parameters
    states_ptr,  # float32 [slots, H, P, N], slots stride_slot apart
    last_slot_ptr,  # the last slot
    out_ptr,  # [T, H, P], dense
    rows,  # LaunchRows
    stride_slot,
    SIZES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    VERIFY: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One CTA: BLOCK_P features of one head of a row with one token, or of all tokens of a row that verifies drafts."""
    head = tl.program_id(1)
    features = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, SIZES.block_n)
    is_feature, is_n = features < SIZES.head_size, n < SIZES.state_size
    inside = is_feature[:, None] & is_n[None, :]
    a, bias, skip = tl.load(block.a_ptr + head), tl.load(block.dt_bias_ptr + head), tl.load(block.skip_ptr + head)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    row = row_of(rows, tl.program_id(0))
    if rows.end_ptr is not None and row < 0:
        return
    first, count, slot, is_new = row_tokens(rows, row, not VERIFY)
    group = head // SIZES.heads_per_group * SIZES.state_size
    places = (head * SIZES.head_size + features)[:, None] * SIZES.state_size + n[None, :]
    state = tl.load(states_ptr + slot * stride_slot + places, mask=inside & (is_new == 0), other=0.0)
    for i in range(count):
        token = first + i
        step = time_steps(tl.load(inputs.dt_ptr + token * inputs.stride_dt + head).to(tl.float32), bias, block)
        x = tl.load(inputs.x_ptr + token * inputs.stride_x + head * SIZES.head_size + features, mask=is_feature, other=0.0).to(tl.float32)
        b = tl.load(inputs.b_ptr + token * inputs.stride_b + group + n, mask=is_n, other=0.0).to(tl.float32)
        c = tl.load(inputs.c_ptr + token * inputs.stride_c + group + n, mask=is_n, other=0.0).to(tl.float32)
        state = state * tl.exp(step * a) + (step * x)[:, None] * b[None, :]
        out = tl.sum(state * c[None, :], axis=1) + skip * x
        tl.store(out_ptr + (token * SIZES.heads + head) * SIZES.head_size + features, out.to(out_ptr.dtype.element_ty), mask=is_feature)
        if VERIFY:
            tl.store(last_slot_ptr - token * stride_slot + places, state, mask=inside)
    if not VERIFY:
        tl.debug_barrier()  # threads with copies of a small state may still read it
        tl.store(states_ptr + slot * stride_slot + places, state, mask=inside)


@triton.jit
def mamba2_prefill_kernel(
    inputs,  # Mamba2Inputs
    block,  # Mamba2Parameters
    states_ptr,  # float32 [slots, H, P, N], slots stride_slot apart
    out_ptr,  # [T, H, P], dense
    rows,  # LaunchRows
    stride_slot,
    SIZES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One CTA: BLOCK_P features of one head of all tokens of a row."""
    head = tl.program_id(1)
    features = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, SIZES.block_n)
    is_feature, is_n = features < SIZES.head_size, n < SIZES.state_size
    inside = is_feature[:, None] & is_n[None, :]
    places = tl.arange(0, CHUNK)
    a, bias, skip = tl.load(block.a_ptr + head), tl.load(block.dt_bias_ptr + head), tl.load(block.skip_ptr + head)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    row = row_of(rows, tl.program_id(0))
    first, count, slot, is_new = row_tokens(rows, tl.maximum(row, 0), False)
    if rows.end_ptr is not None:  # with a return, threads would spill 140 bytes instead of 12 (256 states)
        count = tl.where(row < 0, 0, count)
        inside = inside & (row >= 0)
    group = head // SIZES.heads_per_group * SIZES.state_size
    state_ptr = states_ptr + slot * stride_slot + (head * SIZES.head_size + features)[:, None] * SIZES.state_size + n[None, :]
    state = tl.load(state_ptr, mask=inside & (is_new == 0), other=0.0)  # [BLOCK_P, N]
    for start in range(0, count, CHUNK):
        is_token = start + places < count
        token = first + start
        dt_ptrs = inputs.dt_ptr + token * inputs.stride_dt + head + places * inputs.stride_dt
        step = time_steps(tl.load(dt_ptrs, mask=is_token, other=0.0).to(tl.float32), bias, block)
        step = tl.where(is_token, step, 0.0)  # tokens beyond the row change nothing
        x_ptrs = inputs.x_ptr + token * inputs.stride_x + head * SIZES.head_size + (places * inputs.stride_x)[:, None] + features[None, :]
        x = tl.load(x_ptrs, mask=is_token[:, None] & is_feature[None, :], other=0.0).to(tl.float32)
        is_bc = is_token[:, None] & is_n[None, :]
        b_ptrs = inputs.b_ptr + token * inputs.stride_b + group + (places * inputs.stride_b)[:, None] + n[None, :]
        c_ptrs = inputs.c_ptr + token * inputs.stride_c + group + (places * inputs.stride_c)[:, None] + n[None, :]
        b, c = tl.load(b_ptrs, mask=is_bc, other=0.0), tl.load(c_ptrs, mask=is_bc, other=0.0)
        total = tl.cumsum(step * a, axis=0)
        whole = tl.sum(step * a, axis=0)
        is_later = places[:, None] >= places[None, :]
        pairs = tl.exp(tl.where(is_later, total[:, None] - total[None, :], float("-inf")))
        scores = tl.dot(c, tl.trans(b), input_precision=PRECISION) * pairs
        scaled = x * step[:, None]
        out = tl.dot(scores, scaled, input_precision=PRECISION)
        out += tl.dot(c.to(tl.float32), tl.trans(state), input_precision=PRECISION) * tl.exp(total)[:, None] + skip * x
        to_end = b.to(tl.float32) * tl.exp(whole - total)[:, None]
        state = state * tl.exp(whole) + tl.dot(tl.trans(scaled), to_end, input_precision=PRECISION)
        out_ptrs = out_ptr + (token * SIZES.heads + head) * SIZES.head_size
        out_ptrs += (places * (SIZES.heads * SIZES.head_size))[:, None] + features[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_token[:, None] & is_feature[None, :])
    tl.debug_barrier()
    tl.store(state_ptr, state, mask=inside)


def mamba2(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, params: Mamba2Params, states: Tensor, batch: ForwardBatch) -> Tensor:
    """The output [T, H, P] of the recurrence (`ops.mamba2`). Replaces the states of the rows."""
    num_tokens, heads, size = x.shape
    groups, state_size = b.shape[1:]
    x, b, c = (t if t.stride(2) == 1 and t.stride(1) == t.shape[2] else t.contiguous() for t in (x, b, c))
    dt = dt if dt.stride(-1) == 1 else dt.contiguous()
    inputs = Mamba2Inputs(x, dt, b, c, x.stride(0), dt.stride(0), b.stride(0), c.stride(0))
    limits = (params.min_step, _NO_LIMIT if params.max_step is None else params.max_step)
    parameters = Mamba2Parameters(params.a, params.dt_bias, params.skip, *limits)
    sizes = Mamba2Sizes(heads, heads // groups, size, state_size, max(16, next_power_of_2(state_size)))
    out = torch.empty(num_tokens, heads, size, dtype=x.dtype, device=x.device)
    for rows, count, mode in launches(batch):
        if mode is not Mode.PREFILL:
            # About 4,096 elements of the state per CTA: eight 16-byte accesses per thread.
            block_p = max(1, min(next_power_of_2(size), 4096 // sizes.block_n))
            mamba2_decode_kernel[(count, heads, cdiv(size, block_p))](
                inputs, parameters, states, states[-1:], out, rows, states.stride(0), SIZES=sizes, BLOCK_P=block_p,
                VERIFY=mode is Mode.VERIFY, num_warps=4, **pdl_launch_options(x),
            )  # fmt: skip
        else:
            tile = chunk_tile(x)
            features = tile.features if sizes.block_n <= 128 else tile.features // 2  # registers hold the states of all of them
            block_p = max(16, min(next_power_of_2(size), features))
            mamba2_prefill_kernel[(count, heads, cdiv(size, block_p))](
                inputs, parameters, states, out, rows, states.stride(0), SIZES=sizes, BLOCK_P=block_p, CHUNK=tile.tokens,
                PRECISION=tile.precision, num_warps=tile.num_warps, num_stages=1, **pdl_launch_options(x),
            )  # fmt: skip
    return out
