"""The router of a mixture of experts for up to 64 tokens: norm and logits, and for few scores also choice and sort, in one launch.

    y = norm(x), logits = y × routerᵀ + bias, then the choice and the order of `routing_kernels`

    x, y [tokens, SIZE]; router float32 [experts, SIZE]; logits float32 [tokens, experts]

Grid: (experts ÷ EXPERTS, tokens ÷ TOKENS). A CTA computes the logits of EXPERTS experts and TOKENS tokens over all features. It
normalizes the tokens again, because that takes less time than a launch. y is rounded to its dtype before the product, as a separate norm
rounds it. The CTA that finishes last chooses the experts of all tokens and sorts the choices. One expert per CTA:

    CTA 0        router row 0 | wait | x, norm -> y of token 0 | logits [tokens, 0] | count
    CTA 1        router row 1 | wait | x, norm -> y of token 1 | logits [tokens, 1] | count
    ...
    CTA E - 1    router row E - 1 ...                          | logits             | count is E - 1: choose, sort

What does not depend on earlier kernels (the router, the norm's weight) is loaded before the wait, while the kernel before still runs.

Theoretical floor: the bytes of the router at the speed of memory, 0.08 µs for gpt-oss-20b; it takes as long as a launch and three
dependent accesses to memory. Measured on an H200 in whole steps (benchmarks/results/h200_moe.json), it saves 8 µs per layer of gpt-oss-20b
with 8 tokens and 16 with 64, compared with separate launches; of Qwen3-30B-A3B 4 and 9.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.moe.routing_kernels import store_choices
from stoker.kernels.triton.norm import load_parameters, normalize
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_wait


@triton.jit(do_not_specialize=["tokens"])
def router_kernel(
    # Pointers
    x_ptr,  # [tokens, SIZE]
    norm_weight_ptr,  # [SIZE] or None
    norm_bias_ptr,  # [SIZE] or None
    y_ptr,  # [tokens, SIZE]; None: no norm
    router_ptr,  # float32 [experts, SIZE]
    bias_ptr,  # float32 [experts] or None
    logits_ptr,  # float32 [tokens, experts]
    finished_ptr,  # int32 [1]: CTAs that have stored their logits; zero between launches
    correction_ptr,  # see `choose_experts_kernel`
    weights_ptr,
    order_ptr,
    offsets_ptr,
    experts_ptr,
    # Numbers
    tokens,
    eps,  # of the norm
    scale,
    jitter,
    # Constants
    SIZE: tl.constexpr,
    RMS: tl.constexpr,  # the norm; False: layer norm
    TOKENS: tl.constexpr,  # of a CTA
    EXPERTS: tl.constexpr,  # of a CTA
    CHOOSING: tl.constexpr,  # at least all tokens, so that the scores of a token are in one warp; 0: experts are not chosen here
    BLOCK: tl.constexpr,  # SIZE, rounded up to a power of two
    OPTIONS: tl.constexpr,  # RoutingOptions
    USE_PDL: tl.constexpr,
):
    """One CTA: the logits of EXPERTS experts and TOKENS tokens. The last CTA chooses the experts of all tokens."""
    NUM_EXPERTS: tl.constexpr = OPTIONS.num_experts
    first = tl.program_id(0) * EXPERTS
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    cols = tl.arange(0, BLOCK)[None, :]
    inside = cols < SIZE
    routers = ()
    biases = ()
    for i in tl.static_range(EXPERTS):
        expert = tl.minimum(first + i, NUM_EXPERTS - 1)
        routers += (tl.load(router_ptr + expert * SIZE + cols, mask=inside, other=0.0, volatile=True),)  # [1, BLOCK]
        if bias_ptr is not None:
            biases += (tl.load(bias_ptr + expert, volatile=True),)
    norm_weight = load_parameters(norm_weight_ptr, cols, SIZE, 1.0, True)
    norm_bias = load_parameters(norm_bias_ptr, cols, SIZE, 0.0, True)
    row = tl.minimum(token, tokens - 1)[:, None] * SIZE  # [TOKENS, 1]
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    x = tl.load(x_ptr + row + cols, mask=inside, other=0.0).to(tl.float32)  # [TOKENS, BLOCK]
    if y_ptr is not None:
        y = normalize(x, inside, norm_weight, norm_bias, eps, SIZE, RMS).to(y_ptr.dtype.element_ty)
        is_stored = (token % tl.num_programs(0) == tl.program_id(0)) & (token < tokens)
        tl.store(y_ptr + row + cols, y, mask=is_stored[:, None] & inside)
        x = y.to(tl.float32)
    for i in tl.static_range(EXPERTS):
        logits = tl.sum(x * routers[i], 1)  # [TOKENS]
        if bias_ptr is not None:
            logits += biases[i]
        tl.store(logits_ptr + token * NUM_EXPERTS + first + i, logits, mask=(token < tokens) & (first + i < NUM_EXPERTS))
    if CHOOSING > 0:
        tl.debug_barrier()  # orders the stores of all threads before the atomic of one
        if tl.atomic_add(finished_ptr, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) * tl.num_programs(1) - 1:
            tl.store(finished_ptr, 0)
            choosing = tl.arange(0, CHOOSING)
            store_choices(
                logits_ptr, correction_ptr, weights_ptr, None, order_ptr, offsets_ptr, experts_ptr, choosing, tokens, scale, jitter, OPTIONS
            )
