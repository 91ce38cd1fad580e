"""AutoAWQ checkpoints (layout `gemm`): int4 weights [in, out], packed along the output features."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from stoker.builder.checkpoint.weights import TensorInfo
from stoker.builder.prequantized.checks import (
    FLOATS,
    check_known_keys,
    check_tensor,
    check_values,
    dtype_name,
    matrix_shape,
    modules_with,
    read_bits_and_group,
)
from stoker.builder.prequantized.packed_int32 import int4_tensors, supported_group, unpack_int32
from stoker.builder.prequantized.weight import PrequantizedWeight
from stoker.quant.formats.int4 import Int4

NIBBLE_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds column NIBBLE_ORDER[i] of the eight
# Settings of the search for the values and of runtimes, and copies of what the tensors show.
_KEYS = (
    "quant_method", "bits", "w_bit", "group_size", "q_group_size", "zero_point", "modules_to_not_convert", "do_fuse", "fuse_max_seq_len",
    "modules_to_fuse", "exllama_config", "sym", "desc_act", "true_sequential", "damp_percent", "lm_head", "meta", "model_seqlen",
    "pack_impl", "model_name_or_path",
)  # fmt: skip
_VALUES: dict[str, tuple[Any, ...]] = {
    "version": ("gemm", None), "format": ("gemm", None), "checkpoint_format": ("gemm", None), "method": ("awq", None),
    "backend": ("autoawq", "auto", "gemm", "marlin", "exllama_v1", "exllama_v2", None), "pack_dtype": ("int32", None),
    "dynamic": ({}, None),
}  # fmt: skip


def read_awq(tensors: Mapping[str, TensorInfo], quantization: dict[str, Any]) -> dict[str, PrequantizedWeight]:
    """The weights of an AutoAWQ checkpoint, by name. Raises CheckpointError for settings that are not supported.

    The checkpoint has `qweight` [in, out / 8], `qzeros` [groups, out / 8] and `scales` [groups, out].
    """
    check_known_keys(quantization, (*_KEYS, *_VALUES))
    check_values(quantization, _VALUES)
    _, size = read_bits_and_group(quantization, (4,))
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
