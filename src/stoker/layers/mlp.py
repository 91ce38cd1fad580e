"""The MLP block."""

from __future__ import annotations

import statistics

import torch
from torch import Tensor

from stoker.core.model_config import MLPConfig
from stoker.core.specs import LinearSpec, Spec, TensorSpec
from stoker.kernels import ops
from stoker.kernels.types import PLAIN, Fusion
from stoker.layers.linear import linear_all_reduce
from stoker.layers.loader import Loader
from stoker.layers.norm import Norm


class MLP:
    """down(act(gate(x)) × up(x)), or down(act(up(x))). Gate and up are one fused linear.

    xielu has four parameters per layer, which `ops.xielu` describes.
    """

    def __init__(self, config: MLPConfig, loader: Loader, name: str, hidden: int) -> None:
        weights = loader.load(self.specs(config, name, hidden))
        self.up = weights["up"]
        self.down = weights["down"]
        self.activation_parameters: Tensor | None = weights.get("activation")
        self.activation = config.activation
        self.gated = config.gated
        self.gate_scale, self.out_scale = config.gate_scale, config.out_scale
        self._gate = Fusion(gate=config.activation)
        self._gated_input = Fusion(input_gate=config.activation)
        self.group = loader.group
        self.size = config.size
        self.cutoff = statistics.NormalDist().inv_cdf(config.sparsity) if config.sparsity else None

    @staticmethod
    def specs(config: MLPConfig, name: str, hidden: int) -> dict[str, Spec]:
        """The specs of the block's two linears, and of the parameters of its activation function."""
        parts = (config.size, config.size) if config.gated else (config.size,)
        up = LinearSpec(name=f"{name}.up", in_features=hidden, parts=parts, bias=config.up_bias, split="column")
        down = LinearSpec(name=f"{name}.down", in_features=config.size, parts=(hidden,), bias=config.down_bias, split="row")
        if config.activation != "xielu":
            return {"up": up, "down": down}
        return {"up": up, "down": down, "activation": TensorSpec(name=f"{name}.activation", shape=(4,), dtype="float32")}

    all_specs = specs

    def __call__(self, x: Tensor, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        """mlp(norm(x)) + residual, [T, hidden], summed over ranks."""
        inner, fusion = self._inner(x, norm)
        if self.out_scale == 1.0:
            return linear_all_reduce(self.down, inner, self.group, residual, fusion)
        out = linear_all_reduce(self.down, inner, self.group, None, fusion)
        return out * self.out_scale if residual is None else residual.add(out, alpha=self.out_scale)

    def partial(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        """This rank's summand of mlp(norm(x)), [T, hidden], before the all-reduce."""
        out = self.down(*self._inner(x, norm))
        return out if self.out_scale == 1.0 else out * self.out_scale

    @property
    def is_scaled(self) -> bool:
        """Whether the block has multipliers, which fused layers do not apply."""
        return (self.gate_scale, self.out_scale) != (1.0, 1.0)

    def _inner(self, x: Tensor, norm: Norm | None) -> tuple[Tensor, Fusion]:
        """(input of the `down` linear, fusion with which `down` must be called)."""
        up_fusion = PLAIN if norm is None else norm.fusion
        if self.activation_parameters is not None:
            return ops.xielu(self.up(x, up_fusion), self.activation_parameters), PLAIN
        if self.cutoff is not None:
            gate, up = self.up(x, up_fusion).chunk(2, dim=-1)
            return ops.gated(torch.cat((self._sparse(gate, self.cutoff), up), dim=-1), self.activation), PLAIN
        if not self.gated:
            return ops.activate(self.up(x, up_fusion), self.activation), PLAIN
        if self.gate_scale != 1.0:
            wide = self.up(x, up_fusion)
            wide.narrow(-1, 0, wide.shape[-1] // 2).mul_(self.gate_scale)
            return ops.gated(wide, self.activation), PLAIN
        if x.shape[0] >= self.down.min_input_gate_rows and not self.up.gates_output(x):
            return self.up(x, up_fusion), self._gated_input
        return self.up(x, self._gate if norm is None else norm.gated_fusion(self.activation)), PLAIN

    def _sparse(self, gate: Tensor, cutoff: float) -> Tensor:
        """relu(gate - (mean + cutoff × standard deviation)) of this rank's columns of the gate [T, local size].

        Mean and deviation are those of a token's columns on all ranks. Columns that fill a shard are 0.
        """
        wide = gate.float()
        sums = torch.stack((wide.sum(-1), wide.square().sum(-1)), dim=-1)
        mean, square = (ops.all_reduce(sums, self.group) / self.size).unbind(-1)
        limit = mean + cutoff * (square - mean.square()).clamp(min=0).sqrt()
        return (wide - limit.unsqueeze(-1)).relu().to(gate.dtype)
