"""The orthonormal Hadamard transform of blocks of features, within a tile.

Sylvester's matrix H_n of n = 2^k rows is [[H, H], [H, -H]] with H = H_{n/2}; H_n / √n is orthonormal and its own inverse. A product with it
takes n log2(n) additions (butterflies): log2(n) stages, each of which replaces pairs of columns by their sums and differences.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exchanged(pairs):
    """pairs [N, 2, M] (float32) with both elements of axis 1 exchanged.

    The integers cancel: what remains is one shuffle for each element that another thread holds, and nothing for the others.
    """
    bits = pairs.to(tl.int32, bitcast=True)
    return (tl.sum(bits, axis=1, keep_dims=True) - bits).to(tl.float32, bitcast=True)


@triton.jit
def butterflies(x, STRIDE: tl.constexpr):
    """One stage: columns i and i + STRIDE of x, where i // STRIDE is even, become their sum and their difference."""
    N: tl.constexpr = x.shape[0] * x.shape[1]
    pairs = tl.reshape(x, (N // (2 * STRIDE), 2, STRIDE))
    sign = (1 - 2 * tl.arange(0, 2)).to(tl.float32)[None, :, None]
    return tl.reshape(tl.fma(pairs, tl.broadcast_to(sign, pairs.shape), exchanged(pairs)), x.shape)


@triton.jit
def hadamard_blocks(x, SIZE: tl.constexpr):
    """x [n, D] in blocks of SIZE columns (a power of two that divides D), each multiplied by H_SIZE, without the factor 1 / √SIZE."""
    if SIZE == 1:
        return x
    else:
        return butterflies(hadamard_blocks(x, SIZE // 2), SIZE // 2)
