"""Weights that a checkpoint already holds in few bits, taken over as they are: no value changes.

Stored tensors follow the rows of the output, so the parts of a fused linear are joined by concatenation. The readers: kept_words.py,
kept_bytes.py and gguf_kept.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.weights import Weights
from stoker.builder.conversion.tensor_plan import Making
from stoker.core.specs import LinearSpec
from stoker.kernels.quantized import Int4Weight
from stoker.kernels.reference.quant_fp8 import widen_blocks
from stoker.kernels.reference.quant_int4 import dequantize_int4
from stoker.kernels.reference.quant_int8 import widen_groups
from stoker.quant.block_fp8 import BlockFp8
from stoker.quant.format import Format
from stoker.quant.int4 import Int4
from stoker.quant.int8 import Int8
from stoker.quant.int8_grouped import GroupedInt8

# Parts of a tensor that scales a fused linear's input, which its parts share; the largest serves all.
_SHARED = ("input_scale",)


def keepable(spec: LinearSpec, makings: Mapping[str, Making], weights: Weights) -> Format | None:
    """The format that holds `spec` as the checkpoint stores its parts; None when it holds them otherwise, or they differ."""
    making = makings[f"{spec.name}.weight"]
    if making.custom is not None:
        return None
    sources = [source for group in making.sources for source in group]
    formats = {weights.kept.get(source) for source in sources}
    found = formats.pop() if len(formats) == 1 else None
    if spec.name == "embed" and not isinstance(found, (Int8, GroupedInt8)):
        return None  # rows of other formats cannot be looked up
    if isinstance(found, BlockFp8):
        # Blocks of rows never cross parts: shorter ones hold the same scales.
        found = msgspec.structs.replace(found, rows=math.gcd(found.rows, *(weights.stored[s].shape[0] for s in sources)))
    return found


def take(spec: LinearSpec, chosen: Format, makings: Mapping[str, Making], weights: Weights) -> dict[str, Tensor]:
    """The stored tensors of `spec`, whose parts the checkpoint holds in `chosen` but for the size of its groups or blocks."""
    making, found = makings[f"{spec.name}.weight"], []
    for sources in making.sources:
        tensors = [_regrouped(weights.take(s), weights.kept[s], chosen, weights.stored[s].shape) for s in sources]
        found.append({suffix: _joined(suffix, [t[suffix] for t in tensors], spec) for suffix in tensors[0]})
    if not making.stacked:
        return found[0]
    stacked = {suffix: torch.stack([expert[suffix] for expert in found]) for suffix in found[0]}
    return {suffix: t.amax(0) if suffix in _SHARED else t for suffix, t in stacked.items()}


def _joined(suffix: str, pieces: list[Tensor], spec: LinearSpec) -> Tensor:
    """One stored tensor of a fused linear from those of its parts."""
    if suffix in _SHARED:
        return torch.stack(pieces).amax(0)
    if suffix != "order":
        return torch.cat(pieces).contiguous()
    if any(not torch.equal(pieces[0], piece) for piece in pieces):
        raise CheckpointError(f"{spec.name}: its parts order their input differently (desc_act).", cure="Build with --quantize NO_QUANT.")
    return pieces[0]


def _regrouped(tensors: dict[str, Tensor], stored: Format, chosen: Format, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Scales told once for each of `chosen`'s groups or blocks, which are those of `stored` or parts of them."""
    if stored == chosen:
        return tensors
    rows = columns = fine = 1
    if isinstance(stored, BlockFp8) and isinstance(chosen, BlockFp8):
        rows, columns, fine = stored.rows // chosen.rows, stored.columns // chosen.columns, chosen.columns
        count = -(-shape[0] // chosen.rows)
    elif isinstance(stored, (Int4, GroupedInt8)) and isinstance(chosen, (Int4, GroupedInt8)):
        columns, fine, count = stored.group_size // chosen.group_size, chosen.group_size, shape[0]
    else:
        return tensors

    def finer(t: Tensor) -> Tensor:
        return t.repeat_interleave(rows, 0)[:count].repeat_interleave(columns, 1)[:, : -(-shape[1] // fine)].contiguous()

    return {suffix: finer(t) if suffix in ("scale", "zero", "offset") else t for suffix, t in tensors.items()}


def dequantize(chosen: Format, t: dict[str, Tensor]) -> Tensor:
    """float32 [out, in] of stored tensors."""
    if isinstance(chosen, Int4):
        wide = dequantize_int4(Int4Weight(t["weight"], t["scale"], t.get("zero"), t.get("offset"), chosen.group_size))
        return wide if "order" not in t else torch.empty_like(wide).index_copy_(1, t["order"].long(), wide)
    if isinstance(chosen, GroupedInt8):
        return widen_groups(t["weight"], t["scale"], t.get("offset"), chosen.group_size)
    if isinstance(chosen, BlockFp8):
        return widen_blocks(t["weight"], t["scale"], (chosen.rows, chosen.columns))
    return t["weight"].float() * t["scale"][:, None]
