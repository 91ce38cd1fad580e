"""The gated delta rule in plain PyTorch: token by token for decodes, in chunks for prefills (arXiv 2412.06464)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.kernels.reference.state_rows import state_rows
from stoker.kernels.types import DeltaParams

if TYPE_CHECKING:
    from stoker.core.forward_batch import ForwardBatch

CHUNK = 64  # tokens whose pairs are computed at once
_EPS = 1e-6  # of the norm of queries and keys


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, dt: Tensor, beta: Tensor, params: DeltaParams, states: Tensor, batch: ForwardBatch
) -> Tensor:
    """The output [T, H, Dv] of the recurrence (`ops.delta_rule`). Replaces the states of the rows."""
    rows = state_rows(batch)
    repeats = v.shape[1] // k.shape[1]
    q = _normalized(q) * q.shape[-1] ** -0.5
    q, k = (t.repeat_interleave(repeats, dim=1) for t in (q, _normalized(k)))
    values, decay, beta = v.float(), params.a * F.softplus(dt.float() + params.dt_bias), beta.float().sigmoid()

    def update(state: Tensor, tokens: slice | Tensor) -> tuple[Tensor, Tensor]:
        state = state * decay[tokens].exp()[..., None, None]
        retrieved = (state * k[tokens][..., None]).sum(-2)
        delta = (values[tokens] - retrieved) * beta[tokens][:, :, None]
        state = state + k[tokens][..., None] * delta[:, :, None]
        return (state * q[tokens][..., None]).sum(-2), state

    parts = rows.token_by_token(states, update)
    if rows.num_prefills:
        state = rows.initial(states, rows.prefills)
        padded = [rows.pad(t) for t in (q, k, values, decay, beta)]
        outs = []
        for chunk in zip(*(t.transpose(1, 2).split(CHUNK, dim=2) for t in padded), strict=True):
            out, state = _chunk(chunk[0], chunk[1], chunk[2], chunk[3], chunk[4], state)
            outs.append(out.transpose(1, 2))
        rows.store(states, rows.prefills, state)
        parts.append(rows.unpad(torch.cat(outs, dim=1)))
    return torch.cat(parts).to(v.dtype)


def _chunk(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """(output [P, H, L, Dv], state after the chunk). q, k [P, H, L, Dk]; v [P, H, L, Dv]; decay, beta [P, H, L]; state [P, H, Dk, Dv].

    The corrected values of the chunk solve a unit lower triangular system, since each one depends on those of earlier tokens.
    """
    total = decay.cumsum(-1)
    is_later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    pairs = (total[..., :, None] - total[..., None, :]).masked_fill(~is_later, -torch.inf).exp()
    system = (beta[..., None] * (k @ k.mT) * pairs).tril(-1) + torch.eye(q.shape[2], device=q.device)
    wanted = beta[..., None] * (v - total.exp()[..., None] * (k @ state))
    corrected = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = total.exp()[..., None] * (q @ state) + ((q @ k.mT) * pairs) @ corrected
    to_end = (total[..., -1:] - total).exp()
    state = state * total[..., -1].exp()[..., None, None] + (k * to_end[..., None]).mT @ corrected
    return out, state


def _normalized(x: Tensor) -> Tensor:
    """x [..., D] in float32, divided by its length."""
    wide = x.float()
    return wide * (wide.square().sum(-1, keepdim=True) + _EPS).rsqrt()
