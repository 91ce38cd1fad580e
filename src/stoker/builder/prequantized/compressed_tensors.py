"""Settings of compressed-tensors checkpoints: which modules have which scheme, and which schemes are supported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from stoker.base.errors import CheckpointError
from stoker.base.logging import get_logger
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN
from stoker.builder.checkpoint.weights import CheckpointWeights, TensorInfo
from stoker.builder.prequantized.checks import check_known_keys, check_values, read_section
from stoker.builder.prequantized.compressed_modules import read_module
from stoker.builder.prequantized.compressed_scheme import Scheme
from stoker.builder.prequantized.module_patterns import compile_pattern
from stoker.builder.prequantized.weight import ReadWeights

# Settings of the search for the values and of runtimes, and copies of what the tensors show.
_KEYS = (
    "quant_method", "config_groups", "kv_cache_scheme", "global_compression_ratio", "ignore", "run_compressed", "version",
    "quantization_status", "dequantize", "use_optimized_inference", "sparsity_config", "transform_config",
)  # fmt: skip
_GROUP_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized",
    "mxfp8-quantized", None,
)  # fmt: skip
_FORMATS = ("mixed-precision", "dense", *_GROUP_FORMATS)
_GROUP_KEYS = ("targets", "weights", "input_activations", "output_activations")
_NUMBER_KEYS = (
    "num_bits", "type", "group_size", "block_structure", "scale_dtype", "zp_dtype", "observer", "observer_kwargs",
)  # fmt: skip
_WEIGHT_VALUES: dict[str, tuple[Any, ...]] = {
    "symmetric": (True, False), "strategy": ("channel", "group", "tensor", "block", "tensor_group", None), "dynamic": (False, None),
    "actorder": ("weight", "static", "group", "dynamic", True, False, None),
}  # fmt: skip
_INPUT_VALUES: dict[str, tuple[Any, ...]] = {
    "symmetric": (True,), "strategy": ("token", "tensor", "group", "tensor_group", None), "dynamic": (True, False, "local", None),
    "actorder": (False, None),
}  # fmt: skip
_SPARSITY_KEYS = ("format", "targets", "ignore", "global_sparsity", "sparsity_structure", "registry_requires_subclass")
_CACHE_KEYS = ("symmetric", "strategy", "dynamic", "actorder")
_ALL_LINEARS = "Linear"  # a target: the name of a class
_REGEX = "re:"

log = get_logger(__name__)


def read_compressed_tensors(weights: CheckpointWeights, quantization: dict[str, Any]) -> ReadWeights:
    """The quantized weights by name. Raises CheckpointError for unsupported settings, and for tensors that do not fit them."""
    _check_model_settings(quantization)
    schemes, is_ignored = _Schemes(quantization), _ignored(quantization)
    found: ReadWeights = {}
    unrounded: Counter[str] = Counter()
    for module in _quantized_modules(weights.tensors):
        if is_ignored(module):
            raise CheckpointError(f"quantization_config: ignore has {module}, which has a weight_scale.", cure="Remove it from ignore.")
        scheme = schemes.of(module)
        found[f"{module}.weight"] = read_module(weights, module, scheme)
        if scheme.inputs and not scheme.rounds_inputs:
            unrounded["{}-bit {}".format(*scheme.input_type)] += 1
    for kind, count in unrounded.items():
        log.info("%d linears of the checkpoint round their inputs to %s numbers. The engine does not round them.", count, kind)
    return found


def kv_cache_scheme(quantization: dict[str, Any]) -> str | None:
    """How the KV cache is quantized: FP8 for e4m3 with one scale, another description, or None."""
    scheme = read_section(quantization, "kv_cache_scheme")
    if not scheme:
        return None
    bits, kind, strategy = (str(scheme.get(key))[:20] for key in ("num_bits", "type", "strategy"))
    is_fp8 = (bits, kind.lower()) == ("8", "float") and strategy in ("tensor", "None") and not scheme.get("dynamic")
    return "FP8" if is_fp8 else f"{bits}-bit {kind} {'dynamic' if scheme.get('dynamic') else strategy}"


def _quantized_modules(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """The names of all modules with a scale of their weight, in the order of the checkpoint."""
    return [name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")]


class _Schemes:
    """The schemes of modules: by name, by pattern, or by their class, in this order of precedence."""

    def __init__(self, quantization: dict[str, Any]) -> None:
        self._by_name: dict[str, Scheme] = {}
        groups = read_section(quantization, "config_groups")
        if not groups and not quantization.get("kv_cache_scheme"):
            raise CheckpointError("quantization_config: 0 config_groups are not supported.", cure=DOWNLOAD_AGAIN)
        for key in groups:
            scheme, targets = _read_group(quantization, key)
            for target in targets:
                self._by_name[target] = scheme
        schemes = {id(scheme): scheme for scheme in self._by_name.values()}
        self._only = next(iter(schemes.values())) if len(groups) == 1 and schemes else None
        patterns = sorted(target for target in self._by_name if target.startswith(_REGEX))
        self._patterns = [(_compile(pattern, "config_groups.targets"), self._by_name[pattern]) for pattern in patterns]

    def of(self, module: str) -> Scheme:
        """The scheme of a module. A single group is that of all quantized modules, whatever its targets.

        Raises CheckpointError for a module that no group targets.
        """
        if self._only is not None:
            return self._only
        found = self._by_name.get(module) or next((scheme for matches, scheme in self._patterns if matches(module)), None)
        found = found or self._by_name.get(_ALL_LINEARS)
        if found is None:
            raise CheckpointError(
                f"quantization_config: no target of config_groups matches {module}, which has a weight_scale.",
                cure="Add the module to the targets of its group.",
            )
        return found


def _read_group(quantization: dict[str, Any], key: str) -> tuple[Scheme, list[str]]:
    """(scheme, targets) of a group. Raises CheckpointError for settings that are not known or not supported."""
    path = f"config_groups.{key}."
    group = read_section(read_section(quantization, "config_groups"), key)
    weights, inputs = read_section(group, "weights"), read_section(group, "input_activations")
    check_known_keys(group, (*_GROUP_KEYS, "format"), path)
    check_values(group, {"format": _GROUP_FORMATS}, path)
    for name, settings, values in (("weights", weights, _WEIGHT_VALUES), ("input_activations", inputs, _INPUT_VALUES)):
        check_known_keys(settings, (*_NUMBER_KEYS, *values), f"{path}{name}.")
        check_values(settings, values, f"{path}{name}.")
    if outputs := group.get("output_activations"):
        raise CheckpointError(
            f"quantization_config: {path}output_activations={str(outputs)[:60]!r} is not supported.", cure="Use a checkpoint without it."
        )
    targets = group.get("targets")
    targets = [_ALL_LINEARS] if targets is None else targets
    if not isinstance(targets, list) or not targets or not all(isinstance(target, str) for target in targets):
        raise CheckpointError(f"quantization_config: {path}targets={str(targets)[:60]!r} is not a list of names.", cure=DOWNLOAD_AGAIN)
    stored_as = str(group.get("format") or quantization.get("format")).lower()
    scheme = Scheme(path=path, weights=weights, inputs=inputs, stored_as=stored_as if stored_as in _GROUP_FORMATS else None)
    scheme.check()
    return scheme, targets


def _check_model_settings(quantization: dict[str, Any]) -> None:
    """Raise CheckpointError for settings of the whole model that are not known, or change the meaning of tensors."""
    check_known_keys(quantization, (*_KEYS, "format"))
    check_values(quantization, {"format": _FORMATS})
    cache = read_section(quantization, "kv_cache_scheme")
    check_known_keys(cache, (*_NUMBER_KEYS, *_CACHE_KEYS), "kv_cache_scheme.")
    check_values(cache, {"symmetric": (True, None), "actorder": (False, None)}, "kv_cache_scheme.")
    sparsity, transforms = read_section(quantization, "sparsity_config"), read_section(quantization, "transform_config")
    check_known_keys(sparsity, _SPARSITY_KEYS, "sparsity_config.")
    check_values(sparsity, {"format": ("dense", None)}, "sparsity_config.")
    check_known_keys(transforms, ("config_groups",), "transform_config.")
    if used := transforms.get("config_groups"):
        raise CheckpointError(
            f"quantization_config: transform_config={str(used)[:60]!r} is not supported.", cure="Use a checkpoint without it."
        )


def _ignored(quantization: dict[str, Any]) -> Callable[[str], bool]:
    """Whether a module is in `ignore`, by its name or a pattern. Raises CheckpointError when `ignore` is not a list of names."""
    listed = quantization.get("ignore")
    listed = [] if listed is None else listed
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise CheckpointError(f"quantization_config: ignore={str(listed)[:60]!r} is not a list of names.", cure=DOWNLOAD_AGAIN)
    names = frozenset(listed)
    patterns = [_compile(name, "ignore") for name in listed if name.startswith(_REGEX)]
    return lambda module: module in names or any(matches(module) for matches in patterns)


def _compile(pattern: str, setting: str) -> Callable[[str], bool]:
    return compile_pattern(pattern.removeprefix(_REGEX), setting)
