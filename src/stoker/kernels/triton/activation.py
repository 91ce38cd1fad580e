"""Activation functions, alone or gating a second projection, in float32.

    activate    out [..., size] = act(x [..., size])
    xielu       the same with an activation that has learned parameters
    gated       out [..., size] = act(x[..., :size]) × x[..., size:]          x [..., 2 × size]: gate and up projection of an MLP;
                                  or the gate of gpt-oss (`types.ClippedGate`)

Grid: rows × blocks of BLOCK results. Theoretical floor: one read and one write of each element at the speed of memory. Not measured by
itself: in a decode step linears apply their gate.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels.reference.activation import ACTIVATIONS
from stoker.kernels.triton.integers import cdiv
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait
from stoker.kernels.types import Gate

BLOCK = 1024  # eight elements per thread of four warps: one 16-byte access per operand in bfloat16


@triton.jit
def tanh(x):
    """tanh(x), computed with the logistic function. The absolute error is that of float32 arithmetic near 1."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def swish(x, ALPHA: tl.constexpr):
    """x × sigmoid(ALPHA × x), as the square of 1 / sqrt(1 + e⁻ˣ): six instructions. A division takes twice as many."""
    root = tl.rsqrt(1.0 + tl.exp2(x * (ALPHA * -1.4426950408889634)))
    return x * root * root


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """The activation function ACTIVATION applied to float32 x. Names are the keys of `reference.activation.ACTIVATIONS`."""
    if ACTIVATION == "silu":
        return swish(x, 1.0)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "gelu_quick":
        return x * tl.sigmoid(1.702 * x)
    elif ACTIVATION == "relu":
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        tl.static_assert(ACTIVATION == "relu2")
        positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return positive * positive


@triton.constexpr_function
def _is_clipped(gate):
    """Whether `gate` is a ClippedGate, which has become a plain tuple of constants or kept its type."""
    return not isinstance(gate, str)


@triton.jit
def gated_value(gate, up, GATE: tl.constexpr):
    """act(gate) × up of float32 values, or the gate of gpt-oss. GATE: `types.Gate`."""
    if _is_clipped(GATE):
        LIMIT: tl.constexpr = GATE.limit
        ALPHA: tl.constexpr = GATE.alpha
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL), LIMIT, propagate_nan=tl.PropagateNan.ALL)
        return (up + 1.0) * swish(gate, ALPHA)
    else:
        return activated(gate, GATE) * up


@triton.jit
def activation_kernel(
    x_ptr,  # [rows, SIZE], or [rows, 2 × SIZE] with GATED: gates, then the values that they multiply
    out_ptr,  # [rows, SIZE]
    SIZE: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,  # with GATED `types.Gate`
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One CTA: BLOCK results of one row. With GATED, x has 2 × SIZE columns, the gate before the values that it multiplies."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < SIZE
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    source = x_ptr + row * (2 * SIZE if GATED else SIZE) + cols
    result = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        result = gated_value(result, tl.load(source + SIZE, mask=inside, other=0.0).to(tl.float32), ACTIVATION)
    else:
        result = activated(result, ACTIVATION)
    tl.store(out_ptr + row * SIZE + cols, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def xielu_kernel(
    x_ptr,  # [count]
    parameters_ptr,  # float32 [4]: alpha_p, alpha_n, beta, eps
    out_ptr,  # [count]
    count,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One CTA: BLOCK results of xIELU (`ops.xielu`)."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    alpha_p = tl.load(parameters_ptr)
    alpha_n = tl.load(parameters_ptr + 1)
    beta = tl.load(parameters_ptr + 2)
    eps = tl.load(parameters_ptr + 3)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    x = tl.load(x_ptr + index, mask=index < count, other=0.0).to(tl.float32)
    low = tl.minimum(x, eps)
    # exp(low) - 1 by its series near 0, where the difference would lose most digits.
    series = low * (1.0 + low * (0.5 + low * (0.16666667 + low * 0.041666668)))
    expm1 = tl.where(low > -0.03, series, tl.exp(low) - 1.0)
    result = tl.where(x > 0.0, alpha_p * x * x, alpha_n * (expm1 - x)) + beta * x
    tl.store(out_ptr + index, result.to(out_ptr.dtype.element_ty), mask=index < count)


def xielu(x: Tensor, parameters: Tensor) -> Tensor:
    """xIELU with learned parameters (`ops.xielu`)."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if count := out.numel():
        xielu_kernel[(cdiv(count, BLOCK),)](x, parameters, out, count, BLOCK=BLOCK, num_warps=4, **pdl_launch_options(x))
    return out


def activate(x: Tensor, activation: str) -> Tensor:
    """The activation function applied to each element of x (`ops.activate`). Raises ValueError for an unknown name."""
    return _launch(x, x.shape[-1], False, activation)


def gated(gate_up: Tensor, gate: Gate) -> Tensor:
    """act(gate) × up, of the two halves of gate_up (`ops.gated`). Raises ValueError for an unknown activation."""
    return _launch(gate_up, gate_up.shape[-1] // 2, True, gate)


def _launch(x: Tensor, size: int, is_gated: bool, activation: Gate) -> Tensor:
    """Launch the kernel over all rows of x and return [..., size] in x's dtype."""
    if isinstance(activation, str) and activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is none of {', '.join(ACTIVATIONS)}")
    x = x.contiguous()
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
    if out.numel():
        grid = (out.numel() // size, cdiv(size, BLOCK))
        activation_kernel[grid](x, out, SIZE=size, GATED=is_gated, ACTIVATION=activation, BLOCK=BLOCK, num_warps=4, **pdl_launch_options(x))
    return out
