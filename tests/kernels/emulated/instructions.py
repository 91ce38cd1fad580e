"""What each instruction does: a function of the CTA and of its active threads (None: all)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

from emulated import arithmetic
from emulated.arithmetic import COMPARES, PLAIN, TYPES, Values
from emulated.operands import Mask, Read, Step, read, write
from emulated.parse import Instruction, Operand
from emulated.products import warp_products, warpgroup_products
from emulated.transfers import barriers, copies, exchange, matrices, memory

if TYPE_CHECKING:
    from emulated.program import Program

NOTHING = {"createpolicy", "prefetch", "nanosleep"}
MODIFIERS = {"rn", "ftz", "lo", "wide", "approx", "full", "NaN"}  # of arithmetic; flushed and approximate results are exact here
OTHER_ROUNDING = {"rz", "rm", "rp", "rna", "sat", "relu"}  # of conversions; only nearest even and the nearest integer are implemented


def step(one: Instruction) -> Step:
    """Raises NotImplementedError for an instruction that no kernel has used yet."""
    parts = one.name.split(".")
    if parts[0] in NOTHING:
        return lambda program, mask: None
    for known in (
        memory,
        copies,
        barriers,
        exchange,
        matrices,
        warp_products,
        warpgroup_products,
        _fence,
        _dependent_launch,
        _moves,
        _conversion,
        _special,
        _plain,
    ):
        made = known(one, parts)
        if made is not None:
            return made
    raise NotImplementedError(one.text)


def _fence(one: Instruction, parts: list[str]) -> Step | None:
    """Proxy fences. Fences between CTAs are not implemented: all kernels use atomics with release and acquire."""
    if parts[0] != "fence" or parts[1:3] != ["proxy", "async"]:
        return None
    spaces = {space.partition("::")[0] for space in parts[3:]} or {"global", "shared"}
    return lambda program, mask: program.proxy_fence(spaces, mask)


def _dependent_launch(one: Instruction, parts: list[str]) -> Step | None:
    if one.name == "griddepcontrol.wait":
        return lambda program, mask: program.clock.wait_for_predecessor(mask)
    if one.name == "griddepcontrol.launch_dependents":
        return lambda program, mask: setattr(program.clock, "has_triggered", True)
    return None


def elementwise(to: Operand, sources: Iterable[Read], formula: Callable[..., Values]) -> Step:
    given = tuple(sources)

    def run(program: Program, mask: Mask) -> None:
        write(program, to, formula(*(source(program) for source in given)), mask)

    return run


def _plain(one: Instruction, parts: list[str]) -> Step | None:
    formula, kind = PLAIN.get(parts[0]), parts[-1]
    if formula is None or kind not in TYPES or not MODIFIERS.issuperset(parts[1:-1]):
        return None
    to, *sources = one.operands
    if kind in ("bf16x2", "f16x2", "bf16"):
        return _of_halves(one, formula, kind)
    if "wide" in parts:
        wide = {"s32": np.int64, "u32": np.uint64, "s16": np.int32, "u16": np.uint32}[kind]
        kinds = [kind, kind, {"s32": "s64", "u32": "u64", "s16": "s32", "u16": "u32"}[kind]][: len(sources)]
        return elementwise(to, map(read, sources, kinds), lambda *given: formula(*(v.astype(wide) for v in given)))
    if parts[0] in ("shl", "shr"):
        return elementwise(to, (read(sources[0], kind), read(sources[1], "u32")), formula)
    if "NaN" in parts:
        exact = {"min": np.minimum, "max": np.maximum}[parts[0]]
        return elementwise(to, (read(s, kind) for s in sources), exact)
    return elementwise(to, (read(s, kind) for s in sources), formula)


def _of_halves(one: Instruction, formula: Callable[..., Values], kind: str) -> Step:
    """Arithmetic on 16-bit numbers, each result rounded once."""
    narrow = torch.float16 if kind == "f16x2" else torch.bfloat16

    def apply(*words: Values) -> Values:
        pairs = [arithmetic.widened_halves(word, narrow).astype(np.float64) for word in words]
        low, high = (formula(*(pair[i] for pair in pairs)).astype(np.float32) for i in range(2))
        return arithmetic.halves(low, high, narrow)

    return elementwise(one.operands[0], (read(s, "b32") for s in one.operands[1:]), apply)


def _moves(one: Instruction, parts: list[str]) -> Step | None:
    """mov of several registers, selp, setp."""
    to, *sources = one.operands
    if parts[0] == "selp":
        chosen = [read(source, parts[1]) for source in sources[:2]] + [read(sources[2], "pred")]
        return elementwise(to, chosen, lambda a, b, which: np.where(which, a, b))
    if parts[0] == "setp":
        compare = COMPARES[parts[1]]
        if len(sources) == 3:  # setp.lt.and.s32 p, a, b, q
            join = PLAIN[parts[2]]
            given = [read(sources[0], parts[-1]), read(sources[1], parts[-1]), read(sources[2], "pred")]
            return elementwise(to, given, lambda a, b, other: join(np.atleast_1d(compare(a, b)), other))
        return elementwise(to, (read(s, parts[-1]) for s in sources), lambda a, b: np.atleast_1d(compare(a, b)))
    if parts[0] != "mov":
        return None
    if isinstance(to, tuple):  # the lowest part first
        whole, count = read(sources[0], parts[1]), len(to)

        def split(program: Program, mask: Mask) -> None:
            value = np.broadcast_to(whole(program), program.num_threads)
            size = value.dtype.itemsize // count
            for part, values in zip(to, np.ascontiguousarray(value).view(f"u{size}").reshape(-1, count).T, strict=True):
                write(program, part, values, mask)

        return split
    if isinstance(sources[0], tuple):
        size = np.dtype(TYPES[parts[1]]).itemsize // len(sources[0])
        given = [read(part, f"b{8 * size}") for part in sources[0]]

        def join_parts(program: Program, mask: Mask) -> None:
            columns = np.stack([np.broadcast_to(part(program), program.num_threads) for part in given], 1)
            write(program, to, np.ascontiguousarray(columns).view(TYPES[parts[1]]).ravel(), mask)

        return join_parts
    return None


def _conversion(one: Instruction, parts: list[str]) -> Step | None:
    if parts[0] != "cvt" or OTHER_ROUNDING.intersection(parts):
        return None
    to, *sources = one.operands
    into, source = parts[-2], parts[-1]
    half = {"f16x2": torch.float16, "bf16x2": torch.bfloat16, "f16": torch.float16, "bf16": torch.bfloat16}
    if into == "e4m3x2":  # the upper one is named first
        return elementwise(to, (read(s, "f32") for s in sources), lambda high, low: arithmetic.codes(low, high))
    if source == "e4m3x2":
        return elementwise(to, [read(sources[0], "b16")], lambda word: arithmetic.halves(*arithmetic.decoded(word), torch.float16))
    if into in ("f16x2", "bf16x2"):
        return elementwise(to, (read(s, "f32") for s in sources), lambda high, low: arithmetic.halves(low, high, half[into]))
    if source == "bf16" and into == "f32":
        return elementwise(to, [read(sources[0], "b16")], lambda bits: (bits.astype(np.uint32) << np.uint32(16)).view(np.float32))
    if into in half and source == "f32":
        return elementwise(to, [read(sources[0], "f32")], lambda value: arithmetic.narrowed(value, half[into]))
    if TYPES[source]().dtype.kind == "f" and TYPES[into]().dtype.kind != "f":
        modes = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
        rounding = next(modes[part] for part in parts if part in modes)
        info = np.iinfo(TYPES[into])
        cut = lambda v: np.clip(np.nan_to_num(rounding(v.astype(np.float64))), info.min, info.max).astype(TYPES[into])  # noqa: E731
        return elementwise(to, [read(sources[0], source)], cut)
    return elementwise(to, [read(sources[0], source)], lambda value: value.astype(TYPES[into]))


def _special(one: Instruction, parts: list[str]) -> Step | None:
    to, *sources = one.operands if one.operands else ("_",)
    if parts[0] == "prmt":
        return elementwise(to, (read(s, "b32") for s in sources), arithmetic.permuted)
    if parts[0] == "lop3":
        table = sources[3]
        assert isinstance(table, int)
        return elementwise(to, (read(s, "b32") for s in sources[:3]), lambda a, b, c: arithmetic.looked_up(a, b, c, table))
    if one.name in ("mul.hi.s32", "mul.hi.u32"):
        wide = np.int64 if parts[-1] == "s32" else np.uint64
        return elementwise(to, (read(s, parts[-1]) for s in sources), lambda a, b: a.astype(wide) * b.astype(wide) >> wide(32))
    if parts[0] == "bfe":
        formula = arithmetic.bits_of_field if parts[1] == "u32" else arithmetic.signed_field
        return elementwise(to, (read(s, "u32") for s in sources), formula)
    if parts[0] == "popc":
        return elementwise(to, (read(s, "u32") for s in sources), lambda a: np.bitwise_count(a).astype(np.uint32))
    return None
