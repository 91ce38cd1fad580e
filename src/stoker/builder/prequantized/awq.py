"""AutoAWQ checkpoints (layout `gemm`): int4 weights [in, out], packed along the output features."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.weights import TensorInfo
from stoker.builder.prequantized.checks import FLOATS, check_tensor, dtype_name, matrix_shape, modules_with, read_bits_and_group
from stoker.builder.prequantized.packed_int32 import int4_tensors, supported_group, unpack_int32
from stoker.builder.prequantized.weight import PrequantizedWeight
from stoker.quant.formats.int4 import Int4

NIBBLE_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds column NIBBLE_ORDER[i] of the eight


def read_awq(tensors: Mapping[str, TensorInfo], quantization: dict[str, Any]) -> dict[str, PrequantizedWeight]:
    """The weights of an AutoAWQ checkpoint, by name. Raises CheckpointError for a version or a bit width that is not supported.

    The checkpoint has `qweight` [in, out / 8], `qzeros` [groups, out / 8] and `scales` [groups, out].
    """
    _, size = read_bits_and_group(quantization, (4,))
    if str(quantization.get("version", "gemm")).lower() != "gemm":
        raise CheckpointError(f"AWQ version {quantization['version']!r} is not supported.", cure="Use a checkpoint of version gemm.")
    found = {}
    for module in modules_with(tensors, ".qweight", (".qzeros", ".scales")):
        in_features, words = matrix_shape(tensors, f"{module}.qweight")
        group, out_features = in_features if size == -1 else size, words * 8
        num_groups = -(-in_features // group)
        check_tensor(tensors, f"{module}.qweight", (in_features, words), torch.int32)
        check_tensor(tensors, f"{module}.qzeros", (num_groups, words), torch.int32)
        check_tensor(tensors, f"{module}.scales", (num_groups, out_features), *FLOATS)
        scale_dtype = dtype_name(tensors[f"{module}.scales"].dtype)
        chosen = Int4(group_size=supported_group(group), zero="int", scale_dtype=scale_dtype, clip=False)
        sources = tuple(f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))
        found[f"{module}.weight"] = PrequantizedWeight(sources, (out_features, in_features), chosen, _repack(group))
    return found


def _repack(group: int) -> Callable[[list[Tensor]], dict[str, Tensor]]:
    """A function from (qweight, qzeros, scales) to the stored tensors of `Int4` with this group size."""

    def repack(parts: list[Tensor]) -> dict[str, Tensor]:
        """The stored tensors of `Int4`."""
        qweight, qzeros, scales = parts
        return int4_tensors(_unpack_columns(qweight).t(), scales.t(), _unpack_columns(qzeros).t(), group)

    return repack


def _unpack_columns(words: Tensor) -> Tensor:
    """uint8 [rows, 8 × n] from int32 [rows, n], with the columns in their original order."""
    inverse = torch.tensor(NIBBLE_ORDER).argsort()
    columns: Tensor = unpack_int32(words).unflatten(-1, (-1, 8))[..., inverse]
    return columns.flatten(-2)
