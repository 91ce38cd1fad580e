"""GPTQ checkpoints (AutoGPTQ and GPTQModel): weights [in, out] of 2, 3, 4 or 8 bits, packed along the input features."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
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
    read_section,
)
from stoker.builder.prequantized.module_patterns import compile_pattern
from stoker.builder.prequantized.packed_int32 import feature_order, int4_tensors, split_groups, supported_group, unpack_int32
from stoker.builder.prequantized.weight import PrequantizedWeight
from stoker.quant.format import Format
from stoker.quant.formats.int4 import Int4
from stoker.quant.formats.int8_grouped import GroupedInt8

# Settings of the search for the values and of runtimes, and copies of what the tensors show.
_KEYS = (
    "quant_method", "bits", "w_bit", "group_size", "q_group_size", "desc_act", "sym", "true_sequential", "static_groups", "damp_percent",
    "damp_auto_increment", "act_group_aware", "model_name_or_path", "model_file_base_name", "lm_head", "meta", "quantizer", "tokenizer",
    "dataset", "backend", "model_seqlen", "use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "max_input_length",
    "cache_block_outputs", "batch_size", "pad_token_id", "block_name_to_quantize", "module_name_preceding_first_block", "version",
    "modules_in_block_to_quantize", "modules_to_not_convert", "mse", "pack_impl", "dynamic", "zero_point", "gptaq", "gptaq_alpha",
)  # fmt: skip
_BITS = (2, 3, 4, 8)
# Settings of a pattern in `dynamic`; the last ones are those of the search for the values.
_DYNAMIC_KEYS = ("bits", "group_size", "desc_act", "sym", "damp_percent", "damp_auto_increment", "mse", "static_groups", "true_sequential")
_VALUES: dict[str, tuple[Any, ...]] = {
    "checkpoint_format": ("gptq", "gptq_v2", None), "format": ("gptq", "gptq_v2", None), "method": ("gptq", None),
    "is_marlin_format": (False, None), "pack_dtype": ("int32", None), "adapter": (None,), "rotation": (None,),
    "mock_quantization": (False, None),
}  # fmt: skip


def read_gptq(tensors: Mapping[str, TensorInfo], quantization: dict[str, Any]) -> dict[str, PrequantizedWeight]:
    """The weights of a GPTQ checkpoint, by name. Raises CheckpointError for unsupported settings or shapes that do not fit.

    A module has `qweight` [in × bits / 32, out], `qzeros` [groups, out × bits / 32], `scales` [groups, out], and optionally `g_idx` [in],
    the group of each input feature. The first version of the format stores each zero point minus one.
    """
    check_known_keys(quantization, (*_KEYS, *_VALUES))
    check_values(quantization, _VALUES)
    settings_of = _dynamic_settings(quantization)
    read_bits_and_group(quantization, _BITS)
    zero_offset = 0 if _is_second_version(quantization) else 1
    found = {}
    for module in modules_with(tensors, ".qweight", (".qzeros", ".scales")):
        settings = settings_of(module)
        bits, size = read_bits_and_group(settings, _BITS)
        words, out_features = matrix_shape(tensors, f"{module}.qweight")
        in_features = words * 32 // bits
        if words * 32 % bits or out_features * bits % 32:
            raise CheckpointError(
                f"{module}.qweight has shape [{words}, {out_features}], which is no whole number of values of {bits} bits.",
                cure="Correct bits in config.json, or download the checkpoint again.",
            )
        group = in_features if size == -1 else size
        num_groups = -(-in_features // group)
        check_tensor(tensors, f"{module}.qweight", (words, out_features), torch.int32)
        check_tensor(tensors, f"{module}.qzeros", (num_groups, out_features * bits // 32), torch.int32)
        check_tensor(tensors, f"{module}.scales", (num_groups, out_features), *FLOATS)
        has_group_index = f"{module}.g_idx" in tensors
        reordered = bool(settings.get("desc_act")) and has_group_index
        if has_group_index:
            check_tensor(tensors, f"{module}.g_idx", (in_features,), torch.int32)
        sources = tuple(f"{module}.{part}" for part in ("qweight", "qzeros", "scales", *(("g_idx",) if has_group_index else ())))
        chosen = _choose_format(bits, group, reordered, tensors[f"{module}.scales"].dtype)
        repack = _repack(module, bits, zero_offset, group, in_features, reordered)
        found[f"{module}.weight"] = PrequantizedWeight(sources, (out_features, in_features), chosen, repack)
    return found


def _is_second_version(quantization: dict[str, Any]) -> bool:
    """Whether zero points are stored as they are. Raises CheckpointError for two settings that contradict each other."""
    found = {str(value).lower() for key in ("checkpoint_format", "format") if (value := quantization.get(key)) is not None}
    if len(found) > 1:
        raise CheckpointError("quantization_config: checkpoint_format and format are different.", cure="Remove the wrong one.")
    return found == {"gptq_v2"}


def _dynamic_settings(quantization: dict[str, Any]) -> Callable[[str], dict[str, Any]]:
    """The settings of a module by its name: those of the first pattern in `dynamic` that matches, then those of the checkpoint.

    A pattern with "-:" names modules that are not quantized. Raises CheckpointError for unknown settings, and invalid patterns.
    """
    dynamic = read_section(quantization, "dynamic")
    rows = []
    for key in dynamic:
        if not key.startswith("-:"):
            section = read_section(dynamic, key)
            check_known_keys(section, _DYNAMIC_KEYS, f"dynamic.{key[:60]}.")
            rows.append((compile_pattern(key.removeprefix("+:"), "dynamic"), quantization | section))
    return lambda module: next((settings for matches, settings in rows if matches(module)), quantization)


def _choose_format(bits: int, group: int, reordered: bool, scale_dtype: torch.dtype) -> Format:
    """The format that stores a weight exactly: int4 for at most 4 bits, otherwise int8 in groups."""
    if bits == 8:
        return GroupedInt8(group_size=supported_group(group), scale_dtype="float32", shifted=True, reorder=reordered)
    return Int4(group_size=supported_group(group), zero="int", scale_dtype=dtype_name(scale_dtype), clip=False, reorder=reordered)


def _repack(
    module: str, bits: int, zero_offset: int, group: int, in_features: int, reordered: bool
) -> Callable[[list[Tensor]], dict[str, Tensor]]:
    """A function from a module's tensors to the stored tensors of its format."""

    def repack(parts: list[Tensor]) -> dict[str, Tensor]:
        """The stored tensors by suffix."""
        qweight, qzeros, scales, *group_index = parts
        order = feature_order(f"{module}.g_idx", group_index[0], group, reordered) if group_index else None
        values = unpack_int32(qweight.t().contiguous(), bits)  # [out, in]
        zero, scale = unpack_int32(qzeros, bits).t().int() + zero_offset, scales.t()
        order_tensor = {"order": order.int()} if reordered and order is not None else {}
        values = values[:, order] if order_tensor else values
        if bits == 8:
            scale = split_groups(scale.float(), group, in_features)
            offset = split_groups((128 - zero).float(), group, in_features) * scale
            return {"weight": (values.int() - 128).to(torch.int8), "scale": scale, "offset": offset} | order_tensor
        return int4_tensors(values, scale, zero, group) | order_tensor

    return repack
