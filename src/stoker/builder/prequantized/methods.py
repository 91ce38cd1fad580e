"""Checkpoint tensors that are stored in fewer bits: which stay as they are, and which are read as the tensors they stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.weights import Stored
from stoker.builder.prequantized.bytes import read_compressed, read_fp8
from stoker.builder.prequantized.weight import Kept, dtype_name
from stoker.builder.prequantized.words import read_awq, read_gptq

# The values of FP4 e2m1 by their four bits (OCP Microscaling Formats 1.0, table 5).
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor of `stored` shape and dtype that `restore` makes of the tensors `sources`."""

    sources: tuple[str, ...]
    stored: Stored
    restore: Callable[[list[Tensor]], Tensor]


def find_kept(stored: Mapping[str, Stored], quantization: dict[str, Any]) -> dict[str, Kept] | None:
    """The weights of a quantized checkpoint that a format holds as they are, by name; None for a method that is not read here.

    `quantization` is config.json's quantization_config. Raises CheckpointError for settings or tensors that don't fit.
    """
    reader = READERS.get(str(quantization.get("quant_method", "")))
    return None if reader is None else reader(stored, quantization)


def find_packed(stored: Mapping[str, Stored], quantization: dict[str, Any]) -> dict[str, Packed]:
    """The packed tensors by the name of what they stand for. `quantization` is config.json's quantization_config.

    Raises CheckpointError for a method that is not read, or scales that don't fit.
    """
    method = str(quantization.get("quant_method", "unknown"))
    if method not in METHODS:
        raise CheckpointError(
            f"The checkpoint is quantized already ({method}).",
            cure=f"Build from the checkpoint it was made of. Read are: {', '.join((*READERS, *METHODS))}.",
        )
    return METHODS[method](stored, quantization)


def _mxfp4(stored: Mapping[str, Stored], quantization: dict[str, Any]) -> dict[str, Packed]:
    """gpt-oss: `x_blocks` uint8 [experts, out, blocks, 16] and `x_scales` uint8 [experts, out, blocks] stand for x [experts, in, out]."""
    found: dict[str, Packed] = {}
    for name, entry in stored.items():
        if not name.endswith("_blocks"):
            continue
        stem = name.removesuffix("_blocks")
        scales = f"{stem}_scales"
        if len(entry.shape) != 4 or scales not in stored or stored[scales].shape != entry.shape[:3]:
            raise CheckpointError(f"{scales} is missing, or does not fit {name} {list(entry.shape)}.", cure="Download it again.")
        if odd := [part for part in (name, scales) if stored[part].dtype != torch.uint8]:
            raise CheckpointError(f"{odd[0]} is {dtype_name(stored[odd[0]].dtype)}, and uint8 is expected.", cure="Download it again.")
        experts, out, blocks, half = entry.shape
        found[stem] = Packed((name, scales), Stored((experts, blocks * half * 2, out), torch.bfloat16), lambda parts: unpack_mxfp4(*parts))
    return found


def unpack_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """bfloat16 [experts, in, out]: the low nibble comes first, a block's values are × 2 ** (scale - 127)."""
    table = torch.tensor(FP4, dtype=torch.bfloat16)
    nibbles = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    exponent = scales.to(torch.int32)[..., None] - 127
    values = torch.ldexp(table[nibbles.long()].float(), exponent).to(torch.bfloat16)
    return values.flatten(-2).transpose(1, 2)


# One row per quant_method: whose weights stay as they are, and whose tensors are restored.
READERS: dict[str, Callable[[Mapping[str, Stored], dict[str, Any]], dict[str, Kept]]] = {
    "awq": read_awq, "gptq": read_gptq, "compressed-tensors": read_compressed, "fp8": read_fp8,
}  # fmt: skip
METHODS: dict[str, Callable[[Mapping[str, Stored], dict[str, Any]], dict[str, Packed]]] = {"mxfp4": _mxfp4}
