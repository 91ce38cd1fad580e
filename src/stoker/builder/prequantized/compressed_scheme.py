"""A scheme of compressed-tensors: how the weights and the activations of a group of modules are quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stoker.base.errors import CheckpointError
from stoker.quant.formats.int4 import GROUP_SIZES

_BY_GROUP = ("group", "tensor_group")
_BITS = {"int": tuple(range(1, 9)), "float": (4, 8)}


@dataclass(frozen=True, slots=True)
class Scheme:
    """A group of settings. `weights` and `inputs` are its settings of weights and activations, which are empty if not quantized."""

    path: str  # in quantization_config, for messages
    weights: dict[str, Any]
    inputs: dict[str, Any]
    stored_as: str | None  # the format of the group or of the checkpoint; None if it does not tell

    @property
    def bits(self) -> int:
        """The number of bits of a value."""
        bits: int = self.weights.get("num_bits", 8)
        return bits

    @property
    def kind(self) -> str:
        """int or float."""
        return str(self.weights.get("type", "int")).lower()

    @property
    def strategy(self) -> str:
        """channel, tensor, group, tensor_group or block."""
        if named := self.weights.get("strategy"):
            return str(named).lower()
        size = self.weights.get("group_size")
        return "tensor" if size is None and self.bits == 8 else "group" if size is not None and size > 0 else "channel"

    @property
    def group(self) -> int | None:
        """The number of input features in a group; None for one group per row."""
        size = self.weights.get("group_size") if self.strategy in _BY_GROUP else None
        return None if size == -1 else size

    @property
    def is_symmetric(self) -> bool:
        """Whether values have no zero point."""
        return self.weights.get("symmetric") is not False

    @property
    def is_reordered(self) -> bool:
        """Whether groups consist of any input features (`weight_g_idx`)."""
        return self.weights.get("actorder") in ("group", "dynamic", True)

    @property
    def input_type(self) -> tuple[Any, str]:
        """(bits, int or float) of activations: those of the weights if the settings do not have them."""
        return self.inputs.get("num_bits", self.bits), str(self.inputs.get("type", self.kind)).lower()

    @property
    def has_static_inputs(self) -> bool:
        """Whether activations have a scale that the checkpoint stores."""
        return bool(self.inputs) and not self.inputs.get("dynamic")

    @property
    def rounds_inputs(self) -> bool:
        """Whether the engine rounds the inputs of these modules, as the scheme says: 8 bits of the type of the weights."""
        by_row = self.strategy in ("channel", "tensor") and self.is_symmetric
        return bool(self.inputs) and self.input_type == (8, self.kind) and self.bits == 8 and (by_row or self.kind == "float")

    def check(self) -> None:
        """Raise CheckpointError for settings that are not supported."""
        bits, size = self.bits, self.weights.get("group_size")
        if not self.weights or type(bits) is not int or bits not in _BITS.get(self.kind, ()):
            raise CheckpointError(
                f"quantization_config: {self.path}weights has {str(bits)[:20]}-bit {self.kind[:20]} values, which are not supported.",
                cure="Supported: integers of 1 to 8 bits, and floating-point numbers of 4 and 8 bits.",
            )
        is_one_group = self.kind == "int" and size in (None, -1)
        if (size is not None and type(size) is not int) or (self.strategy in _BY_GROUP and size not in GROUP_SIZES and not is_one_group):
            raise CheckpointError(
                f"quantization_config: {self.path}weights: groups of {str(size)[:20]} are not supported.",
                cure=f"Supported: {', '.join(map(str, GROUP_SIZES))}.",
            )
        wrong = (
            (self.kind == "float" and not self.is_symmetric and "symmetric=false of floating-point numbers")
            or (self.kind == "float" and bits == 4 and self.strategy not in _BY_GROUP and f"strategy={self.strategy!r} of 4-bit float")
            or (self.kind == "int" and self.strategy in ("block", "tensor_group") and f"strategy={self.strategy!r} of integers")
            or (self.is_reordered and (self.kind == "float" or self.strategy != "group") and "actorder='group' without groups of integers")
        )
        if wrong:
            raise CheckpointError(f"quantization_config: {self.path}weights: {wrong} is not supported.", cure="Use another checkpoint.")
        if self.inputs and bits == 8 and self.strategy not in _BY_GROUP and self.input_type != (8, self.kind):
            found = f"{str(self.input_type[0])[:20]}-bit {self.input_type[1][:20]}"
            raise CheckpointError(
                f"quantization_config: {self.path}: {found} input_activations of 8-bit {self.kind} weights are not supported.",
                cure="Use a checkpoint whose activations have the type of its weights.",
            )
