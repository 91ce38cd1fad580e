"""Weights of eight bits: Hugging Face's fp8, and compressed-tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.weights import FETCH, Stored
from stoker.builder.prequantized.weight import FLOATS, Kept, check, dtype_name, matrix, settings, stems
from stoker.builder.prequantized.words import read_compressed_int4
from stoker.quant.block_fp8 import BlockFp8
from stoker.quant.format import Format
from stoker.quant.fp8 import Fp8
from stoker.quant.int8 import Int8
from stoker.quant.smoothquant import SmoothQuant


def read_fp8(stored: Mapping[str, Stored], quantization: dict[str, Any]) -> dict[str, Kept]:
    """Hugging Face fp8: a factor a block (`weight_scale_inv`) or one a matrix (`weight_scale`, and `input_scale` when static)."""
    block = quantization.get("weight_block_size")
    if block is not None and not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
        raise CheckpointError(f"quantization_config: weight_block_size={block!r} is not [rows, columns].", cure=FETCH)
    found = {}
    for name, entry in stored.items():
        if entry.dtype != torch.float8_e4m3fn or len(entry.shape) != 2 or not name.endswith(".weight"):
            continue
        out, size = entry.shape
        scale = f"{name}_scale_inv" if block is not None else f"{name}_scale"
        if scale not in stored:
            raise CheckpointError(f"{scale} is missing beside {name}.", cure=FETCH)
        if block is not None:
            check(stored, scale, (-(-out // block[0]), -(-size // block[1])), *FLOATS)
            chosen: Format = BlockFp8(rows=block[0], columns=block[1])
            found[name] = Kept((name, scale), (out, size), chosen, lambda parts: {"weight": parts[0], "scale": parts[1].float()})
        else:
            static = f"{name.removesuffix('.weight')}.input_scale"
            static_too = (static,) if static in stored and quantization.get("activation_scheme", "static") == "static" else ()
            _check_scales(stored, name, scale, *static_too)
            found[name] = Kept((name, scale, *static_too), (out, size), _plain_fp8(bool(static_too)), _rows_taker(out))
    return found


def _plain_fp8(static: bool) -> Fp8:
    return Fp8(weights="tensor", activations="static" if static else "token")


def _check_scales(stored: Mapping[str, Stored], name: str, scale: str, *inputs: str) -> None:
    """Raise CheckpointError unless `scale` has one number or one for each row of `name`, and `inputs` one each."""
    for part, counts in ((scale, (1, stored[name].shape[0])), *((part, (1,)) for part in inputs)):
        if math.prod(stored[part].shape) not in counts or stored[part].dtype not in FLOATS:
            what = f"{list(stored[part].shape)} {dtype_name(stored[part].dtype)}"
            raise CheckpointError(f"{part} {what} does not fit {name} {list(stored[name].shape)}.", cure=FETCH)


def _rows_taker(out: int) -> Callable[[list[Tensor]], dict[str, Tensor]]:
    """weight, scale (one, or one a row), and perhaps an input scale."""

    def take(parts: list[Tensor]) -> dict[str, Tensor]:
        stored = {"weight": parts[0], "scale": parts[1].float().reshape(-1).expand(out).contiguous()}
        return stored if len(parts) == 2 else stored | {"input_scale": parts[2].float().reshape(1)}

    return take


def read_compressed(stored: Mapping[str, Stored], quantization: dict[str, Any]) -> dict[str, Kept]:
    """compressed-tensors: pack-quantized int4, int-quantized int8, float-quantized e4m3; one group of settings."""
    listed = list(settings(quantization, "config_groups").values())
    if len(listed) != 1 or not isinstance(listed[0], dict):
        raise CheckpointError(f"quantization_config: {len(listed)} config_groups are not read.", cure="Use a checkpoint with one.")
    weights, inputs = settings(listed[0], "weights"), settings(listed[0], "input_activations")
    bits, kind = weights.get("num_bits"), weights.get("type")
    if (bits, kind) == (4, "int") and not inputs:
        return read_compressed_int4(stored, weights)
    if (bits, kind) not in ((8, "int"), (8, "float")) or weights.get("strategy") not in ("channel", "tensor"):
        raise CheckpointError(
            f"quantization_config: {bits}-bit {kind} weights by {weights.get('strategy')} are not read.", cure="Use another."
        )
    if quantization.get("format") == "pack-quantized":
        raise CheckpointError("quantization_config: format='pack-quantized' of 8 bits is not read.", cure="Use int-quantized, or 4 bits.")
    if inputs and (inputs.get("num_bits", bits), inputs.get("type", kind)) != (bits, kind):
        found_inputs = f"{inputs.get('num_bits', bits)}-bit {inputs.get('type', kind)} input_activations"
        raise CheckpointError(f"quantization_config: {found_inputs} of {bits}-bit {kind} weights are not read.", cure="Use another.")
    static = bool(inputs) and not inputs.get("dynamic")
    if kind == "float":
        chosen: Format = Fp8(activations="none" if not inputs else "static" if static else "token")
    else:
        chosen = SmoothQuant(per_token=not static) if inputs else Int8()
    dtype, found = torch.float8_e4m3fn if kind == "float" else torch.int8, {}
    for stem in stems(stored, ".weight_scale", (".weight", *((".input_scale",) if static else ()))):
        shape = matrix(stored, f"{stem}.weight")
        check(stored, f"{stem}.weight", shape, dtype)
        sources = (f"{stem}.weight", f"{stem}.weight_scale", *((f"{stem}.input_scale",) if static else ()))
        _check_scales(stored, *sources)
        found[f"{stem}.weight"] = Kept(sources, shape, chosen, _rows_taker(shape[0]))
    return found
