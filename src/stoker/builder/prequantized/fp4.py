"""FP4 values (e2m1) and their scales that are powers of two (e8m0), as NVFP4 and MXFP4 store them."""

from __future__ import annotations

import torch
from torch import Tensor

# The values of FP4 e2m1 by their four bits (OCP Microscaling Formats 1.0, table 5).
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E8M0 = (torch.uint8, torch.float8_e8m0fnu)  # dtypes in which scales that are powers of two are stored


def unpack_nibbles(stored: Tensor) -> Tensor:
    """uint8 [..., 2 × n] from bytes [..., n]: the low four bits of a byte come first."""
    return torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2)


def doubled_fp4(nibbles: Tensor) -> Tensor:
    """int8: twice the value of each four-bit pattern, which is a whole number within ± 12."""
    return torch.tensor([int(2 * value) for value in FP4_VALUES], dtype=torch.int8)[nibbles.long()]


def e8m0_values(scales: Tensor) -> Tensor:
    """float32: 2 ** (s - 127) for the bytes s of `scales`; NaN for 255."""
    exponent = scales.view(torch.uint8).to(torch.int32)
    values = torch.ldexp(torch.ones(scales.shape), exponent - 127)
    return values.masked_fill(exponent == 255, torch.nan)
