"""Causal depthwise convolution over the tokens of each row, in plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.kernels.reference.activation import ACTIVATIONS
from stoker.kernels.reference.state_rows import state_rows

if TYPE_CHECKING:
    from stoker.core.forward_batch import ForwardBatch


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, batch: ForwardBatch, activation: str) -> Tensor:
    """activation(conv(x)), [T, C] (`ops.causal_conv`). Replaces the states of the rows."""
    rows, taps = state_rows(batch), weight.shape[1]

    def update(state: Tensor, tokens: slice | Tensor) -> tuple[Tensor, Tensor]:
        window = torch.cat((state, x[tokens][:, :, None].to(states.dtype)), dim=-1)
        return (window * weight).sum(-1), window[..., 1:]

    parts = rows.token_by_token(states, update)
    if rows.num_prefills:
        old = rows.initial(states, rows.prefills)
        inputs = torch.cat((old, rows.pad(x).transpose(1, 2).to(states.dtype)), dim=-1)  # [P, C, taps - 1 + L]
        last = rows.lengths[:, None] + torch.arange(taps - 1, device=x.device)  # the places of the last taps - 1 inputs
        rows.store(states, rows.prefills, inputs.gather(2, last[:, None].expand(-1, inputs.shape[1], -1)))
        parts.append(rows.unpad(F.conv1d(inputs, weight[:, None], groups=weight.shape[0]).transpose(1, 2)))
    out = torch.cat(parts)
    return ACTIVATIONS[activation](out if bias is None else out + bias).to(x.dtype)
