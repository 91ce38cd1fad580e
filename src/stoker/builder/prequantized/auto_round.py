"""AutoRound checkpoints, which pack int4 weights as GPTQ or AutoAWQ do. Modules can have settings of their own (`extra_config`)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN
from stoker.builder.checkpoint.weights import TensorInfo
from stoker.builder.prequantized.awq import read_awq
from stoker.builder.prequantized.checks import check_known_keys, modules_with, read_section
from stoker.builder.prequantized.gptq import read_gptq
from stoker.builder.prequantized.weight import PrequantizedWeight

# packing_format → the method that packs in the same way. Without `auto_gptq`, zero points are not stored minus one.
_PACKING: dict[str, dict[str, Any]] = {
    "auto_round": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round:auto_gptq": {"quant_method": "gptq"},
    "auto_round:gptq": {"quant_method": "gptq"},
    "auto_round:auto_awq": {"quant_method": "awq"},
    "auto_round:awq": {"quant_method": "awq"},
    "auto_gptq": {"quant_method": "gptq"},
    "auto_awq": {"quant_method": "awq"},
}
_MODULE_KEYS = ("bits", "group_size")
# Settings of the search for the values, and copies of what the tensors show.
_KEYS = (
    "quant_method", "packing_format", "extra_config", "bits", "group_size", "sym", "data_type", "autoround_version", "iters",
    "block_name_to_quantize", "to_quant_block_names", "low_gpu_mem_usage", "batch_size", "gradient_accumulate_steps", "lr", "minmax_lr",
    "nsamples", "seqlen", "seed", "scale_dtype", "enable_quanted_input", "enable_minmax_tuning", "enable_norm_bias_tuning",
    "quant_block_list", "dataset", "backend", "amp", "damp_percent", "desc_act", "static_groups", "true_sequential", "version",
    "zero_point", "modules_to_not_convert", "enable_alg_ext", "super_bits", "super_group_size", "act_bits", "act_data_type",
    "act_group_size", "act_sym", "act_dynamic", "regex_config", "model_free", "quant_lm_head",
)  # fmt: skip


def read_auto_round(tensors: Mapping[str, TensorInfo], quantization: dict[str, Any]) -> dict[str, PrequantizedWeight]:
    """The weights of an AutoRound checkpoint, by name. Raises CheckpointError for unsupported settings and shapes that do not fit."""
    check_known_keys(quantization, _KEYS)
    packing = quantization.get("packing_format", "auto_round")
    if packing not in _PACKING or quantization.get("data_type", "int") != "int" or quantization.get("act_bits", 16) not in (16, None):
        shown = {key: quantization.get(key) for key in ("packing_format", "data_type", "act_bits")}
        raise CheckpointError(
            f"quantization_config: {shown} of AutoRound is not supported.",
            cure=f"Supported: data_type int, act_bits 16, packing_format {', '.join(_PACKING)}.",
        )
    modules: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for module in modules_with(tensors, ".qweight", (".qzeros", ".scales")):
        settings = _settings_of(module, quantization)
        modules[tuple(settings.get(key, quantization.get(key)) for key in _MODULE_KEYS)].append(module)
    read = read_awq if _PACKING[packing]["quant_method"] == "awq" else read_gptq
    found: dict[str, PrequantizedWeight] = {}
    for values, names in modules.items():
        own = {f"{name}.{part}" for name in names for part in ("qweight", "qzeros", "scales", "g_idx")}
        section = {name: info for name, info in tensors.items() if name in own}
        found |= read(section, _PACKING[packing] | dict(zip(_MODULE_KEYS, values, strict=True)))
    return found


def _settings_of(module: str, quantization: dict[str, Any]) -> dict[str, Any]:
    """The settings of a module in extra_config, whose keys are names or regular expressions of names."""
    extra = read_section(quantization, "extra_config")
    try:
        keys = [key for key in extra if key == module] or [key for key in extra if re.fullmatch(key, module)]
    except re.error as problem:
        raise CheckpointError(f"quantization_config: extra_config has an invalid pattern ({problem}).", cure=DOWNLOAD_AGAIN) from None
    return read_section(extra, keys[0]) if keys else {}
