"""Weights that a checkpoint already holds in few bits, taken over as they are: no value changes.

AutoAWQ and GPTQ matrices lie [in, out], eight codes an int32; compressed-tensors ones [out, in]. All become the codes, scales and zeros of
a format of quant/, by rows of the output, so the parts of a fused linear are joined by concatenation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.names import Making
from stoker.builder.weights import FETCH, Stored, Weights
from stoker.kernels.quantized import Int4Weight
from stoker.kernels.reference.quant_fp8 import widen_blocks
from stoker.kernels.reference.quant_int4 import dequantize_int4
from stoker.layers.specs import LinearSpec
from stoker.quant import groups
from stoker.quant.block_fp8 import BlockFp8
from stoker.quant.format import Format
from stoker.quant.fp8 import Fp8
from stoker.quant.int4 import GROUP_SIZES, Int4
from stoker.quant.int8 import Int8
from stoker.quant.int8_grouped import GroupedInt8, widen
from stoker.quant.smoothquant import SmoothQuant

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of an AutoAWQ int32 is column AWQ_ORDER[i] of its eight
# Parts of a tensor that scales a fused linear's input, which its parts share; the largest serves all.
_SHARED = ("input_scale",)


@dataclass(frozen=True, slots=True)
class Kept:
    """A weight [out, in] of `shape` that `take` makes of the tensors `sources`, as `format` stores it."""

    sources: tuple[str, ...]
    shape: tuple[int, int]
    format: Format
    take: Callable[[list[Tensor]], dict[str, Tensor]]


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
        return widen(t["weight"], t["scale"], t.get("offset"), chosen.group_size)
    if isinstance(chosen, BlockFp8):
        return widen_blocks(t["weight"], t["scale"], (chosen.rows, chosen.columns))
    return t["weight"].float() * t["scale"][:, None]


def find_kept(stored: Mapping[str, Stored], quantization: dict[str, Any]) -> dict[str, Kept] | None:
    """The weights of a quantized checkpoint that a format holds as they are, by name; None for a method that is not read here.

    `quantization` is config.json's quantization_config. Raises CheckpointError for settings or tensors that don't fit.
    """
    reader = READERS.get(str(quantization.get("quant_method", "")))
    return None if reader is None else reader(stored, quantization)


def _bits(quantization: dict[str, Any], allowed: tuple[int, ...]) -> tuple[int, int]:
    """(bits, group size; -1: one group a row)."""
    bits = quantization.get("bits", quantization.get("w_bit"))
    size = quantization.get("group_size", quantization.get("q_group_size"))
    if bits not in allowed or not isinstance(size, int) or (size != -1 and size not in GROUP_SIZES):
        raise CheckpointError(
            f"quantization_config: {bits!r} bits in groups of {size!r} are not read.",
            cure=f"Read are {' or '.join(map(str, allowed))} bits in groups of {', '.join(map(str, GROUP_SIZES))}.",
        )
    return bits, size


def _stems(stored: Mapping[str, Stored], suffix: str, needed: tuple[str, ...]) -> list[str]:
    """Modules that have a tensor `suffix`; all must have those `needed` too."""
    stems = [name.removesuffix(suffix) for name in stored if name.endswith(suffix)]
    for stem in stems:
        if missing := [part for part in needed if stem + part not in stored]:
            raise CheckpointError(f"{stem}{missing[0]} is missing beside {stem}{suffix}.", cure=FETCH)
    return stems


def _check(stored: Mapping[str, Stored], name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    """Raise CheckpointError unless tensor `name` has the shape, and the dtype if one is given, that quantization_config implies."""
    found = stored[name]
    if found.shape != shape:
        raise CheckpointError(
            f"{name} has shape {list(found.shape)}, and quantization_config asks for {list(shape)}.",
            cure="Correct the group or block size in config.json, or download the checkpoint again.",
        )
    if dtype is not None and found.dtype != dtype:
        raise CheckpointError(f"{name} is {_dtype_name(found.dtype)}, and {_dtype_name(dtype)} is expected.", cure=FETCH)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def nibbles(words: Tensor, bits: int = 4) -> Tensor:
    """uint8 [..., n × 32 / bits] of int32 [..., n], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & (2**bits - 1)).to(torch.uint8).flatten(-2)


def _awq(stored: Mapping[str, Stored], quantization: dict[str, Any]) -> dict[str, Kept]:
    """AutoAWQ's gemm layout."""
    _, size = _bits(quantization, (4,))
    if str(quantization.get("version", "gemm")).lower() != "gemm":
        raise CheckpointError(f"AWQ version {quantization['version']!r} is not read.", cure="Use one of version gemm.")
    found = {}
    for stem in _stems(stored, ".qweight", (".qzeros", ".scales")):
        rows, width = stored[f"{stem}.qweight"].shape
        group, out = rows if size == -1 else size, width * 8
        count = -(-rows // group)
        _check(stored, f"{stem}.qweight", (rows, width), torch.int32)
        _check(stored, f"{stem}.qzeros", (count, width), torch.int32)
        _check(stored, f"{stem}.scales", (count, out))
        chosen = Int4(group_size=_fit(group), zero="int", scale_dtype=_dtype_name(stored[f"{stem}.scales"].dtype), clip=False)
        sources = tuple(f"{stem}.{part}" for part in ("qweight", "qzeros", "scales"))
        found[f"{stem}.weight"] = Kept(sources, (out, rows), chosen, _awq_taker(group, rows))
    return found


def _awq_taker(group: int, rows: int) -> Callable[[list[Tensor]], dict[str, Tensor]]:
    fit = _fit(group)

    def take(parts: list[Tensor]) -> dict[str, Tensor]:
        codes, zeros = (_awq_columns(nibbles(words)) for words in parts[:2])
        return _int4(codes.t(), parts[2].t(), zeros.t(), 1 if fit == group else -(-group // fit), rows, fit)

    return take


def _fit(group: int) -> int:
    """The group size that holds groups of `group`: one group a row is told as many equal ones."""
    return group if group in GROUP_SIZES else 128


def _awq_columns(codes: Tensor) -> Tensor:
    """Columns in their own order."""
    inverse = torch.tensor(AWQ_ORDER).argsort()
    return codes.unflatten(-1, (-1, 8))[..., inverse].flatten(-2)


def _int4(codes: Tensor, scale: Tensor, zero: Tensor | None, repeat: int, size: int, group: int) -> dict[str, Tensor]:
    """Stored tensors of codes [out, in], scale and zero [out, groups]; each group told `repeat` times, for those larger than any here."""

    def spread(t: Tensor) -> Tensor:
        return (t if repeat == 1 else t.repeat_interleave(repeat, 1)[:, : -(-size // group)]).contiguous()

    stored = {"weight": groups.pack(codes), "scale": spread(scale)}
    return stored if zero is None else stored | {"zero": spread(zero.to(torch.uint8))}


def _gptq(stored: Mapping[str, Stored], quantization: dict[str, Any]) -> dict[str, Kept]:
    """AutoGPTQ's layout; its first version stores zeros less one."""
    bits, size = _bits(quantization, (4, 8))
    bias = 0 if quantization.get("checkpoint_format") == "gptq_v2" else 1
    found = {}
    for stem in _stems(stored, ".qweight", (".qzeros", ".scales")):
        packed, out = stored[f"{stem}.qweight"].shape
        rows = packed * 32 // bits
        group = rows if size == -1 else size
        _check(stored, f"{stem}.qweight", (packed, out), torch.int32)
        _check(stored, f"{stem}.qzeros", (-(-rows // group), out * bits // 32), torch.int32)
        _check(stored, f"{stem}.scales", (-(-rows // group), out))
        ordered = bool(quantization.get("desc_act")) and f"{stem}.g_idx" in stored
        if ordered:
            _check(stored, f"{stem}.g_idx", (rows,), torch.int32)
        sources = tuple(f"{stem}.{part}" for part in ("qweight", "qzeros", "scales", *(("g_idx",) if f"{stem}.g_idx" in stored else ())))
        take = _gptq_taker(bits, bias, group, rows, ordered)
        found[f"{stem}.weight"] = Kept(sources, (out, rows), _gptq_format(bits, group, ordered, stored[f"{stem}.scales"].dtype), take)
    return found


def _gptq_format(bits: int, group: int, ordered: bool, dtype: torch.dtype) -> Format:
    if bits == 8:
        if ordered:
            raise CheckpointError("GPTQ of 8 bits with desc_act is not read.", cure="Build from the checkpoint it was made of.")
        return GroupedInt8(group_size=_fit(group), scale_dtype="float32", shifted=True)
    return Int4(group_size=_fit(group), zero="int", scale_dtype=_dtype_name(dtype), clip=False, reorder=ordered)


def _gptq_taker(bits: int, bias: int, group: int, rows: int, ordered: bool) -> Callable[[list[Tensor]], dict[str, Tensor]]:
    fit = _fit(group)
    repeat = 1 if fit == group else -(-group // fit)

    def take(parts: list[Tensor]) -> dict[str, Tensor]:
        codes = nibbles(parts[0].t().contiguous(), bits)  # [out, in]
        zero, scale = nibbles(parts[1], bits).t().int() + bias, parts[2].t()
        if bits == 8:
            wide = scale.float().repeat_interleave(repeat, 1)[:, : -(-rows // fit)].contiguous()
            offset = (128 - zero).float().repeat_interleave(repeat, 1)[:, : -(-rows // fit)] * wide
            return {"weight": (codes.int() - 128).to(torch.int8), "scale": wide, "offset": offset.contiguous()}
        if not ordered:
            return _int4(codes, scale, zero, repeat, rows, fit)
        order = parts[3].argsort(stable=True)
        return _int4(codes[:, order], scale, zero, repeat, rows, fit) | {"order": order.int()}

    return take


def _fp8(stored: Mapping[str, Stored], quantization: dict[str, Any]) -> dict[str, Kept]:
    """Hugging Face fp8: a factor a block (`weight_scale_inv`) or one a matrix (`weight_scale`, and `input_scale` when static)."""
    block = quantization.get("weight_block_size")
    if block is not None and not (isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
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
            _check(stored, scale, (-(-out // block[0]), -(-size // block[1])))
            chosen: Format = BlockFp8(rows=block[0], columns=block[1])
            found[name] = Kept((name, scale), (out, size), chosen, lambda parts: {"weight": parts[0], "scale": parts[1].float()})
        else:
            static = f"{name.removesuffix('.weight')}.input_scale"
            static_too = (static,) if static in stored and quantization.get("activation_scheme", "static") == "static" else ()
            found[name] = Kept((name, scale, *static_too), (out, size), _plain_fp8(bool(static_too)), _rows_taker(out))
    return found


def _plain_fp8(static: bool) -> Fp8:
    return Fp8(weights="tensor", activations="static" if static else "token")


def _rows_taker(out: int) -> Callable[[list[Tensor]], dict[str, Tensor]]:
    """weight, scale (one, or one a row), and perhaps an input scale."""

    def take(parts: list[Tensor]) -> dict[str, Tensor]:
        stored = {"weight": parts[0], "scale": parts[1].float().reshape(-1).expand(out).contiguous()}
        return stored if len(parts) == 2 else stored | {"input_scale": parts[2].float().reshape(1)}

    return take


def _compressed(stored: Mapping[str, Stored], quantization: dict[str, Any]) -> dict[str, Kept]:
    """compressed-tensors: pack-quantized int4, int-quantized int8, float-quantized e4m3; one group of settings."""
    listed = list((quantization.get("config_groups") or {}).values())
    if len(listed) != 1 or not isinstance(listed[0], dict):
        raise CheckpointError(f"quantization_config: {len(listed)} config_groups are not read.", cure="Use a checkpoint with one.")
    weights, inputs = listed[0].get("weights") or {}, listed[0].get("input_activations")
    bits, kind = weights.get("num_bits"), weights.get("type")
    if (bits, kind) == (4, "int") and not inputs:
        return _compressed_int4(stored, weights)
    if (bits, kind) not in ((8, "int"), (8, "float")) or weights.get("strategy") not in ("channel", "tensor"):
        raise CheckpointError(
            f"quantization_config: {bits}-bit {kind} weights by {weights.get('strategy')} are not read.", cure="Use another."
        )
    static = isinstance(inputs, dict) and not inputs.get("dynamic")
    if kind == "float":
        chosen: Format = Fp8(activations="none" if not inputs else "static" if static else "token")
    else:
        chosen = SmoothQuant(per_token=not static) if inputs else Int8()
    dtype, found = torch.float8_e4m3fn if kind == "float" else torch.int8, {}
    for stem in _stems(stored, ".weight_scale", (".weight", *((".input_scale",) if static else ()))):
        entry = stored[f"{stem}.weight"]
        _check(stored, f"{stem}.weight", entry.shape, dtype)
        if len(entry.shape) != 2 or math.prod(stored[f"{stem}.weight_scale"].shape) not in (1, entry.shape[0]):
            raise CheckpointError(f"{stem}.weight_scale does not fit {stem}.weight {list(entry.shape)}.", cure=FETCH)
        sources = (f"{stem}.weight", f"{stem}.weight_scale", *((f"{stem}.input_scale",) if static else ()))
        found[f"{stem}.weight"] = Kept(sources, (entry.shape[0], entry.shape[1]), chosen, _rows_taker(entry.shape[0]))
    return found


def _compressed_int4(stored: Mapping[str, Stored], weights: dict[str, Any]) -> dict[str, Kept]:
    size, found = weights.get("group_size") or -1, {}
    if size != -1 and size not in GROUP_SIZES:
        raise CheckpointError(
            f"quantization_config: groups of {size!r} are not read.", cure=f"Read are {', '.join(map(str, GROUP_SIZES))}."
        )
    for stem in _stems(stored, ".weight_packed", (".weight_scale",)):
        out, packed = stored[f"{stem}.weight_packed"].shape
        rows = packed * 8
        group = rows if size == -1 else size
        fit = _fit(group)
        zero = f"{stem}.weight_zero_point"
        asymmetric = not weights.get("symmetric", True) and zero in stored
        _check(stored, f"{stem}.weight_packed", (out, packed), torch.int32)
        _check(stored, f"{stem}.weight_scale", (out, -(-rows // group)))
        dtype = _dtype_name(stored[f"{stem}.weight_scale"].dtype)
        chosen = Int4(group_size=fit, zero="int" if asymmetric else "none", scale_dtype=dtype, clip=False)

        def take(
            parts: list[Tensor], group: int = group, fit: int = fit, rows: int = rows, asymmetric: bool = asymmetric
        ) -> dict[str, Tensor]:
            zeros = nibbles(parts[2].t().contiguous()).t() if asymmetric else None
            return _int4(nibbles(parts[0]), parts[1], zeros, 1 if fit == group else -(-group // fit), rows, fit)

        extra = (f"{stem}.weight_shape",) if f"{stem}.weight_shape" in stored else ()
        sources = (f"{stem}.weight_packed", f"{stem}.weight_scale", *((zero,) if asymmetric else ()), *extra)
        found[f"{stem}.weight"] = Kept(sources, (out, rows), chosen, take)
    return found


# One row per quant_method.
READERS = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed, "fp8": _fp8}
