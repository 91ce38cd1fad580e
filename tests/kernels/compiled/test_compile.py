"""Every kernel compiled for sm_90 without a GPU, with bounds of its registers, spills and shared memory as the assembler reports them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from compile_all import LAUNCHES

pytestmark = pytest.mark.slow

SHARED_LIMIT = 227 << 10  # bytes of one CTA on sm_90
SMALL = 48  # registers: 40 warps per SM, enough to hide the latency of memory
FOUR_CTAS = 128  # registers: four CTAs of four warps per SM

# launch → (registers, spilled bytes) at most. Other launches: 255 and none.
BOUNDS = {
    "norm": (SMALL, 0), "norm of heads": (SMALL, 0), "embedding": (SMALL, 0), "activate gelu": (SMALL, 0),
    "route 1 tokens by a router": (SMALL, 0), "route 7 tokens by a router": (FOUR_CTAS, 0),
    # Two CTAs of four warps per SM, as their shared memory allows; one of eight warps (DeepSeek-V3)
    "route 448 tokens by the router of Granite-3.1-1B-A400M": (FOUR_CTAS, 0),
    "route 448 tokens by the router of gpt-oss-20b": (FOUR_CTAS, 0),
    "route 448 tokens by the router of Qwen3-30B-A3B": (FOUR_CTAS, 0), "route 448 tokens by the router of DeepSeek-V3": (144, 0),
    "route 768 tokens by the router of Mixtral-8x7B": (FOUR_CTAS, 0), "route 768 tokens by the router of Phi-3.5-MoE": (FOUR_CTAS, 0),
    "xielu": (SMALL, 0), "rotate heads": (SMALL, 0),
    "sum of two copied summands, 8192 features": (SMALL, 0), "sum of two copied summands, 72 features": (SMALL, 0),
    "rope decode": (SMALL, 0), "rope prefill": (SMALL, 0),
    "rope decode, normed": (SMALL, 0),
    "rope interleaved, partial, normed": (SMALL, 0),
    "rope prefill, normed": (64, 0),
    # With the Hadamard transform of keys and queries. 64 registers: eight CTAs of four warps.
    "rope fp8, normed": (64, 16), "rope int8, normed": (80, 0),
    "rope fp8": (64, 0), "rope fp8 of 768 tokens": (64, 0), "rope fp8 of 512 tokens": (64, 0), "rope int8": (72, 0),
    "rope int8 of 300 tokens, interleaved, partial": (64, 0),
    "decode and rotate 1": (144, 0), "decode and rotate 64": (FOUR_CTAS, 0),
    # Over 8-bit caches: the CTAs of a fused layer kernel have 8 warps of 168 registers, and leave 176 for four warps.
    "decode and rotate 1, fp8": (168, 0), "decode and rotate 1, fp8, half of Llama-3.1-70B": (168, 0),
    "decode and rotate 2, fp8": (168, 0), "decode and rotate 1, fp8, normed": (168, 0),
    "decode and rotate 1, fp8, 16 heads of a group": (168, 0), "decode and rotate 1, int8": (168, 0),
    "decode and rotate 1, fp8, 64 wide": (168, 0),
    "decode and rotate 1, fp8, 256 wide, interleaved, partial": (168, 0),
    "decode and store 1, int8, normed, without rotation": (168, 0),
    "decode and rotate 1, normed": (144, 0), "decode and rotate 64, normed": (FOUR_CTAS, 0),
    "decode and rotate 64, normed, split by lengths": (FOUR_CTAS, 0),
    "decode and rotate 256, normed, split by lengths": (FOUR_CTAS, 0),
    "decode and rotate 64, normed, 256 wide, partial": (144, 0),  # three CTAs per SM, as its shared memory allows
    "decode 1": (144, 0), "decode 64": (FOUR_CTAS, 0), "decode 256": (FOUR_CTAS, 0), "decode fp8": (FOUR_CTAS, 0),
    "decode fp8 512": (224, 0),  # nine CTAs of one warp per SM
    "decode 64, split by lengths": (FOUR_CTAS, 0), "decode fp8, split by lengths": (FOUR_CTAS, 0),
    "decode fp8 256, split by lengths": (224, 0), "decode and rotate 64, split by lengths": (FOUR_CTAS, 0),
    "decode and rotate 256, split by lengths": (FOUR_CTAS, 0),
    "decode int8, split by lengths": (144, 0), "decode latent, split by lengths": (192, 32),
    "decode int8": (144, 0), "decode 64 wide": (FOUR_CTAS, 0), "decode 256 wide": (FOUR_CTAS, 0),
    "decode latent": (192, 32),
    "tree of 64, latent": (255, 256),
    "prefill 64 wide": (168, 0), "prefill 128 wide, window and sinks": (168, 32),
    "prefill block 16": (168, 128),  # of the producer, which has the ids of 16 blocks in 40 registers
    "prefill fp8": (168, 16),  # once per query tile, outside the loops over keys
    "prefill fp8, captured": (168, 16), "prefill fp8, window": (168, 32), "prefill fp8, 64 wide": (168, 16),
    "quant fp8 rows of 14336, gated": (80, 0),  # three CTAs of eight warps per SM
    "quant fp8 rows of 28672, gated": (64, 16),  # two CTAs of 16 warps
    "quant fp8 rows of 4096, normed": (32, 0),  # eight CTAs of eight warps
    "prefill latent": (255, 80),  # 0, 68 or 76: the same assembler schedules differently on another processor
    # Fused layers: the other registers are for attention, which still runs while the pipelines fill. The large-batch kernel has 16 warps;
    # its spills are outside the loops over blocks.
    # Three warpgroups of one CTA; setmaxnreg moves registers from the producer to the consumers.
    "large gemm bfloat16, gated": (168, 0), "large gemm float16, gated, with bias and residual": (168, 0),
    "large gemm fp8, with residual": (168, 0), "large gemm fp8, gated, with bias": (168, 0),
    "large gemm fp8, 128 × 128, with residual": (168, 0), "large gemm fp8, 128 × 128, gated": (168, 0),
    "large gemm bfloat16, 64 × 128, gated": (168, 0), "large gemm bfloat16, 64 × 128, in slices, with residual": (168, 0),
    "large gemm bfloat16, in slices, gated, with bias and residual": (168, 0),
    "large gemm bfloat16, 192 × 128, in slices, with residual": (128, 0),
    "large gemm fp8, two slices": (168, 0), "large gemm fp8, two slices, with bias and residual": (168, 0),
    "large gemm fp8, two slices, gated, with bias": (168, 0),
    "large gemm of experts": (168, 0), "large gemm of experts, gated, with bias": (168, 0),
    "large gemm of experts, bfloat16, with bias": (168, 0),
    "large gemm of experts, 128 × 128": (168, 0), "large gemm of experts, 192 × 128": (128, 0),
    "large gemm of digits bfloat16": (168, 0), "large gemm of digits float16, with bias": (168, 0),
    "large gemm fp8, 192 × 128, with residual": (128, 0), "large gemm fp8, 192 × 128, with bias": (128, 0),  # four warpgroups
    "fused layer of 6 rows": (128, 0), "fused layer of 16 rows, last, with biases": (128, 0),
    "fused layer of 32 rows": (128, 64), "fused layer of 64 rows": (128, 64),
    "fused layer of 64 rows 70B": (128, 64), "fused layer of 32 rows in groups of 32": (128, 64),
    "fused layer of 64 rows in groups of 64": (128, 64),
    "fused layer bfloat16": (128, 0), "fused layer float16 135M, with biases": (128, 0), "fused layer bfloat16 of 2 rows": (168, 0),
    "fused layer fp8 of 4 rows": (168, 32), "fused layer int4 of 2 rows": (168, 16),
    "fused layer fp8 of 4 rows 70B": (168, 4096),  # its activations are quantized by 256 threads, 128 features each
    "fused layer int4 in groups of 32": (168, 0), "fused layer int4 of 2 rows in groups of 64": (168, 0),
    "fused layer fp8": (168, 0), "fused layer int8 70B, last, with biases": (168, 8),
    "fused layer int4": (168, 0), "fused layer int4, of one block": (168, 0),
    "fused layer bfloat16 of 5 rows": (168, 0),
    "fused layer ranks 2, fp8 70B": (168, 0), "fused layer ranks 2, fp8 of 4 rows 70B, with biases": (168, 32),
    "fused layer ranks 4, int4 of 3 rows 70B": (168, 0), "fused layer ranks 8, bfloat16 of 6 rows 70B": (168, 0),
    "recurrent mamba2 captured, of 256 states": (255, 64), "recurrent delta captured": (255, 32),
    "recurrent mamba2 prefill of 256 states": (255, 64), "recurrent mamba2 prefill fp32": (255, 512),
    "recurrent delta prefill": (255, 32), "recurrent delta prefill fp32": (255, 512),
}  # fmt: skip


GROUPS = [
    ("norm", "gated", "activate", "xielu", "rotate", "embedding", "resolve", "remember", "rope", "sample"),
    ("recurrent",),
    ("linear", "skinny", "large"),
    ("decode", "four", "sum of", "move", "tree", "verify", "tokens"),
    ("prefill f", "prefill i", "prefill,"),
    ("prefill 128 wide",),
    ("prefill b", "prefill 6"),
    ("prefill 128 t", "prefill 19", "prefill 2", "prefill 8", "prefill 9", "prefill latent"),
    ("quant fp8", "quant block", "route", "clipped"),
    ("quant int8", "quant w8a8", "experts torch.b"),
    ("quant int4", "quant fp4", "experts torch.f", "experts torch.i"),
    ("experts int4", "experts int8", "experts block"),
    ("fused layer of",),
    ("fused layer b", "fused layer f"),
    ("fused layer i",),
    ("fused layer ranks",),
]


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group[0])
def test_fits_sm_90(group: tuple[str, ...], uninterpreted: Callable[..., str]) -> None:
    printed = uninterpreted(Path(__file__).with_name("compile_all.py"), *group)
    launches = {launch["launch"]: launch for launch in map(json.loads, printed.splitlines())}
    for name, launch in launches.items():
        registers, spill = BOUNDS.get(name, (255, 0))
        assert launch["kernels"], name
        assert launch["illegal"] == [], name
        for kernel in launch["kernels"]:
            assert kernel["registers"] <= registers, (name, kernel)
            assert kernel["spill_bytes"] <= spill, (name, kernel)
            assert kernel["shared_bytes"] <= SHARED_LIMIT, (name, kernel)
        # The PTX of a fused layer has its buffers at the start of shared memory; Triton's scratch must come after them.
        if name.startswith("fused layer"):
            is_alone = launch["scratch"] is None and "rows" in name
            assert is_alone or launch["scratch"] >= launch["kernels"][0]["shared_bytes"] // 1024 * 1024
        # 128 tokens give too few tiles of 64 rows: tiles of 16 rows fill the device and need 6 µs instead of 15, without wgmma.
        if name.startswith("prefill") and name not in ("prefill fp32", "prefill 128 tokens"):
            assert launch["wgmma"], f"{name} does not use wgmma"
        if name in ("prefill 128 wide", "prefill fp8", "prefill fp8, captured", "prefill fp8, window", "prefill fp8, 64 wide"):
            assert [kernel["name"] for kernel in launch["kernels"]] == ["warp_specialized_prefill_kernel"], name


def test_every_launch_has_a_group_and_every_bound_a_launch() -> None:
    prefixes = tuple(prefix for group in GROUPS for prefix in group)
    assert [name for name in LAUNCHES if not name.startswith(prefixes)] == []
    assert set(BOUNDS) <= set(LAUNCHES)
