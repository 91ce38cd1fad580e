"""bitsandbytes checkpoints: four bits (nf4 and fp4, also with quantized scales), and eight bits (LLM.int8)."""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN
from stoker.builder.checkpoint.weights import CheckpointWeights, TensorInfo
from stoker.builder.prequantized.checks import FLOATS, check_known_keys, check_tensor, matrix_shape
from stoker.builder.prequantized.weight import DequantizedWeight, PrequantizedWeight, ReadWeights
from stoker.quant.formats.int8 import INT8_UNIT, Int8

_STATE = ".quant_state.bitsandbytes__"
_MAX_STATE_BYTES = 4096
_KEYS = (
    "quant_method", "load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_compute_dtype",
    "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage", "bnb_4bit_blocksize", "llm_int8_threshold", "llm_int8_skip_modules",
    "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight",
)  # fmt: skip


def read_bitsandbytes(weights: CheckpointWeights, quantization: dict[str, Any]) -> ReadWeights:
    """The quantized weights by name. The tensors decide how a weight is stored; the sizes of a four-bit weight are in a small JSON tensor.

    Raises CheckpointError for unknown settings, and for tensors that do not fit together.
    """
    check_known_keys(quantization, _KEYS)
    found: ReadWeights = {}
    for name in weights.tensors:
        if _STATE in name and name.partition(_STATE)[0].endswith(".weight"):
            weight = name.partition(_STATE)[0]
            found[weight] = _read_four_bits(weights, weight, name)
        elif name.endswith(".SCB"):
            found[f"{name.removesuffix('.SCB')}.weight"] = _read_eight_bits(weights, name)
    return found


def _read_eight_bits(weights: CheckpointWeights, scales: str) -> PrequantizedWeight:
    """int8 [out, in] with `SCB` [out], the largest magnitude of each row. Activations are not quantized here."""
    module, tensors = scales.removesuffix(".SCB"), weights.tensors
    if f"{module}.weight" not in tensors:
        raise CheckpointError(f"{module}.weight is missing, and {scales} needs it.", cure=DOWNLOAD_AGAIN)
    shape = matrix_shape(tensors, f"{module}.weight")
    check_tensor(tensors, f"{module}.weight", shape, torch.int8)
    check_tensor(tensors, scales, (shape[0],), *FLOATS)
    layout = f"{module}.weight_format"
    if layout in tensors and (math.prod(tensors[layout].shape) != 1 or int(weights.read(layout).reshape(-1)[0]) != 0):
        raise CheckpointError(f"{layout} is not 0 (rows).", cure="Save the checkpoint again with bitsandbytes 0.43 or later.")
    sources = (f"{module}.weight", scales, *((layout,) if layout in tensors else ()))
    return PrequantizedWeight(sources, shape, Int8(), lambda parts: {"weight": parts[0], "scale": parts[1].float() * INT8_UNIT})


def _read_four_bits(weights: CheckpointWeights, name: str, state_name: str) -> DequantizedWeight:
    """Four-bit indices [out × in / 2, 1] of a table `quant_map` [16], with one scale `absmax` for each block of the flat weight.

    Quantized scales are indices of `nested_quant_map` [256], with scales `nested_absmax` of their own and an offset.
    """
    state, tensors = _read_state(weights, state_name), weights.tensors
    block, shape = state["blocksize"], tuple(state["shape"])
    count = math.prod(shape)
    num_blocks = -(-count // block)
    check_tensor(tensors, name, (-(-count // 2), 1), torch.uint8)
    nested = f"{name}.nested_absmax" in tensors
    suffixes = ("absmax", "quant_map", *(("nested_absmax", "nested_quant_map") if nested else ()))
    sources = tuple(f"{name}.{suffix}" for suffix in suffixes)
    if missing := [source for source in sources if source not in tensors]:
        raise CheckpointError(f"{missing[0]} is missing, and {name} needs it.", cure=DOWNLOAD_AGAIN)
    check_tensor(tensors, sources[0], (num_blocks,), torch.uint8 if nested else torch.float32)
    check_tensor(tensors, sources[1], (16,), torch.float32)
    if nested:
        check_tensor(tensors, sources[2], (-(-num_blocks // state["nested_blocksize"]),), torch.float32)
        check_tensor(tensors, sources[3], (256,), torch.float32)

    def widen(parts: list[Tensor]) -> Tensor:
        """The weight, float32 [out, in]. The high four bits of a byte come first."""
        words, scale, table = parts[0].flatten(), parts[1], parts[2]
        if nested:
            outer = parts[3].repeat_interleave(state["nested_blocksize"])[:num_blocks]
            scale = parts[4][scale.long()] * outer + state["nested_offset"]
        values = table[torch.stack((words >> 4, words & 15), dim=-1).flatten()[:count].long()]
        return (values * scale.repeat_interleave(block)[:count]).view(shape)

    return DequantizedWeight((name, *sources, state_name), TensorInfo(shape, torch.float32), widen)


def _read_state(weights: CheckpointWeights, name: str) -> dict[str, Any]:
    """The JSON object in a tensor of bytes. Raises CheckpointError for other contents, and for sizes out of range."""
    info = weights.tensors[name]
    try:
        if info.dtype != torch.uint8 or len(info.shape) != 1 or info.shape[0] > _MAX_STATE_BYTES:
            raise ValueError("it is not a short tensor of bytes")
        state = json.loads(bytes(weights.read(name).tolist()))
        sizes = [state["blocksize"], *state["shape"], state.get("nested_blocksize", 1)]
        if len(state["shape"]) != 2 or any(type(size) is not int or not 1 <= size <= 1 << 24 for size in sizes):
            raise ValueError("its sizes are out of range")
        state["nested_offset"] = float(state.get("nested_offset", 0.0))
        if not math.isfinite(state["nested_offset"]):
            raise ValueError("its nested_offset is not finite")
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as problem:
        raise CheckpointError(f"{weights.location(name)} is not a quantization state: {problem}.", cure=DOWNLOAD_AGAIN) from None
    return dict(state)
