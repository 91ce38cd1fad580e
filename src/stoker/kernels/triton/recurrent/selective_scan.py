"""The recurrence of Mamba (`ops.selective_scan`, arXiv 2312.00752).

    state = exp(step × a) × state + step × x bᵀ        out = state c + skip × x        step = softplus(dt + dt_bias)

The elements of a state decay at different rates, so that tokens are not combined by products of matrices, as in Mamba 2: a CTA passes over
the tokens of its row one after the other, with the state of its features, float32 [BLOCK_D, N], in registers.

Grid: axis 0 has the rows, axis 1 blocks of BLOCK_D features. Theoretical floor of a decode: reading and writing the states at the speed of
memory. The floor of a prefill is the latency of the loads of each token. Decodes of 64 rows of Falcon-Mamba-7B take 27.8 µs
on an H100, where the states need 21.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels.triton.integers import cdiv, next_power_of_2
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait
from stoker.kernels.triton.recurrent.rows import Mode, launches, row_of, row_tokens, softplus
from stoker.kernels.types import SelectiveScanParams

if TYPE_CHECKING:
    from stoker.core.forward_batch import ForwardBatch

BLOCK_D = 32  # 8,192 features of Jamba give 256 CTAs at batch 1


class ScanInputs(NamedTuple):
    """Runtime: the inputs of T tokens, usually views of one projection. Strides are in elements; the last axis is dense."""

    x_ptr: Tensor  # [T, D]
    dt_ptr: Tensor  # [T, D]
    b_ptr: Tensor  # [T, N]
    c_ptr: Tensor  # [T, N]
    stride_x: int  # between tokens
    stride_dt: int
    stride_b: int
    stride_c: int


class ScanParameters(NamedTuple):
    """Runtime: float32, a [D, N] and the others [D]."""

    a_ptr: Tensor
    dt_bias_ptr: Tensor
    skip_ptr: Tensor


@triton.jit
def selective_scan_kernel(
    inputs,  # ScanInputs
    block,  # ScanParameters
    states_ptr,  # float32 [slots, D, N], slots stride_slot apart
    last_slot_ptr,  # the last slot
    out_ptr,  # [T, D], dense
    rows,  # LaunchRows
    stride_slot,
    D: tl.constexpr,
    N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DECODE: tl.constexpr,
    VERIFY: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One CTA: BLOCK_D features of all tokens of one row."""
    features = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    is_feature, is_n = features < D, n < N
    inside = is_feature[:, None] & is_n[None, :]
    places = features[:, None] * N + n[None, :]
    a = tl.load(block.a_ptr + places, mask=inside, other=0.0)
    bias = tl.load(block.dt_bias_ptr + features, mask=is_feature, other=0.0)
    skip = tl.load(block.skip_ptr + features, mask=is_feature, other=0.0)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    row = row_of(rows, tl.program_id(0))
    if rows.end_ptr is not None and row < 0:
        return
    first, count, slot, is_new = row_tokens(rows, row, DECODE)
    state = tl.load(states_ptr + slot * stride_slot + places, mask=inside & (is_new == 0), other=0.0)
    for i in range(count):
        token = first + i
        step = softplus(tl.load(inputs.dt_ptr + token * inputs.stride_dt + features, mask=is_feature, other=0.0).to(tl.float32) + bias)
        x = tl.load(inputs.x_ptr + token * inputs.stride_x + features, mask=is_feature, other=0.0).to(tl.float32)
        b = tl.load(inputs.b_ptr + token * inputs.stride_b + n, mask=is_n, other=0.0).to(tl.float32)
        c = tl.load(inputs.c_ptr + token * inputs.stride_c + n, mask=is_n, other=0.0).to(tl.float32)
        state = state * tl.exp(step[:, None] * a) + (step * x)[:, None] * b[None, :]
        out = tl.sum(state * c[None, :], axis=1) + skip * x
        tl.store(out_ptr + token * D + features, out.to(out_ptr.dtype.element_ty), mask=is_feature)
        if VERIFY:
            tl.store(last_slot_ptr - token * stride_slot + places, state, mask=inside)
    if not VERIFY:
        tl.debug_barrier()  # threads with copies of a small state may still read it
        tl.store(states_ptr + slot * stride_slot + places, state, mask=inside)


def selective_scan(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, params: SelectiveScanParams, states: Tensor, batch: ForwardBatch) -> Tensor:
    """The output [T, D] of the recurrence (`ops.selective_scan`). Replaces the states of the rows."""
    num_tokens, num_features = x.shape
    state_size = b.shape[1]
    x, dt, b, c = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, dt, b, c))
    inputs = ScanInputs(x, dt, b, c, *(t.stride(0) for t in (x, dt, b, c)))
    parameters = ScanParameters(params.a, params.dt_bias, params.skip)
    out = torch.empty(num_tokens, num_features, dtype=x.dtype, device=x.device)
    for rows, count, mode in launches(batch):
        selective_scan_kernel[(count, cdiv(num_features, BLOCK_D))](
            inputs, parameters, states, states[-1:], out, rows, states.stride(0), D=num_features, N=state_size,
            BLOCK_D=BLOCK_D, BLOCK_N=next_power_of_2(state_size), DECODE=mode is Mode.DECODE, VERIFY=mode is Mode.VERIFY,
            num_warps=2, **pdl_launch_options(x),
        )  # fmt: skip
    return out
