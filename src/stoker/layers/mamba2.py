"""The Mamba 2 block: input projection, causal convolution, recurrence, gated norm, output projection."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.core.model_config import Mamba2Config
from stoker.core.specs import LinearSpec, Spec, TensorSpec
from stoker.kernels import ops
from stoker.kernels.types import PLAIN, Mamba2Params
from stoker.layers.linear import linear_all_reduce
from stoker.layers.loader import Loader
from stoker.layers.norm import Norm


class Mamba2:
    """Ranks divide the heads, and with them the groups of B and C."""

    def __init__(self, config: Mamba2Config, loader: Loader, name: str, hidden: int) -> None:
        self.config = config
        weights = loader.load(self.specs(config, name, hidden))
        self.project, self.out = weights["in"], weights["out"]
        self.conv, self.conv_bias = weights["conv"], weights.get("conv_bias")
        self.norm_weight: Tensor | None = weights.get("norm")
        self.group, size = loader.group, loader.sharding.size
        self.num_heads = config.num_heads // size
        self.num_groups = max(config.num_groups // size, 1)
        self.params = Mamba2Params(-weights["a_log"].exp(), weights["dt_bias"], weights["skip"], config.min_step, config.max_step)
        self.part_scales = self._part_scales(loader.device) if config.part_scales else None

    @staticmethod
    def specs(config: Mamba2Config, name: str, hidden: int) -> dict[str, Spec]:
        """The specs of all weights of the block. The input projection has the parts gate, x, B, C and time step."""
        heads, groups, size = config.num_heads, config.num_groups, config.head_size
        inner, bc = heads * size, groups * config.state_size
        specs: dict[str, Spec] = {
            "in": LinearSpec(
                name=f"{name}.in", in_features=hidden, parts=(inner, inner, bc, bc, heads), bias=config.in_bias, split="heads",
                head_size=size, part_heads=(heads, heads, groups, groups, heads),
            ),
            "out": LinearSpec(
                name=f"{name}.out", in_features=inner, parts=(hidden,), bias=config.out_bias, split="row_heads", head_size=size
            ),
        }  # fmt: skip
        shapes: dict[str, tuple[int, ...]] = {"weight": (config.local_channels(), config.kernel)}
        if config.conv_bias:
            shapes["bias"] = (config.local_channels(),)
        for suffix, shape in shapes.items():
            specs["conv" if suffix == "weight" else "conv_bias"] = TensorSpec(
                name=f"{name}.conv.{suffix}", shape=shape, split="kv_heads", parts=(inner, bc, bc), part_heads=(heads, groups, groups)
            )
        for key in ("a_log", "dt_bias", "skip"):
            specs[key] = TensorSpec(name=f"{name}.{key}", shape=(heads,), split="kv_heads", dtype="float32")
        if config.norm is not None:
            specs["norm"] = TensorSpec(name=f"{name}.norm.weight", shape=(inner,), split="kv_heads", head_size=size)
        return specs

    def __call__(self, x: Tensor, batch: ForwardBatch, cache: KVCache, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        """mamba(norm(x)) + residual, [T, hidden], summed over ranks. Replaces the states of the step's rows in `cache`."""
        config, state = self.config, cache.state
        assert state is not None
        heads, groups, size = self.num_heads, self.num_groups, config.head_size
        inner, bc = heads * size, groups * config.state_size
        projected = self.project(x, PLAIN if norm is None else norm.fusion)
        if self.part_scales is not None:
            projected.mul_(self.part_scales)
        gate, inputs, dt = projected.split_with_sizes((inner, inner + 2 * bc, heads), dim=-1)
        convolved = ops.causal_conv(inputs, self.conv, self.conv_bias, state.conv, batch, config.activation)
        values, b, c = convolved.split_with_sizes((inner, bc, bc), dim=-1)
        b, c = b.unflatten(-1, (groups, -1)), c.unflatten(-1, (groups, -1))
        out = ops.mamba2(values.unflatten(-1, (heads, size)), dt, b, c, self.params, state.recurrent, batch)
        return linear_all_reduce(self.out, self._gated(out.flatten(1), gate), self.group, residual)

    def _part_scales(self, device: torch.device) -> Tensor:
        """The multiplier of each row of this rank's input projection, float32. In float32, so that the factors are not rounded."""
        inner, bc = self.num_heads * self.config.head_size, self.num_groups * self.config.state_size
        rows = torch.tensor((inner, inner, bc, bc, self.num_heads), device=device)
        return torch.tensor(self.config.part_scales, device=device).repeat_interleave(rows, output_size=2 * (inner + bc) + self.num_heads)

    def _gated(self, out: Tensor, gate: Tensor) -> Tensor:
        """The output of the recurrence [T, inner], multiplied by silu(gate) and normalized within each group of features."""
        config, num_ranks = self.config, self.config.num_heads // self.num_heads
        if config.norm is None:
            return (out.float() * F.silu(gate.float())).to(out.dtype)
        assert self.norm_weight is not None
        if config.norm_groups % num_ranks == 0:
            groups = config.norm_groups // num_ranks
            return ops.gated_norm(out, gate, self.norm_weight, config.norm.eps, groups, config.gate_first)
        return self._gated_over_ranks(out, gate, self.norm_weight, config.norm.eps)

    def _gated_over_ranks(self, out: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`ops.gated_norm` of a single group whose features are divided over the ranks."""
        wide, factor = out.float(), F.silu(gate.float())
        if self.config.gate_first:
            wide = wide * factor
        total = ops.all_reduce(wide.square().sum(-1, keepdim=True), self.group)
        features = self.config.num_heads * self.config.head_size
        wide = (wide * (total / features + eps).rsqrt()).to(out.dtype) * weight
        return wide if self.config.gate_first else (wide * factor).to(out.dtype)
