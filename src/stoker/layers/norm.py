"""Norm block."""

from __future__ import annotations

from torch import Tensor

from stoker.kernels import ops
from stoker.layers.config import NormConfig
from stoker.layers.loader import Loader
from stoker.layers.specs import Spec, TensorSpec


class Norm:
    """RMS or layer norm over the last axis."""

    def __init__(self, config: NormConfig, loader: Loader, name: str, size: int) -> None:
        weights = loader.load(self.specs(config, name, size))
        self.weight: Tensor | None = weights.get("weight")
        self.bias: Tensor | None = weights.get("bias")
        self.eps = config.eps
        self.kind = config.kind

    @staticmethod
    def specs(config: NormConfig, name: str, size: int) -> dict[str, Spec]:
        wanted = {"weight": config.weight, "bias": config.bias}
        dtype = "float32" if config.wide else None
        return {key: TensorSpec(name=f"{name}.{key}", shape=(size,), dtype=dtype) for key, there in wanted.items() if there}

    def __call__(self, x: Tensor) -> Tensor:
        return ops.norm(x, self.weight, self.bias, self.eps, self.kind)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""
        return ops.add_norm(x, residual, self.weight, self.bias, self.eps, self.kind)
