"""AutoRound checkpoints, which pack int4 weights as GPTQ or AutoAWQ do. Modules can have settings of their own (`extra_config`)."""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN
from stoker.builder.checkpoint.weights import TensorInfo
from stoker.builder.prequantized.awq import read_awq
from stoker.builder.prequantized.checks import check_known_keys, check_values, modules_with, read_section
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
# Other settings of a module in extra_config. The tensors show what `sym` and `scale_dtype` say.
_OTHER_MODULE_KEYS = (
    "sym", "scale_dtype", "act_data_type", "act_group_size", "act_sym", "act_dynamic", "super_bits", "super_group_size", "fixed_by_user",
    "in_blocks",
)  # fmt: skip
_VALUES: dict[str, tuple[Any, ...]] = {"data_type": ("int",), "act_bits": (16, None)}
_MAX_PATTERN = 256  # characters
_PATTERN = re.compile(r"(?:\.\*|\\\.|[\w.-])*")  # literals, ".*" and escaped dots
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
    check_values(quantization, {"packing_format": tuple(_PACKING)} | _VALUES)
    packing = str(quantization.get("packing_format", "auto_round")).lower()
    extra = _read_extra_config(quantization)
    patterns = {_as_glob(key): key for key in extra}
    modules: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for module in modules_with(tensors, ".qweight", (".qzeros", ".scales")):
        settings = _settings_of(module, extra, patterns)
        values = tuple(settings.get(key, quantization.get(key)) for key in _MODULE_KEYS)
        if not all(type(value) is int for value in values):
            raise CheckpointError(f"quantization_config: bits or group_size of {module} is not a number.", cure=DOWNLOAD_AGAIN)
        modules[values].append(module)
    read = read_awq if _PACKING[packing]["quant_method"] == "awq" else read_gptq
    found: dict[str, PrequantizedWeight] = {}
    for values, names in modules.items():
        own = {f"{name}.{part}" for name in names for part in ("qweight", "qzeros", "scales", "g_idx")}
        section = {name: info for name, info in tensors.items() if name in own}
        found |= read(section, _PACKING[packing] | dict(zip(_MODULE_KEYS, values, strict=True)))
    return found


def _as_glob(key: str) -> str:
    """A regular expression of module names as a pattern of fnmatch, whose time is bounded.

    Raises CheckpointError for one that contains more than literals, ".*" and escaped dots.
    """
    if len(key) > _MAX_PATTERN or _PATTERN.fullmatch(key) is None:
        raise CheckpointError(
            f"quantization_config: the pattern {key[:60]!r} in extra_config is not supported.",
            cure="Name modules, or use only literals, '.*' and '\\.'.",
        )
    return re.sub(r"\.\*|\\\.|\.", lambda found: {".*": "*", "\\.": ".", ".": "?"}[found[0]], key)


def _settings_of(module: str, extra: dict[str, Any], patterns: dict[str, str]) -> dict[str, Any]:
    """The settings of a module in extra_config. `patterns` are the keys by their pattern of fnmatch."""
    key = module if module in extra else next((patterns[one] for one in patterns if fnmatch.fnmatchcase(module, one)), None)
    return {} if key is None else read_section(extra, key)


def _read_extra_config(quantization: dict[str, Any]) -> dict[str, Any]:
    """The settings of modules by name or pattern: those of extra_config, then those of regex_config, which were given as patterns.

    Raises CheckpointError for settings that are not known or not supported.
    """
    extra = read_section(quantization, "extra_config")
    extra = extra | {key: value for key, value in read_section(quantization, "regex_config").items() if key not in extra}
    for key in extra:
        settings = read_section(extra, key)
        check_known_keys(settings, (*_MODULE_KEYS, *_OTHER_MODULE_KEYS, *_VALUES), f"extra_config.{key[:60]}.")
        check_values(settings, _VALUES, f"extra_config.{key[:60]}.")
    return extra
