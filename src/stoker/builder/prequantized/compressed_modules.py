"""Tensors of a module of a compressed-tensors checkpoint, and the engine format that stores its weight.

A module has `weight` [out, in] of int8 or e4m3, or `weight_packed`: int32 words of integers, or bytes of two e2m1 values. Its scales are
`weight_scale` (one, one per row, per group or per block), which NVFP4 divides by `weight_global_scale`. Integers that are not symmetric
have a `weight_zero_point` with the shape of the scales; in packed words along the rows if the weight is packed. `weight_g_idx` [in] is
the group of each input feature.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN
from stoker.builder.checkpoint.weights import CheckpointWeights, TensorInfo
from stoker.builder.prequantized.checks import FLOATS, check_scales, check_tensor, dtype_name, matrix_shape
from stoker.builder.prequantized.compressed_scheme import Scheme
from stoker.builder.prequantized.dequantize import dequantize
from stoker.builder.prequantized.fp4 import E8M0, e8m0_values, mxfp4_tensors, nvfp4_tensors
from stoker.builder.prequantized.fp8 import block_size, repack_row_scales
from stoker.builder.prequantized.packed_int32 import feature_order, int4_tensors, split_groups, supported_group, unpack_padded
from stoker.builder.prequantized.weight import DequantizedWeight, PrequantizedWeight
from stoker.quant.format import Format
from stoker.quant.formats.block_fp8 import BlockFp8
from stoker.quant.formats.fp4 import Fp4
from stoker.quant.formats.fp8 import Fp8
from stoker.quant.formats.int4 import Int4
from stoker.quant.formats.int8 import Int8
from stoker.quant.formats.int8_grouped import GroupedInt8
from stoker.quant.formats.smoothquant import SmoothQuant
from stoker.quant.groups import Zero

_MAX_FEATURES = 1 << 24


def read_module(weights: CheckpointWeights, module: str, scheme: Scheme) -> PrequantizedWeight | DequantizedWeight:
    """The weight of a module with this scheme. Raises CheckpointError for tensors that do not fit it."""
    found = _Tensors(weights, module, scheme)
    if (scheme.bits, scheme.kind) == (4, "float"):
        return _read_fp4(found)
    if scheme.kind == "int":
        return _read_integers(found)
    return _read_fp8_rows(found) if scheme.strategy in ("channel", "tensor") else _read_fp8_blocks(found)


class _Tensors:
    """The tensors of a module, of which `values` is the weight."""

    def __init__(self, weights: CheckpointWeights, module: str, scheme: Scheme) -> None:
        self.weights, self.tensors, self.module, self.scheme = weights, weights.tensors, module, scheme
        self.is_packed = f"{module}.weight_packed" in self.tensors
        expects_packed = scheme.stored_as is not None and scheme.stored_as.endswith("pack-quantized")
        expects_plain = scheme.stored_as is not None and not expects_packed
        if (expects_packed and not self.is_packed) or (expects_plain and self.is_packed):
            name = "weight_packed" if expects_packed else "weight"
            raise CheckpointError(f"{module}.{name} is missing, and format={scheme.stored_as!r} needs it.", cure=DOWNLOAD_AGAIN)
        self.values = self.require("weight_packed" if self.is_packed else "weight")

    def require(self, suffix: str) -> str:
        """The name of a tensor of the module. Raises CheckpointError when it is missing."""
        name = f"{self.module}.{suffix}"
        if name not in self.tensors:
            raise CheckpointError(f"{name} is missing, and {self.module}.weight_scale needs it.", cure=DOWNLOAD_AGAIN)
        return name

    def sources(self, *used: str) -> tuple[str, ...]:
        """The names of the tensors `used`, and of the others that describe the module and are not needed."""
        others = [f"{self.module}.{suffix}" for suffix in ("weight_shape", "input_global_scale", "input_scale")]
        return (*used, *(name for name in others if name in self.tensors and name not in used))


def _read_fp8_rows(found: _Tensors) -> PrequantizedWeight:
    """e4m3 with one scale, or one per row."""
    shape, scale = matrix_shape(found.tensors, found.values), found.require("weight_scale")
    check_tensor(found.tensors, found.values, shape, torch.float8_e4m3fn)
    input_scales = (found.require("input_scale"),) if found.scheme.has_static_inputs else ()
    check_scales(found.tensors, found.values, scale, *input_scales)
    chosen = Fp8(activations="static" if input_scales else "token" if found.scheme.inputs else "none")
    return PrequantizedWeight((found.values, scale, *input_scales), shape, chosen, repack_row_scales(shape[0]))


def _read_fp8_blocks(found: _Tensors) -> PrequantizedWeight | DequantizedWeight:
    """e4m3 with a scale per block or group, which can be a power of two (MXFP8). Plain numbers if activations are not quantized."""
    scheme, shape, scale = found.scheme, matrix_shape(found.tensors, found.values), found.require("weight_scale")
    rows, columns = (1, scheme.group) if scheme.group is not None else block_size(scheme.weights.get("block_structure"))
    check_tensor(found.tensors, found.values, shape, torch.float8_e4m3fn)
    check_tensor(found.tensors, scale, (-(-shape[0] // rows), -(-shape[1] // columns)), *FLOATS, *E8M0)
    is_power = found.tensors[scale].dtype in E8M0
    chosen = BlockFp8(rows=rows, columns=columns)

    def repack(parts: list[Tensor]) -> dict[str, Tensor]:
        """The stored tensors of `BlockFp8`."""
        return {"weight": parts[0], "scale": e8m0_values(parts[1]) if is_power else parts[1].float()}

    sources = found.sources(found.values, scale)
    if scheme.inputs:
        return PrequantizedWeight(sources, shape, chosen, repack)
    return DequantizedWeight(sources, TensorInfo(shape, torch.float32), lambda parts: dequantize(chosen, repack(parts)))


def _read_fp4(found: _Tensors) -> PrequantizedWeight:
    """e2m1: NVFP4 with e4m3 scales and a global scale by which they are divided, or MXFP4."""
    rows, num_bytes = matrix_shape(found.tensors, found.require("weight_packed"))
    columns, scale, size = 2 * num_bytes, found.require("weight_scale"), found.scheme.group
    assert size is not None
    has_global = found.scheme.strategy == "tensor_group"
    check_tensor(found.tensors, found.values, (rows, num_bytes), torch.uint8)
    check_tensor(found.tensors, scale, (rows, -(-columns // size)), *((torch.float8_e4m3fn,) if has_global else E8M0))
    global_scale = (found.require("weight_global_scale"),) if has_global else ()
    for name in global_scale:
        if math.prod(found.tensors[name].shape) != 1 or found.tensors[name].dtype not in FLOATS:
            raise CheckpointError(f"{name} has shape {list(found.tensors[name].shape)}, and one number is expected.", cure=DOWNLOAD_AGAIN)

    def repack(parts: list[Tensor]) -> dict[str, Tensor]:
        """The stored tensors of `Fp4`."""
        return nvfp4_tensors(parts[0], parts[1], 1 / parts[2].float()) if has_global else mxfp4_tensors(found.values, parts[0], parts[1])

    chosen = Fp4(group_size=size, scale="e4m3" if has_global else "e8m0")
    return PrequantizedWeight(found.sources(found.values, scale, *global_scale), (rows, columns), chosen, repack)


def _read_integers(found: _Tensors) -> PrequantizedWeight:
    """Integers of up to 8 bits: int4 in groups for at most 4 bits, int8 per row if they are symmetric, otherwise int8 in groups."""
    scheme, bits, scale = found.scheme, found.scheme.bits, found.require("weight_scale")
    shape = _packed_shape(found) if found.is_packed else matrix_shape(found.tensors, found.values)
    if not found.is_packed:
        check_tensor(found.tensors, found.values, shape, torch.int8)
    if bits > 4 and scheme.strategy in ("channel", "tensor") and scheme.is_symmetric:
        return _read_int8_rows(found, shape)
    group = scheme.group or shape[1]
    grid = (shape[0], -(-shape[1] // group))
    check_tensor(found.tensors, scale, grid, *FLOATS)
    zero = () if scheme.is_symmetric else (found.require("weight_zero_point"),)
    if zero and found.is_packed:
        check_tensor(found.tensors, zero[0], (-(-shape[0] // (32 // bits)), grid[1]), torch.int32)
    elif zero:
        check_tensor(found.tensors, zero[0], grid, torch.int8)
    index = (found.require("weight_g_idx"),) if scheme.is_reordered else ()
    for name in index:
        check_tensor(found.tensors, name, (shape[1],), torch.int32, torch.int64)
    layout = _Integers(found.module, bits, shape, group, found.is_packed, bool(zero), bool(index))
    chosen = layout.format(dtype_name(found.tensors[scale].dtype))
    return PrequantizedWeight(found.sources(found.values, scale, *zero, *index), shape, chosen, layout.repack(chosen))


def _read_int8_rows(found: _Tensors, shape: tuple[int, int]) -> PrequantizedWeight:
    """Symmetric integers with one scale, or one per row: int8, with int8 activations if the scheme has them."""
    scheme, scale, bits = found.scheme, found.require("weight_scale"), found.scheme.bits
    is_static = scheme.has_static_inputs and scheme.rounds_inputs
    input_scales = (found.require("input_scale"),) if is_static else ()
    if math.prod(found.tensors[scale].shape) not in (1, shape[0]) or found.tensors[scale].dtype not in FLOATS:
        info = found.tensors[scale]
        raise CheckpointError(
            f"{scale} {list(info.shape)} {dtype_name(info.dtype)} does not fit {found.values} {list(shape)}.", cure=DOWNLOAD_AGAIN
        )
    check_scales(found.tensors, scale, scale, *input_scales)
    chosen: Format = SmoothQuant(per_token=not is_static) if scheme.rounds_inputs else Int8()
    rows = repack_row_scales(shape[0])

    def repack(parts: list[Tensor]) -> dict[str, Tensor]:
        """The stored tensors by suffix."""
        values = _signed(parts[0], bits, shape[1]) if found.is_packed else parts[0]
        return rows([values, *parts[1 : 3 if is_static else 2]])

    return PrequantizedWeight(found.sources(found.values, scale, *input_scales), shape, chosen, repack)


def _packed_shape(found: _Tensors) -> tuple[int, int]:
    """The shape of a weight in packed words. The last word of a row may be padded; `weight_shape` then tells the number of columns."""
    rows, words = matrix_shape(found.tensors, found.values)
    check_tensor(found.tensors, found.values, (rows, words), torch.int32)
    per_word = 32 // found.scheme.bits
    columns, name = words * per_word, f"{found.module}.weight_shape"
    if name in found.tensors:
        if math.prod(found.tensors[name].shape) != 2:
            raise CheckpointError(f"{name} has shape {list(found.tensors[name].shape)}, and [2] is expected.", cure=DOWNLOAD_AGAIN)
        stored = [int(size) for size in found.weights.read(name).reshape(-1)]
        if stored[0] != rows or not 0 < stored[1] < _MAX_FEATURES or -(-stored[1] // per_word) != words:
            raise CheckpointError(f"{name} is {stored}, which does not fit {found.values} {[rows, words]}.", cure=DOWNLOAD_AGAIN)
        columns = stored[1]
    return rows, columns


def _signed(words: Tensor, bits: int, count: int) -> Tensor:
    """int8 [rows, count] from packed words, in which values are stored plus half of their range."""
    return (unpack_padded(words, bits, count).to(torch.int16) - (1 << bits - 1)).to(torch.int8)


@dataclass(frozen=True, slots=True)
class _Integers:
    """Integers [out, in] in groups of input features."""

    module: str
    bits: int
    shape: tuple[int, int]
    group: int
    is_packed: bool
    has_zero: bool
    is_reordered: bool

    def format(self, scale_dtype: str) -> Format:
        """The format that stores the weight exactly. `scale_dtype` is that of the checkpoint."""
        size = supported_group(self.group)
        if self.bits > 4 or self.shape[1] % 2:
            return GroupedInt8(group_size=size, shifted=self.has_zero, reorder=self.is_reordered)
        zero: Zero = "int" if self.has_zero else "none"
        return Int4(group_size=size, zero=zero, scale_dtype=scale_dtype, clip=False, reorder=self.is_reordered)

    def repack(self, chosen: Format) -> Callable[[list[Tensor]], dict[str, Tensor]]:
        """A function from (values, scales, optionally zero points, optionally the group of each feature) to the stored tensors."""

        def repack(parts: list[Tensor]) -> dict[str, Tensor]:
            """The stored tensors by suffix."""
            values, scale = _signed(parts[0], self.bits, self.shape[1]) if self.is_packed else parts[0], parts[1]
            zero = self._zero_points(parts[2]) if self.has_zero else None
            order = {}
            if self.is_reordered:
                index = feature_order(f"{self.module}.weight_g_idx", parts[2 + self.has_zero], self.group)
                values, order = values[:, index], {"order": index.int()}
            if isinstance(chosen, Int4):
                return int4_tensors((values + 8).to(torch.uint8), scale, None if zero is None else zero + 8, self.group) | order
            scales = split_groups(scale.float(), self.group, self.shape[1])
            stored = {"weight": values.contiguous(), "scale": scales}
            return stored | order | ({} if zero is None else {"offset": split_groups(-zero * scale.float(), self.group, self.shape[1])})

        return repack

    def _zero_points(self, stored: Tensor) -> Tensor:
        """int16 [out, groups]."""
        if self.is_packed:
            stored = _signed(stored.t().contiguous(), self.bits, self.shape[0]).t()
        return stored.to(torch.int16)
