"""NVIDIA ModelOpt checkpoints (`quant_method: modelopt`, or a file hf_quant_config.json): FP8, MXFP8, int8, int4 (AWQ), NVFP4 and MXFP4.

A module has `weight`, `weight_scale`, and depending on the algorithm `weight_scale_2` (one number), `input_scale` (the static scale of
activations) and `pre_quant_scale` [in], by which AWQ and SmoothQuant multiply the input of the linear.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN
from stoker.builder.checkpoint.weights import TensorInfo
from stoker.builder.prequantized.checks import (
    FLOATS,
    check_known_keys,
    check_scales,
    check_tensor,
    check_values,
    matrix_shape,
    modules_with,
    read_section,
)
from stoker.builder.prequantized.fp4 import E8M0, e8m0_values, mxfp4_tensors, nvfp4_tensors
from stoker.builder.prequantized.fp8 import repack_row_scales
from stoker.builder.prequantized.tensorrt_llm import read_integers
from stoker.builder.prequantized.weight import PrequantizedWeight, ReadWeights
from stoker.quant import groups
from stoker.quant.format import Format
from stoker.quant.formats.block_fp8 import BlockFp8
from stoker.quant.formats.fp4 import GROUP_SIZES as FP4_GROUPS
from stoker.quant.formats.fp4 import Fp4
from stoker.quant.formats.fp8 import Fp8
from stoker.quant.formats.int4 import GROUP_SIZES as INT4_GROUPS
from stoker.quant.formats.int4 import Int4
from stoker.quant.formats.int8 import Int8
from stoker.quant.formats.smoothquant import SmoothQuant

Tensors = Mapping[str, TensorInfo]
BLOCK = 128  # rows and columns of FP8_PB_WO
# Keys of quantization_config and of the `quantization` section of hf_quant_config.json. `config_groups` repeats quant_algo in another
# form, and tensors show which modules are quantized.
_KEYS = (
    "quant_method", "quant_algo", "kv_cache_quant_algo", "kv_cache_scheme", "group_size", "has_zero_point", "pre_quant_scale",
    "exclude_modules", "ignore", "quantized_layers", "config_groups", "producer", "quantization", "smoothquant_val", "clamp_val",
    "use_meta_recipe",
)  # fmt: skip
_LAYER_KEYS = ("quant_algo", "group_size", "has_zero_point", "pre_quant_scale")  # of a layer in quantized_layers
GPTQ_ALGORITHMS = ("W4A16_GPTQ", "W8A16_GPTQ")  # of TensorRT-LLM
KV_ALGORITHMS = (None, "FP8", "INT8", "NVFP4", "NVFP4_AFFINE")


def read_modelopt(tensors: Tensors, quantization: dict[str, Any]) -> ReadWeights:
    """The quantized weights by name. Raises CheckpointError for an unsupported algorithm or setting, and for tensors that do not fit it."""
    settings = modelopt_settings(quantization)
    found: ReadWeights = {}
    for module in modules_with(tensors, ".weight_scale", (".weight",)):
        algorithm, group = _algorithm_of(module, settings)
        weight = _ALGORITHMS[algorithm](_Module(tensors, module, group))
        found[f"{module}.weight"] = _with_input_factors(tensors, module, weight)
    return found


def modelopt_settings(quantization: dict[str, Any]) -> dict[str, Any]:
    """The settings of a checkpoint in one dict. Those of a nested section `quantization` are used, too.

    Raises CheckpointError for an unknown key, an unsupported value, and two sections that contradict each other.
    """
    nested = read_section(quantization, "quantization")
    for section in (quantization, nested):
        check_known_keys(section, _KEYS)
    outer, inner = quantization.get("quant_algo"), nested.get("quant_algo")
    if outer is not None and inner is not None and outer != inner:
        raise CheckpointError(f"quant_algo is {outer!r:.60} in config.json and {inner!r:.60} in hf_quant_config.json.", cure=DOWNLOAD_AGAIN)
    settings = quantization | {key: value for key, value in nested.items() if value is not None}
    if settings.get("has_zero_point") and settings.get("quant_algo") not in GPTQ_ALGORITHMS:
        raise CheckpointError("quantization_config: has_zero_point=true is not supported.", cure="Use a checkpoint without zero points.")
    layers = read_section(settings, "quantized_layers")
    for name in layers:
        section = read_section(layers, name)
        check_known_keys(section, _LAYER_KEYS, f"quantized_layers.{name[:60]}.")
        check_values(section, {"has_zero_point": (False, None)}, f"quantized_layers.{name[:60]}.")
    return settings


def kv_cache_algorithm(settings: dict[str, Any]) -> str | None:
    """The algorithm by which the checkpoint quantizes the KV cache; None for none. Raises CheckpointError for an unknown one."""
    found, scheme = settings.get("kv_cache_quant_algo"), settings.get("kv_cache_scheme")
    if found is None and isinstance(scheme, dict):
        found = "FP8" if (scheme.get("num_bits"), scheme.get("type")) == (8, "float") else str(scheme)
    elif found is None:
        found = scheme
    if found not in KV_ALGORITHMS:
        listed = ", ".join(filter(None, KV_ALGORITHMS))
        raise CheckpointError(f"quantization_config: kv_cache_quant_algo={found!r:.60} is not supported.", cure=f"Supported: {listed}.")
    return found


def _algorithm_of(module: str, settings: dict[str, Any]) -> tuple[str, int]:
    """(algorithm, group size) of a module. A group size of 0 is that of the algorithm. Raises CheckpointError for unsupported ones."""
    algorithm, group = settings.get("quant_algo"), settings.get("group_size")
    if algorithm == "MIXED_PRECISION":
        layers: dict[str, Any] = settings.get("quantized_layers") or {}
        chosen = layers.get(module) or next((layers[name] for name in layers if fnmatch.fnmatchcase(module, name)), None)
        if not isinstance(chosen, dict):
            raise CheckpointError(f"quantized_layers does not list {module}, which has a weight_scale.", cure=DOWNLOAD_AGAIN)
        algorithm, group = chosen.get("quant_algo"), chosen.get("group_size")
    algorithm = algorithm.upper() if isinstance(algorithm, str) else algorithm  # ModelOpt writes fp8_pb_wo
    if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        raise CheckpointError(
            f"quantization_config: quant_algo={algorithm!r:.60} of {module} is not supported.",
            cure=f"Supported: {', '.join(_ALGORITHMS)}.",
        )
    if group is not None and (type(group) is not int or not 0 <= group <= 1 << 18):
        raise CheckpointError(f"quantization_config: group_size={group!r} is not a positive number.", cure=DOWNLOAD_AGAIN)
    return algorithm, group or 0


@dataclass(frozen=True, slots=True)
class _Module:
    """A quantized module: the headers of all tensors, its name, and the configured size of its groups (0: that of the algorithm)."""

    tensors: Tensors
    name: str
    group: int

    def sources(self, *suffixes: str) -> tuple[str, ...]:
        """The names of the tensors with these suffixes that the module has."""
        return tuple(f"{self.name}.{suffix}" for suffix in suffixes if f"{self.name}.{suffix}" in self.tensors)

    def group_size(self, default: int, supported: tuple[int, ...]) -> int:
        """The group size of the module. Raises CheckpointError for one that is not in `supported`."""
        size = self.group or default
        if size not in supported:
            listed = ", ".join(map(str, supported))
            raise CheckpointError(f"{self.name}: groups of {size} are not supported.", cure=f"Supported: {listed}.")
        return size


def _read_rows(module: _Module, dtype: torch.dtype, token: Format, static: Format) -> PrequantizedWeight:
    """A weight of 8 bits with one scale, or one per row. `static` is its format if it has a static scale of activations, else `token`."""
    name = f"{module.name}.weight"
    shape = matrix_shape(module.tensors, name)
    check_tensor(module.tensors, name, shape, dtype)
    has_input_scale = static != token and f"{module.name}.input_scale" in module.tensors
    sources = module.sources("weight", "weight_scale", *(("input_scale",) if has_input_scale else ()))
    check_scales(module.tensors, *sources)
    return PrequantizedWeight(sources, shape, static if has_input_scale else token, repack_row_scales(shape[0]))


def _read_fp8(module: _Module) -> PrequantizedWeight:
    """FP8: e4m3 with one scale per weight, and a static scale of activations."""
    return _read_rows(module, torch.float8_e4m3fn, Fp8(weights="tensor"), Fp8(weights="tensor", activations="static"))


def _read_fp8_rows(module: _Module) -> PrequantizedWeight:
    """FP8_PER_CHANNEL_PER_TOKEN: e4m3 with one scale per row."""
    return _read_rows(module, torch.float8_e4m3fn, Fp8(), Fp8())


def _read_int8(module: _Module) -> PrequantizedWeight:
    """W8A16: int8 with one scale per row, or several in a merged checkpoint of TensorRT-LLM."""
    if len(module.tensors[f"{module.name}.weight_scale"].shape) == 2:
        return read_integers(module.tensors, module.name, 8)
    return _read_rows(module, torch.int8, Int8(), Int8())


def _read_smoothquant(module: _Module) -> PrequantizedWeight:
    """W8A8_SQ_PER_CHANNEL: int8 with one scale per row, and a static scale of activations."""
    return _read_rows(module, torch.int8, SmoothQuant(), SmoothQuant(per_token=False))


def _read_fp8_blocks(module: _Module) -> PrequantizedWeight:
    """FP8_PB_WO: e4m3 in blocks of 128 × 128 with `weight_scale` [blocks, 1, blocks, 1] or [blocks, blocks]."""
    rows, columns = matrix_shape(module.tensors, f"{module.name}.weight")
    check_tensor(module.tensors, f"{module.name}.weight", (rows, columns), torch.float8_e4m3fn)
    blocks = -(-rows // BLOCK), -(-columns // BLOCK)
    scale = f"{module.name}.weight_scale"
    long_shape = (blocks[0], 1, blocks[1], 1)
    check_tensor(module.tensors, scale, long_shape if len(module.tensors[scale].shape) == 4 else blocks, *FLOATS)

    def repack(parts: list[Tensor]) -> dict[str, Tensor]:
        """The stored tensors of `BlockFp8`."""
        return {"weight": parts[0], "scale": parts[1].float().reshape(blocks)}

    return PrequantizedWeight(module.sources("weight", "weight_scale"), (rows, columns), BlockFp8(rows=BLOCK, columns=BLOCK), repack)


def _read_mxfp8(module: _Module) -> PrequantizedWeight:
    """MXFP8: e4m3 in groups of 32 with the powers of two 2 ** (scale - 127), uint8 [out, groups]."""
    rows, columns = matrix_shape(module.tensors, f"{module.name}.weight")
    size = module.group_size(32, (32, 64, 128))
    check_tensor(module.tensors, f"{module.name}.weight", (rows, columns), torch.float8_e4m3fn)
    check_tensor(module.tensors, f"{module.name}.weight_scale", (rows, -(-columns // size)), *E8M0)

    def repack(parts: list[Tensor]) -> dict[str, Tensor]:
        """The stored tensors of `BlockFp8`."""
        return {"weight": parts[0], "scale": e8m0_values(parts[1])}

    return PrequantizedWeight(module.sources("weight", "weight_scale"), (rows, columns), BlockFp8(rows=1, columns=size), repack)


def _read_int4(module: _Module) -> PrequantizedWeight:
    """W4A16_AWQ and W4A8_AWQ: uint8 [out / 2, in], the even row in the low four bits, and scales [out, groups].

    W4A8_AWQ rounds activations to e4m3; here they are not rounded, and its `input_scale` and `weight_scale_2` are not used.
    """
    pairs, columns = matrix_shape(module.tensors, f"{module.name}.weight")
    size = module.group_size(128, INT4_GROUPS)
    check_tensor(module.tensors, f"{module.name}.weight", (pairs, columns), torch.uint8, torch.int8)
    check_tensor(module.tensors, f"{module.name}.weight_scale", (2 * pairs, -(-columns // size)), *FLOATS)

    def repack(parts: list[Tensor]) -> dict[str, Tensor]:
        """The stored tensors of `Int4`: signed values plus 8."""
        words = parts[0].view(torch.uint8)
        values = torch.stack((words & 15, words >> 4), dim=1).flatten(0, 1) ^ 8
        return {"weight": groups.pack(values), "scale": parts[1].float().contiguous()}

    sources = module.sources("weight", "weight_scale", "weight_scale_2", "input_scale")
    chosen = Int4(group_size=size, zero="none", scale_dtype="float32", clip=False)
    return PrequantizedWeight(sources, (2 * pairs, columns), chosen, repack)


def _read_nvfp4(module: _Module) -> PrequantizedWeight:
    """NVFP4: e2m1 in groups of 16, e4m3 scales, and one `weight_scale_2`.

    Activations are not rounded to four bits, and `input_scale` is not used.
    """
    size = module.group_size(16, FP4_GROUPS)
    second = f"{module.name}.weight_scale_2"
    if second not in module.tensors:
        raise CheckpointError(f"{second} is missing, and {module.name}.weight_scale needs it.", cure=DOWNLOAD_AGAIN)
    if math.prod(module.tensors[second].shape) != 1 or module.tensors[second].dtype not in FLOATS:
        raise CheckpointError(f"{second} has shape {list(module.tensors[second].shape)}, and one number is expected.", cure=DOWNLOAD_AGAIN)
    return _read_fp4(module, Fp4(group_size=size, scale="e4m3"), (torch.float8_e4m3fn,), lambda parts: nvfp4_tensors(*parts[:3]))


def _read_mxfp4(module: _Module) -> PrequantizedWeight:
    """W4A8_MXFP4_FP8: e2m1 in groups of 32 with the powers of two 2 ** (scale - 127). Activations are not rounded to e4m3."""
    chosen, name = Fp4(group_size=module.group_size(32, FP4_GROUPS)), f"{module.name}.weight"
    return _read_fp4(module, chosen, E8M0, lambda parts: mxfp4_tensors(name, parts[0], parts[1]))


def _read_fp4(
    module: _Module, chosen: Fp4, scale_dtypes: tuple[torch.dtype, ...], repack: Callable[[list[Tensor]], dict[str, Tensor]]
) -> PrequantizedWeight:
    """e2m1 [out, in / 2], the even feature in the low four bits, with scales [out, groups]. `repack` returns the tensors of `chosen`."""
    rows, num_bytes = matrix_shape(module.tensors, f"{module.name}.weight")
    columns = 2 * num_bytes
    check_tensor(module.tensors, f"{module.name}.weight", (rows, num_bytes), torch.uint8)
    check_tensor(module.tensors, f"{module.name}.weight_scale", (rows, -(-columns // chosen.group_size)), *scale_dtypes)
    sources = module.sources("weight", "weight_scale", "weight_scale_2", "input_scale")
    return PrequantizedWeight(sources, (rows, columns), chosen, repack)


_ALGORITHMS: dict[str, Callable[[_Module], PrequantizedWeight]] = {
    "FP8": _read_fp8,
    "FP8_PER_CHANNEL_PER_TOKEN": _read_fp8_rows,
    "FP8_PB_WO": _read_fp8_blocks,
    "MXFP8": _read_mxfp8,
    "W8A16": _read_int8,
    "W4A16": lambda module: read_integers(module.tensors, module.name, 4),
    "W4A16_GPTQ": lambda module: read_integers(module.tensors, module.name, 4),
    "W8A16_GPTQ": lambda module: read_integers(module.tensors, module.name, 8),
    "W8A8_SQ_PER_CHANNEL": _read_smoothquant,
    "W4A16_AWQ": _read_int4,
    "W4A8_AWQ": _read_int4,
    "NVFP4": _read_nvfp4,
    "NVFP4_AWQ": _read_nvfp4,
    "W4A16_NVFP4": _read_nvfp4,
    "W4A8_NVFP4_FP8": _read_nvfp4,
    "W4A8_MXFP4_FP8": _read_mxfp4,
}


def _with_input_factors(tensors: Tensors, module: str, weight: PrequantizedWeight) -> PrequantizedWeight:
    """The weight with `pre_quant_scale`, by which the input is multiplied, if the module has one."""
    factors = f"{module}.pre_quant_scale"
    if factors not in tensors:
        return weight
    check_tensor(tensors, factors, (weight.shape[1],), *FLOATS)
    return dataclasses.replace(weight, input_factors=factors)
