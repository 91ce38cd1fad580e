"""HQQ checkpoints: weights of 1 to 8 bits in groups, with a scale and a zero point per group that are floating-point numbers.

A module has `W_q`, `scale`, `zero`, and its settings as tensors: `shape` [2] (out, in), `axis`, `group_size`, `packing` (a name in bytes)
and others. real = (value − zero) × scale, where the values of the flat weight are a matrix with one group in each row (axis 1, which is
[count / group_size, group_size]) or in each column (axis 0, which is [group_size, count / group_size]).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN
from stoker.builder.checkpoint.weights import CheckpointWeights, TensorInfo
from stoker.builder.prequantized.checks import FLOATS, check_known_keys, check_tensor, check_values, modules_with, read_section
from stoker.builder.prequantized.weight import DequantizedWeight, PrequantizedWeight, ReadWeights
from stoker.quant import groups
from stoker.quant.formats.int4 import GROUP_SIZES, Int4
from stoker.quant.formats.int8_grouped import GroupedInt8

_MODEL_KEYS = ("quant_method", "quant_config", "skip_modules")
# Settings of a module, which its tensors repeat; those of the search for the values have no effect on what is stored.
_WEIGHT_KEYS = ("nbits", "channel_wise", "group_size", "optimize", "round_zero", "axis", "view_as_float")
_MODULE_VALUES: dict[str, tuple[Any, ...]] = {
    "offload_meta": (True, False, None), "scale_quant_params": (None,), "zero_quant_params": (None,),
}  # fmt: skip
_REQUIRED = (".scale", ".zero", ".shape", ".axis", ".group_size", ".packing")
_OPTIONAL = (
    ".nbits", ".unpack_view_dtype", ".view_as_float", ".quant_scale", ".quant_zero", ".compute_dtype", ".offload_meta",
    ".encoded_state_dict", ".stores_quant_config", ".channel_wise", ".optimize", ".round_zero",
)  # fmt: skip
_MAX_TEXT = 64  # bytes of a name
_ROW_GROUP = 128  # input features per group of a weight with one group per row, if no supported size divides the row
# packing → (values of a packed word, bits between them, dtype of a word). The first values are in the highest bits.
_PACKINGS = {
    "8bit_u8": (1, 8, torch.uint8),
    "4bit_u8": (2, 4, torch.uint8),
    "3bit_32": (10, 3, torch.int32),
    "2bit_u8": (4, 2, torch.uint8),
    "1bit_u8": (8, 1, torch.uint8),
}


@dataclass(frozen=True, slots=True)
class _Module:
    """The settings of a quantized module, as its tensors store them."""

    name: str
    out_features: int
    in_features: int
    group: int  # values per group
    axis: int
    packing: str

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """The shape of the matrix of values."""
        others = self.out_features * self.in_features // self.group
        return (self.group, others) if self.axis == 0 else (others, self.group)

    @property
    def packed_rows(self) -> int:
        """The number of rows of `W_q`. Each holds values of several rows of the matrix, which are `packed_rows` rows apart."""
        return -(-self.matrix_shape[0] // _PACKINGS[self.packing][0])

    def values(self, packed: Tensor) -> Tensor:
        """uint8 [rows, columns] of `matrix_shape`, from `W_q`."""
        per_word, bits, dtype = _PACKINGS[self.packing]
        words = packed.contiguous().view(dtype)
        parts = [((words >> (bits * (per_word - 1 - i))) & (2**bits - 1)).to(torch.uint8) for i in range(per_word)]
        return torch.cat(parts)[: self.matrix_shape[0]]


def read_hqq(weights: CheckpointWeights, quantization: dict[str, Any]) -> ReadWeights:
    """The quantized weights by name. The settings in the tensors decide how a weight is stored, as in the library.

    Raises CheckpointError for unknown settings, and for tensors that do not fit together.
    """
    _check_settings(quantization)
    return {f"{module}.weight": _read_module(weights, module) for module in modules_with(weights.tensors, ".W_q", _REQUIRED)}


def _check_settings(quantization: dict[str, Any]) -> None:
    """Raise CheckpointError for an unknown setting. `quant_config` has the settings of all modules, or those of each by its tag."""
    check_known_keys(quantization, _MODEL_KEYS)
    config = read_section(quantization, "quant_config")
    is_common = not config or "weight_quant_params" in config
    for tag, section in [("", config)] if is_common else [(f"{key}.", read_section(config, key)) for key in config]:
        path = f"quant_config.{tag}"
        check_known_keys(section, ("weight_quant_params", *_MODULE_VALUES), path)
        check_values(section, _MODULE_VALUES, path)
        check_known_keys(read_section(section, "weight_quant_params"), _WEIGHT_KEYS, f"{path}weight_quant_params.")


def _read_module(weights: CheckpointWeights, name: str) -> PrequantizedWeight | DequantizedWeight:
    """The weight of a module: in groups of input features if its groups are such, otherwise plain numbers."""
    module, tensors = _read_settings(weights, name), weights.tensors
    rows, columns = module.matrix_shape
    _, bits, dtype = _PACKINGS[module.packing]
    packed = tensors[f"{name}.W_q"]
    if packed.dtype in FLOATS:  # view_as_float: the same bytes with another dtype
        check_tensor(tensors, f"{name}.W_q", (module.packed_rows, columns * dtype.itemsize // packed.dtype.itemsize), *FLOATS)
    else:
        check_tensor(tensors, f"{name}.W_q", (module.packed_rows, columns), dtype)
    for suffix in ("scale", "zero"):
        check_tensor(tensors, f"{name}.{suffix}", (1, columns) if module.axis == 0 else (rows, 1), *FLOATS)
    sources = (f"{name}.W_q", f"{name}.scale", f"{name}.zero", *(name + suffix for suffix in (*_REQUIRED[2:], *_OPTIONAL)))
    sources = tuple(source for source in sources if source in tensors)
    shape = (module.out_features, module.in_features)
    group = _engine_group(module)
    if group is None or (bits < 8 and module.in_features % 2):
        return DequantizedWeight(sources, TensorInfo(shape, torch.float32), lambda parts: _real_values(module, parts))
    if bits == 8:
        return PrequantizedWeight(sources, shape, GroupedInt8(group_size=group, shifted=True), _repack(module, group, offset=128))
    chosen = Int4(group_size=group, zero="float", scale_dtype="float32", clip=False)
    return PrequantizedWeight(sources, shape, chosen, _repack(module, group, offset=0))


def _read_settings(weights: CheckpointWeights, name: str) -> _Module:
    """The settings of a module. Raises CheckpointError for settings that are not supported, or contradict each other."""
    shape = _integers(weights, f"{name}.shape", 2)
    axis, group = _integers(weights, f"{name}.axis", 1)[0], _integers(weights, f"{name}.group_size", 1)[0]
    packing = _text(weights, f"{name}.packing")
    for suffix in ("quant_scale", "quant_zero"):
        if f"{name}.{suffix}" in weights.tensors and _integers(weights, f"{name}.{suffix}", 1) != [0]:
            raise CheckpointError(f"{name}.{suffix} is not 0.", cure="Use a checkpoint whose scales and zero points are not quantized.")
    if packing not in _PACKINGS:
        raise CheckpointError(f"{name}.packing is {packing!r:.60}, which is not supported.", cure=f"Supported: {', '.join(_PACKINGS)}.")
    if axis not in (0, 1):
        raise CheckpointError(f"{name}.axis is {axis}.", cure="Supported: 0 and 1.")
    if min(*shape, group) < 1 or max(*shape, group) > 1 << 24 or math.prod(shape) % group:
        raise CheckpointError(f"{name}.group_size is {group}, which does not divide a weight of shape {shape}.", cure=DOWNLOAD_AGAIN)
    return _Module(name, shape[0], shape[1], group, axis, packing)


def _integers(weights: CheckpointWeights, name: str, count: int) -> list[int]:
    """The `count` integers of a tensor. Raises CheckpointError for a tensor of other contents."""
    info = weights.tensors[name]
    if math.prod(info.shape) != count or info.dtype.is_floating_point or info.dtype.is_complex:
        raise CheckpointError(f"{weights.location(name)} {list(info.shape)} is not {count} integers.", cure=DOWNLOAD_AGAIN)
    return [int(value) for value in weights.read(name).reshape(-1)]


def _text(weights: CheckpointWeights, name: str) -> str:
    """The text in a tensor of bytes. Raises CheckpointError for a tensor of other contents."""
    info = weights.tensors[name]
    if info.dtype != torch.uint8 or len(info.shape) != 1 or info.shape[0] > _MAX_TEXT:
        raise CheckpointError(f"{weights.location(name)} {list(info.shape)} is not a short text.", cure=DOWNLOAD_AGAIN)
    return bytes(weights.read(name).tolist()).decode("ascii", "replace")


def _engine_group(module: _Module) -> int | None:
    """The size of the engine's groups of input features, which divides that of the module. None if its groups cannot be divided so."""
    if module.axis == 0 or module.in_features % module.group:
        return None
    any_size = _ROW_GROUP if module.group == module.in_features else None  # the scale of a row is the same in all of its groups
    return max((size for size in GROUP_SIZES if module.group % size == 0), default=any_size)


def _real_values(module: _Module, parts: list[Tensor]) -> Tensor:
    """The weight, float32 [out, in], from `W_q`, scales and zero points."""
    packed, scale, zero, *_ = parts
    return ((module.values(packed).float() - zero.float()) * scale.float()).view(module.out_features, module.in_features)


def _repack(module: _Module, group: int, offset: int) -> Callable[[list[Tensor]], dict[str, Tensor]]:
    """A function from a module's tensors to the stored tensors of its format, which stores values minus `offset` in groups of `group`."""

    def split(grid: Tensor) -> Tensor:
        """[out, groups] from one number per group of the module: a group that is larger than `group` is several groups."""
        repeated = grid.view(module.out_features, -1).repeat_interleave(-(-module.group // group), 1)
        return repeated[:, : -(-module.in_features // group)].contiguous()

    def repack(parts: list[Tensor]) -> dict[str, Tensor]:
        """The stored tensors by suffix: real = value × scale + offset."""
        packed, scale, zero = parts[0], parts[1].float(), parts[2].float()
        values = module.values(packed).view(module.out_features, module.in_features)
        weight = (values.int() - offset).to(torch.int8) if offset else groups.pack(values)
        return {"weight": weight, "scale": split(scale), "offset": split((offset - zero) * scale)}

    return repack
