"""Formats of an engine as schemes of compressed-tensors: the settings of a group of modules, and the tensors of each module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stoker.builder.prequantized.dequantize import dequantize
from stoker.kernels.reference.quant_int4 import unpack
from stoker.quant.format import Format
from stoker.quant.formats.block_fp8 import BlockFp8
from stoker.quant.formats.dense import Dense
from stoker.quant.formats.fp4 import Fp4
from stoker.quant.formats.fp8 import Fp8
from stoker.quant.formats.int4 import Int4
from stoker.quant.formats.int8 import Int8
from stoker.quant.formats.int8_grouped import GroupedInt8, in_feature_order
from stoker.quant.formats.smoothquant import SmoothQuant

WORD_BITS = 32


def scheme_of(chosen: Format, stored: dict[str, Tensor]) -> dict[str, Any] | None:
    """The settings of a module in `config_groups`, without its targets. `stored` are its stored tensors by suffix.

    None for a format that compressed-tensors lacks: values with an offset that is no multiple of their scale, zero points that do not
    fit into the bits of a value (GPTQ has them up to 16), and FP4 in groups of another size.
    """
    if isinstance(chosen, Fp8):
        return _scheme("float-quantized", _weights(8, "float", "channel"), _activations("float", chosen.activations))
    if isinstance(chosen, BlockFp8):
        weights = _weights(8, "float", "block", block_structure=[chosen.rows, chosen.columns])
        inputs = _weights(8, "float", "group", group_size=chosen.columns) | {"dynamic": True}
        return _scheme("float-quantized", weights, inputs)
    if isinstance(chosen, Int8):
        return _scheme("int-quantized", _weights(8, "int", "channel"), None)
    if isinstance(chosen, SmoothQuant):
        return _scheme("int-quantized", _weights(8, "int", "channel"), _activations("int", "token" if chosen.per_token else "static"))
    if isinstance(chosen, (GroupedInt8, Int4)):
        return _grouped_scheme(chosen, stored)
    return _fp4_scheme(chosen, stored) if isinstance(chosen, Fp4) else None


def _fp4_scheme(chosen: Fp4, stored: dict[str, Tensor]) -> dict[str, Any] | None:
    """The settings of MXFP4 or NVFP4; None for other groups than theirs, and for rows with different scales."""
    if chosen == Fp4(group_size=32):
        settings = _weights(4, "float", "group", group_size=32, scale_dtype="torch.uint8")
        return _scheme("mxfp4-pack-quantized", settings, None)
    if chosen == Fp4(group_size=16, scale="e4m3") and bool((stored["row_scale"] == stored["row_scale"][0]).all()):
        return _scheme("nvfp4-pack-quantized", _weights(4, "float", "tensor_group", group_size=16), None)
    return None


def _grouped_scheme(chosen: GroupedInt8 | Int4, stored: dict[str, Tensor]) -> dict[str, Any] | None:
    """The settings of integers in groups; None for zero points that are no integers of as many bits."""
    bits = 4 if isinstance(chosen, Int4) else 8
    has_zero = "zero" in stored or "offset" in stored
    if has_zero and _zero_points(stored, bits) is None:
        return None
    settings = _weights(bits, "int", "group", group_size=chosen.group_size) | {"symmetric": not has_zero}
    ordered = settings | ({"actorder": "group"} if chosen.reorder else {})
    return _scheme("pack-quantized" if bits == 4 else "int-quantized", ordered, None)


def module_tensors(chosen: Format, stored: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a module by suffix, from the stored tensors of its rows. Plain numbers in `dtype` if there is no scheme."""
    if isinstance(chosen, Dense):
        return {"weight": stored["weight"]}
    if scheme_of(chosen, stored) is None:
        return {"weight": dequantize(chosen, stored).to(dtype)}
    if isinstance(chosen, (GroupedInt8, Int4)):
        return _grouped_tensors(chosen, stored)
    if isinstance(chosen, Fp4):
        tensors = {"weight_packed": stored["weight"], "weight_scale": stored["scale"]}
        return tensors | ({"weight_global_scale": 1 / stored["row_scale"][:1]} if "row_scale" in stored else {})
    scale = stored["scale"].float()
    tensors = {"weight": stored["weight"], "weight_scale": scale if scale.dim() == 2 else scale[:, None]}
    return tensors | ({"input_scale": stored["input_scale"]} if "input_scale" in stored else {})


def expert_module(chosen: Format, stored: dict[str, Tensor], dtype: torch.dtype) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    """(settings, tensors by suffix) of a linear of an expert, in a form that transformers reads. The settings are None for plain numbers.

    transformers dequantizes experts when it loads them: FP8 with a scale per row, and packed integers without zero points. Other integers
    with a scale per row or group, which differ from their zero points by -128 to 127, are packed with 8 bits, without a change of values.
    """
    symmetric_int4 = isinstance(chosen, Int4) and chosen.zero == "none" and not chosen.reorder
    if isinstance(chosen, (Dense, Fp8, Fp4)) or symmetric_int4:
        return scheme_of(chosen, stored), module_tensors(chosen, stored, dtype)
    values = _symmetric_values(chosen, stored)
    if values is None or int(values.min()) < -128 or int(values.max()) > 127:
        return None, {"weight": dequantize(chosen, stored).to(dtype)}
    scale = stored["scale"].float() if stored["scale"].dim() == 1 else stored["scale"]
    weights = _weights(8, "int", "channel")
    if isinstance(chosen, (GroupedInt8, Int4)):
        weights = _weights(8, "int", "group", group_size=chosen.group_size)
    tensors = {
        "weight_packed": _pack_words(values + 128, 8),
        "weight_scale": scale if scale.dim() == 2 else scale[:, None],
        "weight_shape": torch.tensor(values.shape, dtype=torch.int64),
    }
    return _scheme("pack-quantized", weights, None), tensors


def _symmetric_values(chosen: Format, stored: dict[str, Tensor]) -> Tensor | None:
    """The stored integers minus their zero points, int16 [out, in]; None for other formats, and for columns in another order."""
    if isinstance(chosen, (Int8, SmoothQuant)):
        return stored["weight"].to(torch.int16)
    if not isinstance(chosen, (GroupedInt8, Int4)) or chosen.reorder:
        return None
    bits = 4 if isinstance(chosen, Int4) else 8
    values = stored["weight"].to(torch.int16) if bits == 8 else unpack(stored["weight"]).to(torch.int16) - 8
    if "zero" in stored:
        zero: Tensor | None = stored["zero"].to(torch.int16) - 8
    elif "offset" in stored:
        zero = _zero_points(stored, bits)
    else:
        return values
    return None if zero is None else values - zero.repeat_interleave(chosen.group_size, 1)[:, : values.shape[1]]


def _zero_points(stored: dict[str, Tensor], bits: int) -> Tensor | None:
    """The zero points [out, groups] as integers of `bits` bits around 0; None if they are none, or out of range."""
    half = 1 << bits - 1
    if "zero" in stored:
        zero = stored["zero"].to(torch.int16) - half
    else:
        base, scale = (half if bits == 4 else 0), stored["scale"].float()  # stored values of int4 are not negative
        exact = (-stored["offset"].float() / scale).round()
        if not torch.equal(-exact * scale, stored["offset"].float()) or float(exact.abs().max()) > 1 << 10:
            return None
        zero = exact.to(torch.int16) - base
    return zero if -half <= int(zero.min()) and int(zero.max()) < half else None


def _grouped_tensors(chosen: GroupedInt8 | Int4, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of integers in groups: int8, or int32 words of int4 along the input features with zero points in words along the rows.

    The first value of a word is in its lowest bits. Columns are in the order of the input features.
    """
    values, bits = stored["weight"], 4 if isinstance(chosen, Int4) else 8
    if bits == 4:
        values = unpack(values)
    tensors = {"weight_scale": stored["scale"]}
    if chosen.reorder:
        values = in_feature_order(values, stored["order"])
        groups = torch.arange(values.shape[1], dtype=torch.int32) // chosen.group_size
        tensors["weight_g_idx"] = in_feature_order(groups[None], stored["order"])[0]
    zero = _zero_points(stored, bits) if "zero" in stored or "offset" in stored else None
    if bits == 8:
        return tensors | {"weight": values} | ({} if zero is None else {"weight_zero_point": zero.to(torch.int8)})
    tensors |= {"weight_packed": _pack_words(values, 4), "weight_shape": torch.tensor(values.shape, dtype=torch.int64)}
    return tensors if zero is None else tensors | {"weight_zero_point": _pack_words((zero + 8).t(), 4).t()}


def _pack_words(values: Tensor, bits: int) -> Tensor:
    """int32 [n, ceil(k × bits / 32)] from values of 4 or 8 bits that are not negative [n, k]."""
    per_word = WORD_BITS // bits
    padded = torch.nn.functional.pad(values.to(torch.int64), (0, -values.shape[1] % per_word)).unflatten(1, (-1, per_word))
    words = (padded << (bits * torch.arange(per_word))).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _scheme(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    """A group of `config_groups` without its targets."""
    return {"weights": weights, "input_activations": inputs, "output_activations": None, "format": form}


def _weights(bits: int, kind: str, strategy: str, **sizes: Any) -> dict[str, Any]:
    """The settings of symmetric quantized values."""
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False} | sizes


def _activations(kind: str, mode: str) -> dict[str, Any] | None:
    """The settings of activations of 8 bits: with a scale per token, a static one, or none."""
    if mode == "none":
        return None
    return _weights(8, kind, "token" if mode == "token" else "tensor") | {"dynamic": mode == "token"}
