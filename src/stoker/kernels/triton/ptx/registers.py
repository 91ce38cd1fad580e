"""Shared by all modules of inline PTX: instruction lists, result types, and tuples of registers.

In these modules a tensor has one element per thread, so a tensor *is* one register of each thread, and a tuple of tensors is a group of
registers, such as the fragment of a matrix operand. What a lane holds follows from its own number.
"""

# ruff: noqa: RUF005 - Triton's language concatenates tuples with +; it does not unpack them.

from __future__ import annotations

import triton
import triton.language as tl


def ptx(*instructions: str) -> tl.constexpr:
    """The text of an inline assembly block, one instruction per line. `$0`, `$1`, … are its results, then its arguments."""
    return tl.constexpr("\n".join(instructions))


@triton.constexpr_function
def ptx_text(*instructions):
    """The text of an inline assembly block, one instruction per line, without the wrapper that `ptx` adds. For constexpr functions."""
    return "\n".join(instructions)


@triton.constexpr_function
def int32_registers(count):
    """Result types of an assembly block that returns `count` 32-bit registers with any content. Constexpr."""
    return (tl.int32,) * count


@triton.constexpr_function
def float32_registers(count):
    """Result types of an assembly block that returns `count` float32 registers. Constexpr."""
    return (tl.float32,) * count


@triton.jit
def repeat(value, COUNT: tl.constexpr):
    """A tuple with COUNT times `value`."""
    values = ()
    for _ in tl.static_range(COUNT):
        values = values + (value,)
    return values
