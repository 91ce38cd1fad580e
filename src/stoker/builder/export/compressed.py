"""Formats of an engine as schemes of compressed-tensors: the settings of a group of modules, and the tensors of each module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stoker.builder.prequantized.dequantize import dequantize
from stoker.quant.format import Format
from stoker.quant.formats.block_fp8 import BlockFp8
from stoker.quant.formats.dense import Dense
from stoker.quant.formats.fp8 import Fp8
from stoker.quant.formats.int4 import Int4
from stoker.quant.formats.int8 import Int8
from stoker.quant.formats.int8_grouped import GroupedInt8
from stoker.quant.formats.smoothquant import SmoothQuant

PER_WORD = 8  # int4 values of an int32 word


def scheme_of(chosen: Format, stored: dict[str, Tensor]) -> dict[str, Any] | None:
    """The settings of a module in `config_groups`, without its targets. `stored` are its stored tensors by suffix.

    None for a format that compressed-tensors lacks, and for zero points that do not fit into four bits (GPTQ has them up to 16).
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
    if isinstance(chosen, GroupedInt8) and not chosen.shifted:
        return _scheme("int-quantized", _weights(8, "int", "group", group_size=chosen.group_size), None)
    if isinstance(chosen, Int4) and chosen.zero != "float" and not chosen.reorder and not _has_large_zeros(stored):
        weights = _weights(4, "int", "group", group_size=chosen.group_size) | {"symmetric": chosen.zero == "none"}
        return _scheme("pack-quantized", weights, None)
    return None


def module_tensors(chosen: Format, stored: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a module by suffix, from the stored tensors of its rows. Plain numbers in `dtype` if there is no scheme."""
    if isinstance(chosen, Dense):
        return {"weight": stored["weight"]}
    if scheme_of(chosen, stored) is None:
        return {"weight": dequantize(chosen, stored).to(dtype)}
    if isinstance(chosen, Int4):
        return _packed_int4(stored)
    scale = stored["scale"].float()
    tensors = {"weight": stored["weight"], "weight_scale": scale if scale.dim() == 2 else scale[:, None]}
    return tensors | ({"input_scale": stored["input_scale"]} if "input_scale" in stored else {})


def _has_large_zeros(stored: dict[str, Tensor]) -> bool:
    """Whether a zero point of a module is larger than 15."""
    return "zero" in stored and int(stored["zero"].max()) > 15


def _packed_int4(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """int32 words along the input features, and zero points in words along the rows. The first value of a word is in its lowest bits."""
    nibbles = torch.stack((stored["weight"] & 15, stored["weight"] >> 4), dim=-1).flatten(-2)
    shape = torch.tensor(nibbles.shape, dtype=torch.int64)
    tensors = {"weight_packed": _pack_words(nibbles), "weight_scale": stored["scale"], "weight_shape": shape}
    return tensors | ({"weight_zero_point": _pack_words(stored["zero"].t()).t()} if "zero" in stored else {})


def _pack_words(values: Tensor) -> Tensor:
    """int32 [n, ceil(k / 8)] from values 0 to 15 [n, k]."""
    padded = torch.nn.functional.pad(values.to(torch.int64), (0, -values.shape[1] % PER_WORD)).unflatten(1, (-1, PER_WORD))
    words = (padded << (4 * torch.arange(PER_WORD))).sum(-1)
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
