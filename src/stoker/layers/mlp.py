"""Feed-forward block."""

from __future__ import annotations

from torch import Tensor

from stoker.core.model_config import MLPConfig
from stoker.core.specs import LinearSpec, Spec
from stoker.kernels import ops
from stoker.kernels.types import PLAIN, Fusion
from stoker.layers.linear import joined
from stoker.layers.loader import Loader
from stoker.layers.norm import Norm


class MLP:
    """act(gate) × up → down, or act(up) → down."""

    def __init__(self, config: MLPConfig, loader: Loader, name: str, hidden: int) -> None:
        weights = loader.load(self.specs(config, name, hidden))
        self.up = weights["up"]
        self.down = weights["down"]
        self.activation = config.activation
        self.gated = config.gated
        self._gate = Fusion(gate=config.activation)
        self._gated_input, self._late = Fusion(input_gate=config.activation), self.down.min_input_gate_rows
        self.group = loader.group

    @staticmethod
    def specs(config: MLPConfig, name: str, hidden: int) -> dict[str, Spec]:
        parts = (config.size, config.size) if config.gated else (config.size,)
        up = LinearSpec(name=f"{name}.up", in_features=hidden, parts=parts, bias=config.up_bias, split="column")
        down = LinearSpec(name=f"{name}.down", in_features=config.size, parts=(hidden,), bias=config.down_bias, split="row")
        return {"up": up, "down": down}

    all_specs = specs

    def __call__(self, x: Tensor, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        """mlp(norm(x)) + residual."""
        inner, fusion = self._inner(x, norm)
        return joined(self.down, inner, self.group, residual, fusion)

    def partial(self, x: Tensor) -> Tensor:
        """This rank's summand of the output."""
        return self.down(*self._inner(x, None))

    def _inner(self, x: Tensor, norm: Norm | None) -> tuple[Tensor, Fusion]:
        """What `down` takes, and what it still is to do to that."""
        normed = PLAIN if norm is None else norm.fusion
        if not self.gated:
            return ops.activate(self.up(x, normed), self.activation), PLAIN
        if x.shape[0] >= self._late:
            return self.up(x, normed), self._gated_input
        return self.up(x, self._gate if norm is None else norm.gate(self.activation)), PLAIN
