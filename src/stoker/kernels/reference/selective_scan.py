"""The recurrence of Mamba in plain PyTorch (arXiv 2312.00752): token by token for decodes, in blocks side by side for prefills."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.kernels.reference.state_rows import state_rows
from stoker.kernels.types import SelectiveScanParams

if TYPE_CHECKING:
    from stoker.core.forward_batch import ForwardBatch

# The bytes of the states that a prefill updates in one operation. A CPU is fastest with one state at a time, except for small ones, whose
# operations cost more than their arithmetic.
STEP_BYTES = 1 << 16


def selective_scan(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, params: SelectiveScanParams, states: Tensor, batch: ForwardBatch) -> Tensor:
    """The output [T, D] of the recurrence (`ops.selective_scan`). Replaces the states of the rows."""
    rows = state_rows(batch)
    step = F.softplus(dt.float() + params.dt_bias)
    wide, b, c = x.float(), b.float(), c.float()
    inputs = wide * step

    def update(state: Tensor, tokens: slice | Tensor) -> tuple[Tensor, Tensor]:
        state = state * (step[tokens][:, :, None] * params.a).exp()
        state.addcmul_(inputs[tokens][:, :, None], b[tokens][:, None])
        return torch.einsum("rdn,rn->rd", state, c[tokens]), state

    parts = rows.token_by_token(states, update)
    if rows.num_prefills:
        state = rows.initial(states, rows.prefills)
        out, state = _scan(rows.pad(inputs), rows.pad(step), rows.pad(b), rows.pad(c), params.a, state)
        rows.store(states, rows.prefills, state)
        parts.append(rows.unpad(out))
    return (torch.cat(parts) + wide * params.skip).to(x.dtype)


def _scan(x: Tensor, step: Tensor, b: Tensor, c: Tensor, a: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence over L tokens of P rows. Tokens whose x and time step are 0 do not change the state.

    x [P, L, D] was multiplied by the time step [P, L, D]; b, c [P, L, N]; a [D, N]; state [P, D, N]. Returns the output [P, L, D] and the
    state after the last token [P, D, N].

    The elements of a state decay at different rates, so that pairs of tokens have no matrix of decays as in Mamba 2. Instead, each row is
    cut into K blocks of B tokens, and K states are updated at once: B updates from zero states (from `state` in the first block), then the
    states at the ends of the blocks one after the other, then what each of them adds to the outputs of the block after it.
    """
    num_rows, length, num_features = x.shape
    num_blocks = _num_blocks(length, state)
    size = -(-length // num_blocks)
    x, step, b, c = (F.pad(t, (0, 0, 0, num_blocks * size - length)).unflatten(1, (num_blocks, size)) for t in (x, step, b, c))
    ends = torch.cat((state[:, None], state.new_zeros(num_rows, num_blocks - 1, *state.shape[1:])), dim=1)  # [P, K, D, N]
    out = x.new_empty(num_rows, num_blocks, size, num_features)
    for i in range(size):
        ends = ends * (step[:, :, i, :, None] * a).exp()
        ends.addcmul_(x[:, :, i, :, None], b[:, :, i, None])
        out[:, :, i] = torch.einsum("pkdn,pkn->pkd", ends, c[:, :, i])
    if num_blocks == 1:
        return out.flatten(1, 2)[:, :length], ends[:, 0]
    total = step.cumsum(2)  # from the start of the block
    starts = [ends[:, 0]]
    for i in range(1, num_blocks):
        starts.append(starts[-1] * (total[:, i, -1, :, None] * a).exp() + ends[:, i])
    before = torch.stack(starts[:-1], dim=1)  # the states before all blocks except the first
    for i in range(size):
        decayed = before * (total[:, 1:, i, :, None] * a).exp()
        out[:, 1:, i] += torch.einsum("pkdn,pkn->pkd", decayed, c[:, 1:, i])
    return out.flatten(1, 2)[:, :length], starts[-1]


def _num_blocks(length: int, state: Tensor) -> int:
    """The number of blocks of each row, at most the square root of its tokens: more would be more than the tokens of a block."""
    return max(1, min(math.isqrt(length), STEP_BYTES // (state.numel() * state.element_size())))
