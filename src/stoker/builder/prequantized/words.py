"""Codes packed into int32 words: AutoAWQ and GPTQ matrices, which lie [in, out], and int4 ones of compressed-tensors, [out, in]."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.weights import Stored
from stoker.builder.prequantized.weight import FLOATS, Kept, bits_and_group, check, dtype_name, matrix, stems
from stoker.quant import groups
from stoker.quant.format import Format
from stoker.quant.int4 import GROUP_SIZES, Int4
from stoker.quant.int8_grouped import GroupedInt8

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of an AutoAWQ int32 is column AWQ_ORDER[i] of its eight


def read_awq(stored: Mapping[str, Stored], quantization: dict[str, Any]) -> dict[str, Kept]:
    """AutoAWQ's gemm layout."""
    _, size = bits_and_group(quantization, (4,))
    if str(quantization.get("version", "gemm")).lower() != "gemm":
        raise CheckpointError(f"AWQ version {quantization['version']!r} is not read.", cure="Use one of version gemm.")
    found = {}
    for stem in stems(stored, ".qweight", (".qzeros", ".scales")):
        rows, width = matrix(stored, f"{stem}.qweight")
        group, out = rows if size == -1 else size, width * 8
        count = -(-rows // group)
        check(stored, f"{stem}.qweight", (rows, width), torch.int32)
        check(stored, f"{stem}.qzeros", (count, width), torch.int32)
        check(stored, f"{stem}.scales", (count, out), *FLOATS)
        chosen = Int4(group_size=_fit(group), zero="int", scale_dtype=dtype_name(stored[f"{stem}.scales"].dtype), clip=False)
        sources = tuple(f"{stem}.{part}" for part in ("qweight", "qzeros", "scales"))
        found[f"{stem}.weight"] = Kept(sources, (out, rows), chosen, _awq_taker(group))
    return found


def _awq_taker(group: int) -> Callable[[list[Tensor]], dict[str, Tensor]]:
    def take(parts: list[Tensor]) -> dict[str, Tensor]:
        codes, zeros = (_awq_columns(nibbles(words)) for words in parts[:2])
        return _int4(codes.t(), parts[2].t(), zeros.t(), group)

    return take


def read_gptq(stored: Mapping[str, Stored], quantization: dict[str, Any]) -> dict[str, Kept]:
    """AutoGPTQ's layout; its first version stores zeros less one."""
    bits, size = bits_and_group(quantization, (4, 8))
    bias = 0 if quantization.get("checkpoint_format") == "gptq_v2" else 1
    found = {}
    for stem in stems(stored, ".qweight", (".qzeros", ".scales")):
        packed, out = matrix(stored, f"{stem}.qweight")
        rows = packed * 32 // bits
        group = rows if size == -1 else size
        check(stored, f"{stem}.qweight", (packed, out), torch.int32)
        check(stored, f"{stem}.qzeros", (-(-rows // group), out * bits // 32), torch.int32)
        check(stored, f"{stem}.scales", (-(-rows // group), out), *FLOATS)
        grouped = f"{stem}.g_idx" in stored
        ordered = bool(quantization.get("desc_act")) and grouped
        if grouped:
            check(stored, f"{stem}.g_idx", (rows,), torch.int32)
        sources = tuple(f"{stem}.{part}" for part in ("qweight", "qzeros", "scales", *(("g_idx",) if grouped else ())))
        take = _gptq_taker(stem, bits, bias, group, rows, ordered)
        found[f"{stem}.weight"] = Kept(sources, (out, rows), _gptq_format(bits, group, ordered, stored[f"{stem}.scales"].dtype), take)
    return found


def _gptq_format(bits: int, group: int, ordered: bool, dtype: torch.dtype) -> Format:
    if bits == 8:
        if ordered:
            raise CheckpointError("GPTQ of 8 bits with desc_act is not read.", cure="Build from the checkpoint it was made of.")
        return GroupedInt8(group_size=_fit(group), scale_dtype="float32", shifted=True)
    return Int4(group_size=_fit(group), zero="int", scale_dtype=dtype_name(dtype), clip=False, reorder=ordered)


def _gptq_taker(stem: str, bits: int, bias: int, group: int, rows: int, ordered: bool) -> Callable[[list[Tensor]], dict[str, Tensor]]:
    def take(parts: list[Tensor]) -> dict[str, Tensor]:
        order = _order(stem, parts[3], group, ordered) if len(parts) > 3 else torch.arange(rows)
        codes = nibbles(parts[0].t().contiguous(), bits)  # [out, in]
        zero, scale = nibbles(parts[1], bits).t().int() + bias, parts[2].t()
        if bits == 8:
            wide = _spread(scale.float(), group, rows)
            offset = _spread((128 - zero).float(), group, rows) * wide
            return {"weight": (codes.int() - 128).to(torch.int8), "scale": wide, "offset": offset}
        if not ordered:
            return _int4(codes, scale, zero, group)
        return _int4(codes[:, order], scale, zero, group) | {"order": order.int()}

    return take


def _order(stem: str, groups_of: Tensor, group: int, ordered: bool) -> Tensor:
    """int64 [in]: the input features in the order of their groups, all of one size. Raises CheckpointError when they are not."""
    order = groups_of.argsort(stable=True) if ordered else torch.arange(len(groups_of))
    if not torch.equal(groups_of[order].long(), torch.arange(len(order)) // group):
        raise CheckpointError(
            f"{stem}.g_idx does not number groups of {group} features{'' if ordered else ' in their order'}.",
            cure="Correct group_size and desc_act in config.json, or download the checkpoint again.",
        )
    return order


def read_compressed_int4(stored: Mapping[str, Stored], weights: dict[str, Any]) -> dict[str, Kept]:
    size, found = weights.get("group_size"), {}
    size = -1 if size is None else size
    if type(size) is not int or (size != -1 and size not in GROUP_SIZES):
        raise CheckpointError(
            f"quantization_config: groups of {size!r} are not read.", cure=f"Read are {', '.join(map(str, GROUP_SIZES))}."
        )
    for stem in stems(stored, ".weight_packed", (".weight_scale",)):
        out, packed = matrix(stored, f"{stem}.weight_packed")
        rows = packed * 8
        group = rows if size == -1 else size
        zero = f"{stem}.weight_zero_point"
        asymmetric = not weights.get("symmetric", True) and zero in stored
        check(stored, f"{stem}.weight_packed", (out, packed), torch.int32)
        check(stored, f"{stem}.weight_scale", (out, -(-rows // group)), *FLOATS)
        if asymmetric:
            check(stored, zero, (-(-out // 8), -(-rows // group)), torch.int32)
        dtype = dtype_name(stored[f"{stem}.weight_scale"].dtype)
        chosen = Int4(group_size=_fit(group), zero="int" if asymmetric else "none", scale_dtype=dtype, clip=False)

        def take(parts: list[Tensor], group: int = group, asymmetric: bool = asymmetric) -> dict[str, Tensor]:
            zeros = nibbles(parts[2].t().contiguous()).t() if asymmetric else None
            return _int4(nibbles(parts[0]), parts[1], zeros, group)

        extra = (f"{stem}.weight_shape",) if f"{stem}.weight_shape" in stored else ()
        sources = (f"{stem}.weight_packed", f"{stem}.weight_scale", *((zero,) if asymmetric else ()), *extra)
        found[f"{stem}.weight"] = Kept(sources, (out, rows), chosen, take)
    return found


def nibbles(words: Tensor, bits: int = 4) -> Tensor:
    """uint8 [..., n × 32 / bits] of int32 [..., n], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & (2**bits - 1)).to(torch.uint8).flatten(-2)


def _awq_columns(codes: Tensor) -> Tensor:
    """Columns in their own order."""
    inverse = torch.tensor(AWQ_ORDER).argsort()
    return codes.unflatten(-1, (-1, 8))[..., inverse].flatten(-2)


def _int4(codes: Tensor, scale: Tensor, zero: Tensor | None, group: int) -> dict[str, Tensor]:
    """Stored tensors of codes [out, in], scale and zero [out, groups of `group`]."""
    rows = codes.shape[1]
    stored = {"weight": groups.pack(codes), "scale": _spread(scale, group, rows)}
    return stored if zero is None else stored | {"zero": _spread(zero.to(torch.uint8), group, rows)}


def _spread(t: Tensor, group: int, rows: int) -> Tensor:
    """[out, groups of `_fit(group)`] of [out, groups of `group`]: those that are larger than any here are told several times."""
    fit = _fit(group)
    return t.repeat_interleave(-(-group // fit), 1)[:, : -(-rows // fit)].contiguous()


def _fit(group: int) -> int:
    """The group size that holds groups of `group`: one group a row is told as many equal ones."""
    return group if group in GROUP_SIZES else 128
