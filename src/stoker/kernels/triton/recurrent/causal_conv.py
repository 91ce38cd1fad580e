"""The causal depthwise convolution of the tokens of each row, with its state (`ops.causal_conv`).

    out[t, c] = act(sum over j of weight[c, j] × input[t - (K - 1) + j, c]  + bias[c])

where inputs before the first token of the row are those in the state of its slot. The state is replaced by the last K - 1 inputs; for
rows that verify drafts, those up to each token are stored instead (`LayerState`).

Grid: axis 0 has the rows, axis 1 blocks of BLOCK_C channels. A CTA passes over tiles of TOKENS tokens; overlapping inputs come from L1.

Theoretical floor: one read and one write of each element at the speed of memory. A launch of 1 to 64 decode rows takes 7 to 28
µs in a step on an H100, the wait for the linear before it included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels.triton.activation import activated
from stoker.kernels.triton.integers import cdiv, next_power_of_2
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait
from stoker.kernels.triton.recurrent.rows import Mode, launches, row_of, row_tokens

if TYPE_CHECKING:
    from stoker.core.forward_batch import ForwardBatch

BLOCK_C = 128
TOKENS = 16  # of a tile: 16 elements per thread


@triton.jit
def last_inputs(state_ptr, source_ptr, stride_x, count, is_place, is_old, places, LAST: tl.constexpr):
    """The state [BLOCK_TAPS, BLOCK_C] after `count` tokens: the last inputs, from the state before the row and from this step."""
    retained = tl.load(state_ptr + count, mask=is_old & (places + count < LAST), other=0.0)
    last = places + count - LAST
    newest = tl.load(source_ptr[None, :] + last.to(tl.int64) * stride_x, mask=is_place & (last >= 0), other=0.0)
    return retained + newest.to(retained.dtype)


@triton.jit
def conv_kernel(
    x_ptr,  # [T, C], rows stride_x apart
    weight_ptr,  # [C, TAPS]
    bias_ptr,  # [C] or None
    states_ptr,  # [slots, C, TAPS - 1], slots stride_slot apart
    last_slot_ptr,  # the last slot
    out_ptr,  # [T, C], dense
    rows,  # LaunchRows
    stride_x,
    stride_slot,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TOKENS: tl.constexpr,
    DECODE: tl.constexpr,
    VERIFY: tl.constexpr,
    ACTIVATION: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One CTA: BLOCK_C channels of all tokens of one row."""
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channels < C
    places = tl.arange(0, BLOCK_TAPS)[:, None]  # of the state
    LAST: tl.constexpr = TAPS - 1
    last_weight = tl.load(weight_ptr + channels * TAPS + LAST, mask=inside, other=0.0).to(tl.float32)
    bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channels, mask=inside, other=0.0).to(tl.float32)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    row = row_of(rows, tl.program_id(0))
    if rows.end_ptr is not None and row < 0:
        return
    first, count, slot, is_new = row_tokens(rows, row, DECODE)
    source_ptr = x_ptr + first * stride_x + channels
    target_ptr = out_ptr + first * C + channels
    state_ptr = states_ptr + slot * stride_slot + channels[None, :] * LAST + places
    is_place = inside[None, :] & (places < LAST)
    is_old = is_place & (is_new == 0)
    if VERIFY:
        for i in range(count):
            after = last_inputs(state_ptr, source_ptr, stride_x, i + 1, is_place, is_old, places, LAST)
            token_ptr = last_slot_ptr - (first + i) * stride_slot
            tl.store(token_ptr + channels[None, :] * LAST + places, after, mask=is_place)
    else:
        after = last_inputs(state_ptr, source_ptr, stride_x, count, is_place, is_old, places, LAST)
    if DECODE:
        old = tl.load(state_ptr, mask=is_old, other=0.0).to(tl.float32)
        taps = tl.load(weight_ptr + channels[None, :] * TAPS + places, mask=inside[None, :] & (places < LAST), other=0.0)
        x = tl.load(source_ptr, mask=inside, other=0.0).to(tl.float32)
        result = tl.sum(old * taps.to(tl.float32), axis=0) + x * last_weight + bias
        tl.store(target_ptr, activated(result, ACTIVATION).to(out_ptr.dtype.element_ty), mask=inside)
    else:
        for start in range(0, count, TOKENS):
            tokens = start + tl.arange(0, TOKENS)
            is_token = (tokens < count)[:, None] & inside[None, :]
            tile_ptr = source_ptr + (first * 0 + start - LAST) * stride_x  # 64 bits: a row may have more than 2^31 elements
            result = tl.zeros((TOKENS, BLOCK_C), dtype=tl.float32) + bias
            for tap in tl.static_range(TAPS):
                age = (tokens - LAST + tap)[:, None]  # of the input; below 0 it is at place LAST + age of the state
                weight = tl.load(weight_ptr + channels * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
                x_ptrs = tile_ptr[None, :] + (tl.arange(0, TOKENS) + tap)[:, None] * stride_x
                result += tl.load(x_ptrs, mask=is_token & (age >= 0), other=0.0).to(tl.float32) * weight[None, :]
                if start == 0:
                    before_ptrs = states_ptr + slot * stride_slot + channels[None, :] * LAST + (LAST + age)
                    before = tl.load(before_ptrs, mask=is_token & (age < 0) & (is_new == 0), other=0.0)
                    result += before.to(tl.float32) * weight[None, :]
            out_ptrs = target_ptr[None, :] + tokens[:, None].to(tl.int64) * C
            tl.store(out_ptrs, activated(result, ACTIVATION).to(out_ptr.dtype.element_ty), mask=is_token)
    if not VERIFY:
        tl.debug_barrier()  # other threads of the CTA may still read the old state
        tl.store(state_ptr, after, mask=is_place)


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, batch: ForwardBatch, activation: str) -> Tensor:
    """activation(conv(x)), [T, C] (`ops.causal_conv`). Replaces the states of the rows."""
    num_channels, taps = weight.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for rows, count, mode in launches(batch):
        conv_kernel[(count, cdiv(num_channels, BLOCK_C))](
            x, weight, bias, states, states[-1:], out, rows, x.stride(0), states.stride(0), C=num_channels, TAPS=taps,
            BLOCK_TAPS=next_power_of_2(max(taps - 1, 1)), BLOCK_C=BLOCK_C, TOKENS=TOKENS, DECODE=mode is Mode.DECODE,
            VERIFY=mode is Mode.VERIFY, ACTIVATION=activation, num_warps=4, **pdl_launch_options(x),
        )  # fmt: skip
    return out
