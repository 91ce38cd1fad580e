"""Maps each PTX instruction to a `Step`: a function of the CTA and of the mask of active threads (None: all)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

from emulated import arithmetic
from emulated.arithmetic import ARITHMETIC, COMPARES, TYPES, Values
from emulated.mbarriers import mbarriers
from emulated.operands import Mask, Read, Step, read, write
from emulated.parse import Instruction, Operand
from emulated.products import warp_products, warpgroup_products
from emulated.tensor_copies import tensor_copies
from emulated.transfers import async_copies, matrix_loads_and_stores, memory, warp_shuffles

if TYPE_CHECKING:
    from emulated.program import Program

WITHOUT_EFFECT = {"createpolicy", "prefetch", "nanosleep", "setmaxnreg"}
ARITHMETIC_MODIFIERS = {
    "rn",
    "ftz",
    "lo",
    "wide",
    "approx",
    "full",
    "NaN",
    "relu",
}  # approximate results are exact here; none is flushed
UNSUPPORTED_ROUNDING = {"rz", "rm", "rp", "rna", "sat", "relu"}  # of conversions; only nearest even and the nearest integer are implemented


def step_of(instruction: Instruction) -> Step:
    """The step that runs an instruction. Raises NotImplementedError for one that the emulator does not support."""
    parts = instruction.name.split(".")
    if parts[0] in WITHOUT_EFFECT:
        return lambda program, mask: None
    for kind in (
        memory,
        tensor_copies,
        async_copies,
        mbarriers,
        warp_shuffles,
        matrix_loads_and_stores,
        warp_products,
        warpgroup_products,
        _fence,
        _dependent_launch,
        _moves_and_selects,
        _conversion,
        _bit_operations,
        _arithmetic,
    ):
        step = kind(instruction, parts)
        if step is not None:
            return step
    raise NotImplementedError(instruction.text)


def _fence(instruction: Instruction, parts: list[str]) -> Step | None:
    """Proxy fences. Fences between CTAs are not implemented: all kernels use atomics with release and acquire."""
    if parts[0] != "fence" or parts[1:3] != ["proxy", "async"]:
        return None
    spaces = {space.partition("::")[0] for space in parts[3:]} or {"global", "shared"}
    return lambda program, mask: program.proxy_fence(spaces, mask)


def _dependent_launch(instruction: Instruction, parts: list[str]) -> Step | None:
    """griddepcontrol."""
    if instruction.name == "griddepcontrol.wait":
        return lambda program, mask: program.clock.wait_for_predecessor(mask)
    if instruction.name == "griddepcontrol.launch_dependents":
        return lambda program, mask: setattr(program.clock, "has_triggered", True)
    return None


def elementwise(target: Operand, sources: Iterable[Read], formula: Callable[..., Values]) -> Step:
    """The step that writes `formula` of the sources' values to `target`."""
    inputs = tuple(sources)

    def run(program: Program, mask: Mask) -> None:
        write(program, target, formula(*(source(program) for source in inputs)), mask)

    return run


def _arithmetic(instruction: Instruction, parts: list[str]) -> Step | None:
    """An operation of `ARITHMETIC` on one type."""
    formula, kind = ARITHMETIC.get(parts[0]), parts[-1]
    if formula is None or kind not in TYPES or not ARITHMETIC_MODIFIERS.issuperset(parts[1:-1]):
        return None
    target, *sources = instruction.operands
    if kind in ("bf16x2", "f16x2", "bf16"):
        return _packed_arithmetic(instruction, formula, kind)
    if "wide" in parts:
        wide = {"s32": np.int64, "u32": np.uint64, "s16": np.int32, "u16": np.uint32}[kind]
        kinds = [kind, kind, {"s32": "s64", "u32": "u64", "s16": "s32", "u16": "u32"}[kind]][: len(sources)]
        return elementwise(target, map(read, sources, kinds), lambda *values: formula(*(v.astype(wide) for v in values)))
    if parts[0] in ("shl", "shr"):
        return elementwise(target, (read(sources[0], kind), read(sources[1], "u32")), formula)
    if "relu" in parts:
        return elementwise(target, (read(s, kind) for s in sources), lambda *values: np.maximum(formula(*values), 0))
    if "NaN" in parts:
        exact = {"min": np.minimum, "max": np.maximum}[parts[0]]
        return elementwise(target, (read(s, kind) for s in sources), exact)
    return elementwise(target, (read(s, kind) for s in sources), formula)


def _packed_arithmetic(instruction: Instruction, formula: Callable[..., Values], kind: str) -> Step:
    """Arithmetic on one or two 16-bit floats per register. Each result is computed in float64 and rounded once."""
    narrow = torch.float16 if kind == "f16x2" else torch.bfloat16

    def apply(*words: Values) -> Values:
        pairs = [arithmetic.unpack_16bit(word, narrow).astype(np.float64) for word in words]
        low, high = (formula(*(pair[i] for pair in pairs)).astype(np.float32) for i in range(2))
        return arithmetic.pack_16bit(low, high, narrow)

    return elementwise(instruction.operands[0], (read(s, "b32") for s in instruction.operands[1:]), apply)


def _moves_and_selects(instruction: Instruction, parts: list[str]) -> Step | None:
    """selp, setp, cvta, and mov between one wide register and several narrow ones."""
    target, *sources = instruction.operands
    if parts[0] == "cvta":
        return elementwise(target, [read(sources[0], "u64")], lambda address: address)
    if parts[0] == "selp":
        inputs = [read(source, parts[1]) for source in sources[:2]] + [read(sources[2], "pred")]
        return elementwise(target, inputs, lambda a, b, which: np.where(which, a, b))
    if parts[0] == "setp":
        compare = COMPARES[parts[1]]
        if len(sources) == 3:  # setp.lt.and.s32 p, a, b, q
            join = ARITHMETIC[parts[2]]
            inputs = [read(sources[0], parts[-1]), read(sources[1], parts[-1]), read(sources[2], "pred")]
            return elementwise(target, inputs, lambda a, b, other: join(np.atleast_1d(compare(a, b)), other))
        return elementwise(target, (read(s, parts[-1]) for s in sources), lambda a, b: np.atleast_1d(compare(a, b)))
    if parts[0] != "mov":
        return None
    if isinstance(target, tuple):  # the lowest part first
        whole, count = read(sources[0], parts[1]), len(target)

        def split(program: Program, mask: Mask) -> None:
            value = np.broadcast_to(whole(program), program.num_threads)
            size = value.dtype.itemsize // count
            for part, values in zip(target, np.ascontiguousarray(value).view(f"u{size}").reshape(-1, count).T, strict=True):
                write(program, part, values, mask)

        return split
    if isinstance(sources[0], tuple):
        size = np.dtype(TYPES[parts[1]]).itemsize // len(sources[0])
        registers = [read(part, f"b{8 * size}") for part in sources[0]]

        def join_parts(program: Program, mask: Mask) -> None:
            columns = np.stack([np.broadcast_to(part(program), program.num_threads) for part in registers], 1)
            write(program, target, np.ascontiguousarray(columns).view(TYPES[parts[1]]).ravel(), mask)

        return join_parts
    return None


def _conversion(instruction: Instruction, parts: list[str]) -> Step | None:
    """cvt. Results are rounded to the nearest even float, or to an integer as the name states."""
    if parts[0] != "cvt" or UNSUPPORTED_ROUNDING.intersection(parts):
        return None
    target, *sources = instruction.operands
    into, source = parts[-2], parts[-1]
    half = {"f16x2": torch.float16, "bf16x2": torch.bfloat16, "f16": torch.float16, "bf16": torch.bfloat16}
    if into == "e4m3x2":  # the upper one is named first
        return elementwise(target, (read(s, "f32") for s in sources), lambda high, low: arithmetic.pack_e4m3(low, high))
    if source == "e4m3x2":
        return elementwise(
            target, [read(sources[0], "b16")], lambda word: arithmetic.pack_16bit(*arithmetic.unpack_e4m3(word), torch.float16)
        )
    if into in ("f16x2", "bf16x2"):
        return elementwise(target, (read(s, "f32") for s in sources), lambda high, low: arithmetic.pack_16bit(low, high, half[into]))
    if source == "bf16" and into == "f32":
        return elementwise(target, [read(sources[0], "b16")], lambda bits: (bits.astype(np.uint32) << np.uint32(16)).view(np.float32))
    if into in half and source == "f32":
        return elementwise(target, [read(sources[0], "f32")], lambda value: arithmetic.round_to_16bit(value, half[into]))
    if into in half and TYPES[source]().dtype.kind in "iu":
        to_half = lambda value: arithmetic.round_to_16bit(arithmetic.integer_to_float32(value), half[into])  # noqa: E731
        return elementwise(target, [read(sources[0], source)], to_half)
    if TYPES[source]().dtype.kind == "f" and TYPES[into]().dtype.kind != "f":
        modes = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
        rounding = next(modes[part] for part in parts if part in modes)
        info = np.iinfo(TYPES[into])
        cut = lambda v: np.clip(np.nan_to_num(rounding(v.astype(np.float64))), info.min, info.max).astype(TYPES[into])  # noqa: E731
        return elementwise(target, [read(sources[0], source)], cut)
    return elementwise(target, [read(sources[0], source)], lambda value: value.astype(TYPES[into]))


def _bit_operations(instruction: Instruction, parts: list[str]) -> Step | None:
    """prmt, lop3, mul.hi, bfe, bfi, popc."""
    target, *sources = instruction.operands if instruction.operands else ("_",)
    if parts[0] == "prmt":
        return elementwise(target, (read(s, "b32") for s in sources), arithmetic.permute_bytes)
    if parts[0] == "lop3":
        table = sources[3]
        assert isinstance(table, int)
        return elementwise(target, (read(s, "b32") for s in sources[:3]), lambda a, b, c: arithmetic.apply_logic_table(a, b, c, table))
    if instruction.name in ("mul.hi.s32", "mul.hi.u32"):
        wide = np.int64 if parts[-1] == "s32" else np.uint64
        return elementwise(target, (read(s, parts[-1]) for s in sources), lambda a, b: a.astype(wide) * b.astype(wide) >> wide(32))
    if parts[0] == "bfe":
        formula = arithmetic.unsigned_bit_field if parts[1] == "u32" else arithmetic.signed_bit_field
        return elementwise(target, (read(s, "u32") for s in sources), formula)
    if instruction.name == "mul.hi.u16":
        return elementwise(target, (read(s, "u16") for s in sources), lambda a, b: (a.astype(np.uint32) * b >> 16).astype(np.uint16))
    if instruction.name == "bfi.b32":
        place, width = sources[2:]
        assert isinstance(place, int) and isinstance(width, int)
        bits = np.uint32(((1 << width) - 1) << place)
        insert = lambda field, into: into & ~bits | field << np.uint32(place) & bits  # noqa: E731
        return elementwise(target, (read(s, "u32") for s in sources[:2]), insert)
    if parts[0] == "popc":
        return elementwise(target, (read(s, "u32") for s in sources), lambda a: np.bitwise_count(a).astype(np.uint32))
    return None
