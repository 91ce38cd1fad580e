"""The recurrence of Mamba 2 in plain PyTorch: token by token for decodes, in chunks for prefills (arXiv 2405.21060, section 6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.kernels.reference.state_rows import state_rows
from stoker.kernels.types import Mamba2Params

if TYPE_CHECKING:
    from stoker.core.forward_batch import ForwardBatch

CHUNK = 64  # tokens whose pairs are computed at once


def mamba2(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, params: Mamba2Params, states: Tensor, batch: ForwardBatch) -> Tensor:
    """The output [T, H, P] of the recurrence (`ops.mamba2`). Replaces the states of the rows."""
    rows = state_rows(batch)
    step = F.softplus(dt.float() + params.dt_bias).clamp(params.min_step, params.max_step)
    decay = step * params.a
    wide, repeats = x.float(), x.shape[1] // b.shape[1]
    b, c = (t.float().repeat_interleave(repeats, dim=1) for t in (b, c))  # [T, H, N]

    def update(state: Tensor, tokens: slice | Tensor) -> tuple[Tensor, Tensor]:
        state = state * decay[tokens].exp()[..., None, None]
        state = state + (step[tokens][:, :, None] * wide[tokens])[..., None] * b[tokens][:, :, None]
        return (state * c[tokens][:, :, None]).sum(-1), state

    parts = rows.token_by_token(states, update)
    if rows.num_prefills:
        state = rows.initial(states, rows.prefills)
        padded = [rows.pad(t) for t in (wide * step[..., None], decay, b, c)]
        outs = []
        for values, log_decay, keys, queries in zip(*(t.split(CHUNK, dim=1) for t in padded), strict=True):
            out, state = _chunk(values, log_decay, keys, queries, state)
            outs.append(out)
        rows.store(states, rows.prefills, state)
        parts.append(rows.unpad(torch.cat(outs, dim=1)))
    return (torch.cat(parts) + wide * params.skip[:, None]).to(x.dtype)


def _chunk(x: Tensor, decay: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence over one chunk of L tokens of P rows, as products of matrices.

    x [P, L, H, D] was multiplied by the time step; decay [P, L, H] is logarithmic; b, c [P, L, H, N]; state [P, H, D, N]. Returns the
    output [P, L, H, D] and the state after the chunk [P, H, D, N].
    """
    total = decay.cumsum(1)  # the logarithm of the decay from the start of the chunk
    pairs = total[:, :, None] - total[:, None]  # [P, to, from, H]
    is_later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()[..., None]
    scores = torch.einsum("plhn,pshn->plsh", c, b) * pairs.masked_fill(~is_later, -torch.inf).exp()
    out = torch.einsum("plsh,pshd->plhd", scores, x)
    out = out + torch.einsum("plhn,phdn->plhd", c, state) * total.exp()[..., None]
    to_end = (total[:, -1:] - total).exp()
    state = state * total[:, -1, :, None, None].exp() + torch.einsum("plhn,plhd->phdn", b * to_end[..., None], x)
    return out, state
