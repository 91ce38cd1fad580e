"""Choosing tokens on the GPU without a sort: a partial argmax over the vocabulary, then one program a row.

Top-k and top-p thresholds are found by bisection over the bits of the order-preserving integer image of the logits: 32 counts over
a row that stays in L2, exact, with no scratch memory. The draw inverts the cumulative distribution in vocabulary order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait
from stoker.kernels.types import DrawParams

_CHUNK = 8192  # vocabulary entries of a partial program
_BLOCK = 4096  # entries a loop iteration of the draw reads


def sample(logits: Tensor, params: DrawParams) -> Tensor:
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows == 0:
        return out
    chunks = triton.cdiv(vocab, _CHUNK)
    best = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    where = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    _partial_argmax[(rows, chunks)](
        logits, best, where, vocab, logits.stride(0), chunks, CHUNK=_CHUNK, num_warps=8, **pdl_launch_options(logits)
    )
    _draw[(rows,)](
        logits, best, where, out, params.temperature, params.top_k, params.top_p, params.min_p, params.seeds, params.counters,
        vocab, logits.stride(0), chunks,
        CHUNKS=triton.next_power_of_2(chunks), BLOCK=_BLOCK, GREEDY=params.all_greedy, num_warps=8, **pdl_launch_options(logits),
    )  # fmt: skip
    return out


def logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    wide = logits.float()
    total = torch.logsumexp(wide, dim=-1)
    chosen = wide.gather(1, token_ids.long().unsqueeze(1)).squeeze(1) - total
    best, ids = torch.topk(wide, num_top, dim=-1)
    return chosen, best - total[:, None], ids.to(torch.int32)


@triton.jit
def _partial_argmax(logits, best, where, vocab, stride, chunks, CHUNK: tl.constexpr, USE_PDL: tl.constexpr):
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    # A NaN must win, so that the row is seen to be broken.
    x = tl.where(x != x, float("inf"), x)
    broken = tl.max((x == float("inf")).to(tl.int32), 0)
    value, index = tl.max(x, 0, return_indices=True)
    tl.store(best + row * chunks + chunk, tl.where(broken > 0, float("nan"), value))
    tl.store(where + row * chunks + chunk, chunk * CHUNK + index)


@triton.jit
def _key(x):
    """The order-preserving image of float32 in uint32."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _uniform(seed, counter):
    """24 bits of SplitMix64 of (seed, counter), as a float32 in [0, 1)."""
    z = seed.to(tl.uint64, bitcast=True) + (counter.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return (z >> 40).to(tl.float32) * (2.0**-24)


@triton.jit
def _count_above(base, vocab, scale, threshold, BLOCK: tl.constexpr):
    """How many scaled logits have a key of at least `threshold`."""
    count = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(base + at, mask=at < vocab, other=float("-inf")).to(tl.float32) * scale
        count += ((at < vocab) & (_key(x) >= threshold)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def _mass_above(base, vocab, scale, peak, threshold, BLOCK: tl.constexpr):
    """The sum of exp(x - peak) over scaled logits whose key is at least `threshold`."""
    mass = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(base + at, mask=at < vocab, other=float("-inf")).to(tl.float32) * scale
        mass += tl.where((at < vocab) & (_key(x) >= threshold), tl.exp(x - peak), 0.0)
    return tl.sum(mass, 0)


@triton.jit
def _draw(
    logits, best, where, out, temperatures, top_ks, top_ps, min_ps, seeds, counters, vocab, stride, chunks,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, GREEDY: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, CHUNKS)
    partial = tl.load(best + row * chunks + lane, mask=lane < chunks, other=float("-inf"))
    broken = tl.max((partial != partial).to(tl.int32), 0)
    ids = tl.load(where + row * chunks + lane, mask=lane < chunks, other=0)
    top = tl.max(partial, 0)
    broken = tl.where(top == float("-inf"), 1, broken)  # every token is banned
    chosen = tl.min(tl.where(partial == top, ids, 2147483647), 0)
    if GREEDY:
        tl.store(out + row, tl.where(broken > 0, -1, chosen))
    else:
        temperature = tl.load(temperatures + row)
        if (temperature > 0) & (broken == 0):
            chosen = _draw_row(
                logits + row * stride, vocab, top, temperature, tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row),
                _uniform(tl.load(seeds + row), tl.load(counters + row)), chosen, BLOCK,
            )  # fmt: skip
        tl.store(out + row, tl.where(broken > 0, -1, chosen))


@triton.jit
def _draw_row(base, vocab, top, temperature, top_k, top_p, min_p, uniform, fallback, BLOCK: tl.constexpr):
    scale = 1.0 / tl.maximum(temperature, 1e-6)
    peak = top * scale
    # 1e-38 is no normal float32, so that Triton takes the literal, and all that it touches, for float64.
    threshold = _key(peak + tl.log(tl.maximum(min_p, 1e-37)))
    if min_p <= 0:
        threshold = tl.zeros_like(threshold)
    if (top_k > 0) & (top_k < vocab):
        kth = tl.zeros_like(threshold)
        for bit in range(31, -1, -1):
            trial = kth | (tl.full((), 1, tl.uint32) << bit)
            if _count_above(base, vocab, scale, trial, BLOCK) >= top_k:
                kth = trial
        nucleus = kth
    else:
        nucleus = tl.zeros_like(threshold)
    if top_p < 1.0:
        # The largest threshold whose tokens still reach p of what top-k keeps.
        wanted = top_p * _mass_above(base, vocab, scale, peak, nucleus, BLOCK)
        pth = tl.zeros_like(threshold)
        for bit in range(31, -1, -1):
            trial = pth | (tl.full((), 1, tl.uint32) << bit)
            if _mass_above(base, vocab, scale, peak, trial, BLOCK) >= wanted:
                pth = trial
        nucleus = tl.maximum(nucleus, pth)
    threshold = tl.maximum(threshold, nucleus)
    target = uniform * _mass_above(base, vocab, scale, peak, threshold, BLOCK)
    # The first kept token whose cumulative mass passes the target.
    chosen = fallback
    passed = 0.0
    found = 0
    for start in range(0, vocab, BLOCK):
        if found == 0:
            at = start + tl.arange(0, BLOCK)
            x = tl.load(base + at, mask=at < vocab, other=float("-inf")).to(tl.float32) * scale
            mass = tl.where((at < vocab) & (_key(x) >= threshold), tl.exp(x - peak), 0.0)
            running = passed + tl.cumsum(mass, 0)
            first = tl.min(tl.where((running > target) & (mass > 0), at, 2147483647), 0)
            if first < 2147483647:
                chosen = first
                found = 1
            passed += tl.sum(mass, 0)
    return chosen
