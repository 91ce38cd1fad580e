"""The Mamba block: input projection, causal convolution, projection of time step, B and C, recurrence, gate, output projection."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.core.model_config import Mamba1Config
from stoker.core.specs import LinearSpec, Spec, TensorSpec
from stoker.kernels import ops
from stoker.kernels.types import PLAIN, SelectiveScanParams
from stoker.layers.linear import linear_all_reduce
from stoker.layers.loader import Loader
from stoker.layers.norm import Norm


class Mamba1:
    """Ranks divide the features. Time step, B and C are projected from all features, and therefore summed over ranks."""

    def __init__(self, config: Mamba1Config, loader: Loader, name: str, hidden: int) -> None:
        self.config = config
        weights = loader.load(self.specs(config, name, hidden))
        self.project, self.out = weights["in"], weights["out"]
        self.project_inputs, self.project_step = weights["inputs"], weights["step"]
        self.conv, self.conv_bias = weights["conv"], weights.get("conv_bias")
        self.group = loader.group
        self.params = SelectiveScanParams(-weights["a_log"].exp(), weights["dt_bias"], weights["skip"])
        self.sizes = _input_sizes(config)
        self.norm_weights: list[Tensor | None] = [weights.get(key) for key in self.sizes]

    @staticmethod
    def specs(config: Mamba1Config, name: str, hidden: int) -> dict[str, Spec]:
        """The specs of all weights of the block. The input projection has the parts x and gate; `inputs` has time step, B and C."""
        inner, sizes = config.inner_size, _input_sizes(config)
        specs: dict[str, Spec] = {
            "in": LinearSpec(
                name=f"{name}.in", in_features=hidden, parts=(inner, inner), bias=config.in_bias, split="heads", head_size=1,
                part_heads=(inner, inner),
            ),
            "inputs": LinearSpec(
                name=f"{name}.inputs", in_features=inner, parts=(sum(sizes.values()),), split="row_heads", head_size=1, quantize=False
            ),
            "step": LinearSpec(
                name=f"{name}.step", in_features=config.step_rank, parts=(inner,), split="heads", head_size=1, part_heads=(inner,),
                quantize=False,
            ),
            "out": LinearSpec(
                name=f"{name}.out", in_features=inner, parts=(hidden,), bias=config.out_bias, split="row_heads", head_size=1
            ),
            "conv": TensorSpec(name=f"{name}.conv.weight", shape=(inner, config.kernel), split="kv_heads"),
            "a_log": TensorSpec(name=f"{name}.a_log", shape=(inner, config.state_size), split="kv_heads", dtype="float32"),
        }  # fmt: skip
        if config.conv_bias:
            specs["conv_bias"] = TensorSpec(name=f"{name}.conv.bias", shape=(inner,), split="kv_heads")
        for key in ("dt_bias", "skip"):
            specs[key] = TensorSpec(name=f"{name}.{key}", shape=(inner,), split="kv_heads", dtype="float32")
        if config.norm is not None and config.norm.weight:
            specs |= {key: TensorSpec(name=f"{name}.{key}.weight", shape=(size,)) for key, size in sizes.items()}
        return specs

    def __call__(self, x: Tensor, batch: ForwardBatch, cache: KVCache, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        """mamba(norm(x)) + residual, [T, hidden], summed over ranks. Replaces the states of the step's rows in `cache`."""
        config, state = self.config, cache.state
        assert state is not None
        values, gate = self.project(x, PLAIN if norm is None else norm.fusion).chunk(2, dim=-1)
        convolved = ops.causal_conv(values, self.conv, self.conv_bias, state.conv, batch, config.activation)
        inputs = ops.all_reduce(self.project_inputs(convolved), self.group)
        dt, b, c = self._normalized(inputs.split_with_sizes(tuple(self.sizes.values()), dim=-1))
        out = ops.selective_scan(convolved, self.project_step(dt), b, c, self.params, state.recurrent, batch)
        gated = (out.float() * F.silu(gate.float())).to(out.dtype)
        return linear_all_reduce(self.out, gated, self.group, residual)

    def _normalized(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The inputs of the recurrence, each [T, size], normalized if the block has norms."""
        norm, dense = self.config.norm, [part.contiguous() for part in inputs]
        if norm is None:
            return dense
        return [ops.norm(part, weight, None, norm.eps, norm.kind) for part, weight in zip(dense, self.norm_weights, strict=True)]


def _input_sizes(config: Mamba1Config) -> dict[str, int]:
    """The widths of the inputs of the recurrence that are projected from the convolved features, by the name of their norm."""
    return {"step_norm": config.step_rank, "b_norm": config.state_size, "c_norm": config.state_size}
