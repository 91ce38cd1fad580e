"""The gated delta rule (`ops.delta_rule`): single tokens of decode rows and of rows that verify drafts, and chunks of prefill rows
(arXiv 2412.06464).

    state = exp(decay) × state        state += k (beta × (v - stateᵀ k))ᵀ        out = stateᵀ q

with q and k divided by their length, q also by √Dk, decay = a × softplus(dt + dt_bias) and beta = sigmoid(b). Within a chunk of L tokens,
with total[i] the sum of decays up to token i and pairs[i, j] = exp(total[i] - total[j]) for j ≤ i, the corrected values are

    corrected = (I + A)⁻¹ (beta × (V - exp(total) × (K state)))        A = beta × (K Kᵀ) ∘ pairs, below the diagonal
    out = exp(total) × (Q state) + ((Q Kᵀ) ∘ pairs) corrected
    state = exp(total[L - 1]) × state + (exp(total[L - 1] - total) × K)ᵀ corrected

The inverses do not depend on the state. A first launch computes those of all chunks at the same time, row after row (forward substitution:
L dependent steps), and stores them in memory, float32 [T, H, CHUNK]. The second launch passes over the chunks of a row in order.

Grid: axis 0 has the chunks of all rows (first launch, see `row_tiles`) or the rows, axis 1 the value heads, axis 2 blocks of BLOCK_V value
features (second launch, decodes). The state of a CTA, float32 [Dk, BLOCK_V], stays in registers. Products have TF32 operands
(`chunk_tile`).

Theoretical floor of a decode: reading and writing the states at the speed of memory. Not measured on a GPU yet.
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
from stoker.kernels.triton.row_tiles import find_row, num_token_tiles
from stoker.kernels.types import DeltaParams

if TYPE_CHECKING:
    from stoker.core.forward_batch import ForwardBatch

BLOCK_V = 32  # value features of a CTA of a decode: with 128 in a head, batch 1 has four CTAs per head
_EPS = tl.constexpr(1e-6)  # of the norm of queries and keys


class DeltaInputs(NamedTuple):
    """Runtime: the inputs of T tokens, usually views of one projection. Strides are in elements; the last axis is dense."""

    q_ptr: Tensor  # [T, Hk, Dk]
    k_ptr: Tensor  # [T, Hk, Dk]
    v_ptr: Tensor  # [T, H, Dv]
    dt_ptr: Tensor  # [T, H]
    beta_ptr: Tensor  # [T, H], before the sigmoid
    stride_q: int  # between tokens
    stride_k: int
    stride_v: int
    stride_dt: int
    stride_beta: int


class DeltaParameters(NamedTuple):
    """Runtime: float32 [H]."""

    a_ptr: Tensor
    dt_bias_ptr: Tensor


class DeltaSizes(NamedTuple):
    """Constants: the heads and the features of the state [Dk, Dv] of each."""

    heads: int
    heads_per_key: int  # value heads that share a key head
    key_size: int  # Dk
    value_size: int  # Dv
    block_k: int  # Dk, rounded up to a power of two


@triton.jit
def load_normalized(pointers, inside):
    """Vectors [L, Dk] in float32, divided by their lengths."""
    x = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    return x * (1.0 / tl.sqrt(tl.sum(x * x, axis=1) + _EPS))[:, None]


@triton.jit
def load_decay(inputs, block, token, places, is_token, head):
    """(decay, beta) of the tokens token + places, float32 [L]. Tokens beyond the row have 0 and 0: they change nothing."""
    dt_ptrs = inputs.dt_ptr + token * inputs.stride_dt + head + places * inputs.stride_dt
    beta_ptrs = inputs.beta_ptr + token * inputs.stride_beta + head + places * inputs.stride_beta
    dt = tl.load(dt_ptrs, mask=is_token, other=0.0).to(tl.float32) + tl.load(block.dt_bias_ptr + head)
    decay = tl.load(block.a_ptr + head) * softplus(dt)
    beta = tl.sigmoid(tl.load(beta_ptrs, mask=is_token, other=0.0).to(tl.float32))
    return tl.where(is_token, decay, 0.0), tl.where(is_token, beta, 0.0)


@triton.jit
def delta_decode_kernel(
    inputs,  # DeltaInputs
    block,  # DeltaParameters
    states_ptr,  # float32 [slots, H, Dk, Dv], slots stride_slot apart
    last_slot_ptr,  # the last slot
    out_ptr,  # [T, H, Dv], dense
    rows,  # LaunchRows
    stride_slot,
    SIZES: tl.constexpr,
    BLOCK_V: tl.constexpr,
    VERIFY: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One CTA: BLOCK_V value features of one head of a row with one token, or of all tokens of a row that verifies drafts."""
    head = tl.program_id(1)
    features = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    keys = tl.arange(0, SIZES.block_k)
    is_feature, is_key = features < SIZES.value_size, keys < SIZES.key_size
    inside = is_key[:, None] & is_feature[None, :]
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    row = row_of(rows, tl.program_id(0))
    if rows.end_ptr is not None and row < 0:
        return
    first, count, slot, is_new = row_tokens(rows, row, not VERIFY)
    key_head = head // SIZES.heads_per_key * SIZES.key_size
    places = (head * SIZES.key_size + keys)[:, None] * SIZES.value_size + features[None, :]
    state = tl.load(states_ptr + slot * stride_slot + places, mask=inside & (is_new == 0), other=0.0)
    for i in range(count):
        token = first + i
        decay, beta = load_decay(inputs, block, token, 0, True, head)
        q = tl.load(inputs.q_ptr + token * inputs.stride_q + key_head + keys, mask=is_key, other=0.0).to(tl.float32)
        k = tl.load(inputs.k_ptr + token * inputs.stride_k + key_head + keys, mask=is_key, other=0.0).to(tl.float32)
        q = q * (1.0 / tl.sqrt((tl.sum(q * q, axis=0) + _EPS) * SIZES.key_size))
        k = k * (1.0 / tl.sqrt(tl.sum(k * k, axis=0) + _EPS))
        v = tl.load(inputs.v_ptr + token * inputs.stride_v + head * SIZES.value_size + features, mask=is_feature, other=0.0).to(tl.float32)
        state = state * tl.exp(decay)
        delta = (v - tl.sum(state * k[:, None], axis=0)) * beta
        state = state + k[:, None] * delta[None, :]
        out = tl.sum(state * q[:, None], axis=0)
        tl.store(out_ptr + (token * SIZES.heads + head) * SIZES.value_size + features, out.to(out_ptr.dtype.element_ty), mask=is_feature)
        if VERIFY:
            tl.store(last_slot_ptr - token * stride_slot + places, state, mask=inside)
    if not VERIFY:
        tl.debug_barrier()  # threads with copies of a small state may still read it
        tl.store(states_ptr + slot * stride_slot + places, state, mask=inside)


@triton.jit(do_not_specialize=["end_row"])
def chunk_inverse_kernel(
    inputs,  # DeltaInputs
    block,  # DeltaParameters
    inverses_ptr,  # float32 [T, H, CHUNK]
    rows,  # LaunchRows
    end_row,  # the row after the last one, unless the device knows it
    SIZES: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One CTA: (I + A)⁻¹ of one chunk of a row and one head."""
    head = tl.program_id(1)
    places = tl.arange(0, CHUNK)
    keys = tl.arange(0, SIZES.block_k)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    first_row = row_of(rows, 0)
    if rows.end_ptr is not None:
        end_row = tl.load(rows.end_ptr)
        if first_row < 0:
            return
    # Chunks are numbered over all rows of the step, because the rows before those of the launch may have any number of tokens.
    chunk = tl.program_id(0) + num_token_tiles(rows.query_starts_ptr, 0, first_row, CHUNK)
    if chunk >= num_token_tiles(rows.query_starts_ptr, 0, end_row, CHUNK):
        return
    owner, chunk_in_row = find_row(chunk, rows.query_starts_ptr, 0, end_row, CHUNK)
    first, count, _, _ = row_tokens(rows, owner, False)
    start = chunk_in_row * CHUNK
    if start < count:
        is_token = start + places < count
        token = first + start
        decay, beta = load_decay(inputs, block, token, places, is_token, head)
        k_ptrs = inputs.k_ptr + token * inputs.stride_k + head // SIZES.heads_per_key * SIZES.key_size
        k_ptrs += (places * inputs.stride_k)[:, None] + keys[None, :]
        k = load_normalized(k_ptrs, is_token[:, None] & (keys < SIZES.key_size)[None, :])
        total = tl.cumsum(decay, axis=0)
        is_below = places[:, None] > places[None, :]
        pairs = tl.exp(tl.where(is_below, total[:, None] - total[None, :], float("-inf")))
        # Row i of the inverse is -A[i] - the sum over j < i of A[i, j] × row j of the inverse. Rows are replaced from the top.
        inverse = -(tl.dot(k, tl.trans(k), input_precision=PRECISION) * beta[:, None] * pairs)
        for i in range(1, CHUNK):
            is_row = (places == i)[:, None]
            row = tl.sum(tl.where(is_row, inverse, 0.0), axis=0)
            inverse = tl.where(is_row, (row + tl.sum(inverse * row[:, None], axis=0))[None, :], inverse)
        inverse += (places[:, None] == places[None, :]).to(tl.float32)
        inverse_ptrs = inverses_ptr + (token * SIZES.heads + head) * CHUNK
        inverse_ptrs += (places * (SIZES.heads * CHUNK))[:, None] + places[None, :]
        tl.store(inverse_ptrs, inverse, mask=is_token[:, None])


@triton.jit
def delta_prefill_kernel(
    inputs,  # DeltaInputs
    block,  # DeltaParameters
    inverses_ptr,  # float32 [T, H, CHUNK]
    states_ptr,  # float32 [slots, H, Dk, Dv], slots stride_slot apart
    out_ptr,  # [T, H, Dv], dense
    rows,  # LaunchRows
    stride_slot,
    SIZES: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One CTA: BLOCK_V value features of one head of all tokens of a row."""
    SCALE: tl.constexpr = SIZES.key_size**-0.5
    head = tl.program_id(1)
    features = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    keys = tl.arange(0, SIZES.block_k)
    places = tl.arange(0, CHUNK)
    is_feature, is_key = features < SIZES.value_size, keys < SIZES.key_size
    inside = is_key[:, None] & is_feature[None, :]
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    row = row_of(rows, tl.program_id(0))
    if rows.end_ptr is not None and row < 0:
        return
    first, count, slot, is_new = row_tokens(rows, row, False)
    key_head = head // SIZES.heads_per_key * SIZES.key_size
    state_ptr = states_ptr + slot * stride_slot + (head * SIZES.key_size + keys)[:, None] * SIZES.value_size + features[None, :]
    state = tl.load(state_ptr, mask=inside & (is_new == 0), other=0.0)  # [Dk, BLOCK_V]
    for start in range(0, count, CHUNK):
        is_token = start + places < count
        token = first + start
        decay, beta = load_decay(inputs, block, token, places, is_token, head)
        is_qk, is_v = is_token[:, None] & is_key[None, :], is_token[:, None] & is_feature[None, :]
        q_ptrs = inputs.q_ptr + token * inputs.stride_q + key_head + (places * inputs.stride_q)[:, None] + keys[None, :]
        k_ptrs = inputs.k_ptr + token * inputs.stride_k + key_head + (places * inputs.stride_k)[:, None] + keys[None, :]
        q, k = load_normalized(q_ptrs, is_qk) * SCALE, load_normalized(k_ptrs, is_qk)
        v_ptrs = inputs.v_ptr + token * inputs.stride_v + head * SIZES.value_size
        v = tl.load(v_ptrs + (places * inputs.stride_v)[:, None] + features[None, :], mask=is_v, other=0.0).to(tl.float32)
        inverse_ptrs = inverses_ptr + (token * SIZES.heads + head) * CHUNK
        inverse_ptrs += (places * (SIZES.heads * CHUNK))[:, None] + places[None, :]
        inverse = tl.load(inverse_ptrs, mask=is_token[:, None], other=0.0)
        total = tl.cumsum(decay, axis=0)
        whole = tl.sum(decay, axis=0)
        from_start = tl.exp(total)[:, None]
        wanted = beta[:, None] * (v - from_start * tl.dot(k, state, input_precision=PRECISION))
        corrected = tl.dot(inverse, wanted, input_precision=PRECISION)  # [CHUNK, BLOCK_V]
        is_later = places[:, None] >= places[None, :]
        pairs = tl.exp(tl.where(is_later, total[:, None] - total[None, :], float("-inf")))
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * pairs
        out = from_start * tl.dot(q, state, input_precision=PRECISION) + tl.dot(scores, corrected, input_precision=PRECISION)
        to_end = k * tl.exp(whole - total)[:, None]
        state = state * tl.exp(whole) + tl.dot(tl.trans(to_end), corrected, input_precision=PRECISION)
        out_ptrs = out_ptr + (token * SIZES.heads + head) * SIZES.value_size
        out_ptrs += (places * (SIZES.heads * SIZES.value_size))[:, None] + features[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_v)
    tl.debug_barrier()
    tl.store(state_ptr, state, mask=inside)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, dt: Tensor, beta: Tensor, params: DeltaParams, states: Tensor, batch: ForwardBatch
) -> Tensor:
    """The output [T, H, Dv] of the recurrence (`ops.delta_rule`). Replaces the states of the rows."""
    num_tokens, heads, value_size = v.shape
    key_heads, key_size = k.shape[1:]
    q, k, v = (t if t.stride(2) == 1 and t.stride(1) == t.shape[2] else t.contiguous() for t in (q, k, v))
    dt, beta = (t if t.stride(-1) == 1 else t.contiguous() for t in (dt, beta))
    inputs = DeltaInputs(q, k, v, dt, beta, *(t.stride(0) for t in (q, k, v, dt, beta)))
    parameters = DeltaParameters(params.a, params.dt_bias)
    sizes = DeltaSizes(heads, heads // key_heads, key_size, value_size, max(16, next_power_of_2(key_size)))
    out = torch.empty(num_tokens, heads, value_size, dtype=v.dtype, device=v.device)
    options = pdl_launch_options(v)
    for rows, count, mode in launches(batch):
        if mode is not Mode.PREFILL:
            delta_decode_kernel[(count, heads, cdiv(value_size, BLOCK_V))](
                inputs, parameters, states, states[-1:], out, rows, states.stride(0), SIZES=sizes, BLOCK_V=BLOCK_V,
                VERIFY=mode is Mode.VERIFY, num_warps=4, **options,
            )  # fmt: skip
            continue
        tile = chunk_tile(v)
        inverses = torch.empty(num_tokens, heads, tile.tokens, dtype=torch.float32, device=v.device)
        chunk_inverse_kernel[(num_tokens // tile.tokens + count, heads)](
            inputs, parameters, inverses, rows, batch.num_rows, SIZES=sizes, CHUNK=tile.tokens, PRECISION=tile.precision,
            num_warps=4, num_stages=1, **options,
        )  # fmt: skip
        delta_prefill_kernel[(count, heads, cdiv(value_size, tile.features))](
            inputs, parameters, inverses, states, out, rows, states.stride(0), SIZES=sizes, BLOCK_V=tile.features, CHUNK=tile.tokens,
            PRECISION=tile.precision, num_warps=tile.num_warps, num_stages=1, **options,
        )  # fmt: skip
    return out
