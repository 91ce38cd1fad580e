"""The norm block."""

from __future__ import annotations

from torch import Tensor

from stoker.core.model_config import NormConfig
from stoker.core.specs import Spec, TensorSpec
from stoker.kernels import ops
from stoker.kernels.types import Fusion
from stoker.layers.loader import Loader


class Norm:
    """RMS norm or layer norm over the last axis."""

    def __init__(self, config: NormConfig, loader: Loader, name: str, size: int) -> None:
        weights = loader.load(self.specs(config, name, size))
        self.weight: Tensor | None = weights.get("weight")
        self.bias: Tensor | None = weights.get("bias")
        self.eps = config.eps
        self.kind = config.kind
        self.fusion = self._fusion(None)  # for a linear that computes the norm of its input
        self._gated_fusions: dict[str, Fusion] = {}

    @staticmethod
    def specs(config: NormConfig, name: str, size: int) -> dict[str, Spec]:
        """The specs of the norm's weight and bias, as far as the config has them."""
        exists = {"weight": config.weight, "bias": config.bias}
        dtype = "float32" if config.wide else None
        return {key: TensorSpec(name=f"{name}.{key}", shape=(size,), dtype=dtype) for key in exists if exists[key]}

    def __call__(self, x: Tensor) -> Tensor:
        return ops.norm(x, self.weight, self.bias, self.eps, self.kind)

    def gated_fusion(self, activation: str) -> Fusion:
        """The fusion for a gated linear that computes this norm of its input. Cached for each activation."""
        if activation not in self._gated_fusions:
            self._gated_fusions[activation] = self._fusion(activation)
        return self._gated_fusions[activation]

    def _fusion(self, gate: str | None) -> Fusion:
        """The fusion for a linear that computes this norm of its input and, with `gate`, gates its output."""
        return Fusion(self.kind, self.weight, self.bias, self.eps, gate)
