"""The warp-specialized prefill kernel on the device against float64, on random ragged batches after decode rows. The sizes differ from run
to run.

Triton is imported inside functions: tests/kernels, collected after this folder, sets TRITON_INTERPRET before Triton is imported.
"""

from __future__ import annotations

import random

import pytest
import torch
from test_gpu_kernels import ragged, relative_error

from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.kernels.reference import attention as attention_reference
from stoker.kernels.types import MEAN_TOKENS, AttentionParams

FP8 = torch.float8_e4m3fn
CASES = [
    ((32, 8, 128), {}, 64, None),
    ((32, 8, 128), {}, 16, FP8),
    ((32, 8, 128), {"window": 40}, 128, None),
    ((32, 8, 128), {"window": 300}, 32, FP8),
    ((16, 2, 128), {"sinks": True, "window": 128}, 64, None),
    ((9, 3, 64), {}, 16, None),
    ((9, 3, 64), {}, 16, FP8),
    ((4, 4, 64), {"sinks": True}, 32, None),
    ((12, 4, 64), {"window": 1}, 128, FP8),
    ((32, 8, 128), {"mean": True}, 64, FP8),
    ((8, 1, 128), {"mean": True}, 16, FP8),
    ((4, 4, 128), {"mean": True, "window": 300}, 32, FP8),
    ((16, 2, 128), {"mean": True, "window": 1500, "sinks": True}, 64, FP8),
    ((9, 3, 64), {"mean": True}, 128, FP8),
    ((4, 4, 64), {"mean": True, "sinks": True}, 16, FP8),
    ((12, 4, 64), {"mean": True, "window": 128}, 64, FP8),
    ((6, 2, 64), {"mean": True, "window": 1}, 16, FP8),
]
# Rows of caches with means: they begin and end before, at and after a multiple of MEAN_TOKENS, and see up to three means.
MEAN_ROWS = [(1, 1023), (1, 1024), (30, 1001), (130, 2303), (64, 960), (257, 1024), (2, 1023), (200, 3000)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("sizes", "features", "block", "cache_dtype"), CASES)
def test_prefill(sizes: tuple[int, int, int], features: dict, block: int, cache_dtype: torch.dtype | None, dtype: torch.dtype) -> None:
    """Rows of 1 to 400 queries, after keys that a step before stored or after none. Unused slots of 16-bit caches are NaN.

    Without its mean, or with that of other positions, a key's scores differ by about 2, so that a wrong mean is an error of more than 0.1.
    """
    from stoker.kernels.triton.attention.warp_specialized.launch import tile_counter, warp_specialized_prefill
    from stoker.kernels.triton.device import capability

    heads, kv_heads, size = sizes
    rows = [(1, random.randrange(1, 300)) for _ in range(3)]
    prompts = [(1, 1), (2, 0), (70, 1000), (random.randrange(129, 400), 0), (128, 128), (65, 63)]
    rows += [(q, q + seen) for q, seen in [*prompts, *(MEAN_ROWS if "mean" in features else ())]]
    cache, batch = ragged(rows, kv_heads, size, block, dtype)
    assert cache.values is not None
    batch.num_decodes = 3
    scale = means = None
    if cache_dtype is not None:
        scale = torch.rand(kv_heads) / 4 + 0.5
        if "mean" in features:
            means = torch.randn(kv_heads, -(-batch.max_seq_len // MEAN_TOKENS), size) * 3
        pages = (page.nan_to_num().to(cache_dtype) for page in (cache.keys, cache.values))
        cache = KVCache(*pages, scale, scale, key_mean=means)
    q = torch.randn(int(batch.query_starts[-1]), (heads + 2) * size).to(dtype)[:, : heads * size].view(-1, heads, size)
    sinks = torch.randn(heads) if "sinks" in features else None
    window = features.get("window")
    clean = KVCache(*(page.double().nan_to_num() for page in (cache.keys, cache.values)), scale, scale, key_mean=means)  # type: ignore[union-attr]
    expected = attention_reference.attention(q.double(), clean, batch, AttentionParams(size**-0.5, window=window, sinks=sinks))
    on_device = ForwardBatch(
        *(t.cuda() for t in (batch.token_ids, batch.positions, batch.slots, batch.query_starts, batch.seq_lens, batch.block_tables)),
        batch.num_decodes, batch.max_query_len, batch.max_seq_len,
    )  # fmt: skip
    parts = (cache.keys, cache.values, cache.key_scale, cache.value_scale, None, cache.key_mean)
    moved = KVCache(*(None if t is None else t.cuda() for t in parts))  # type: ignore[arg-type]
    params = AttentionParams(size**-0.5, window=window, sinks=None if sinks is None else sinks.cuda())
    on_cuda = torch.randn(len(q), (heads + 2) * size, dtype=dtype, device="cuda")[:, : heads * size].view(-1, heads, size).copy_(q)
    if capability(on_cuda) != 90:
        pytest.skip("needs wgmma")
    out = torch.full((len(q), heads, size), float("nan"), dtype=dtype, device="cuda")
    for _ in range(2):  # the second launch finds the counter of tiles as the first one leaves it
        warp_specialized_prefill(on_cuda, moved, on_device, params, out)
        assert relative_error(out[3:].flatten(1), expected[3:]) < 1e-2
        assert int(tile_counter(out.device)) == 0
        assert out[:3].isnan().all()
        out.fill_(float("nan"))


@pytest.mark.parametrize("has_mean", [False, True])
def test_long_prompts_over_e4m3_keys_use_the_kernel(has_mean: bool) -> None:
    """The launcher selects the kernel for the caches of engines with FP8_KV, and it gives the results of the other kernel."""
    from stoker.kernels.triton.attention import launch as kernels
    from stoker.kernels.triton.attention.tiles import Splits
    from stoker.kernels.triton.attention.warp_specialized.launch import supports_warp_specialized_prefill
    from stoker.kernels.triton.device import capability

    cache, batch = ragged([(2100, 2100), (900, 2000)], 2, 128, 64, torch.bfloat16)
    scale = (torch.rand(2) / 4 + 0.5).cuda()
    pages = (page.nan_to_num().to(FP8).cuda() for page in (cache.keys, cache.values))  # type: ignore[union-attr]
    moved = KVCache(*pages, scale, scale, key_mean=torch.randn(2, 3, 128, device="cuda") * 3 if has_mean else None)
    on_device = ForwardBatch(
        *(t.cuda() for t in (batch.token_ids, batch.positions, batch.slots, batch.query_starts, batch.seq_lens, batch.block_tables)),
        batch.num_decodes, batch.max_query_len, batch.max_seq_len,
    )  # fmt: skip
    q, params = torch.randn(3000, 16, 128, dtype=torch.bfloat16, device="cuda"), AttentionParams(128**-0.5)
    if capability(q) != 90:
        pytest.skip("needs wgmma")
    assert supports_warp_specialized_prefill(q, moved, on_device, params)
    expected = torch.empty_like(q)
    kernels.prefill(q, moved, on_device, params, expected, splits=Splits())
    assert relative_error(kernels.attention(q, moved, on_device, params), expected.flatten(1)) < 1e-2


@pytest.mark.parametrize("size", [64, 128])
def test_queries_with_outliers_over_e4m3_keys(size: int) -> None:
    """Rows of different magnitudes, with a feature 100 times as large as the others: the tensor cores add e4m3 products in few bits."""
    from stoker.kernels.triton.attention.warp_specialized.launch import warp_specialized_prefill
    from stoker.kernels.triton.device import capability

    cache, batch = ragged([(300, 300), (200, 1500)], 2, size, 64, torch.bfloat16)
    scale = torch.rand(2) / 4 + 0.5
    pages = [page.nan_to_num().to(FP8) for page in (cache.keys, cache.values)]  # type: ignore[union-attr]
    q = torch.randn(500, 8, size, dtype=torch.bfloat16)
    q[:, :, 5] *= 100
    q *= torch.logspace(-3, 1, 500, dtype=q.dtype)[:, None, None]
    params = AttentionParams(size**-0.5 / 30)
    expected = attention_reference.attention(q.double(), KVCache(*(page.double() for page in pages), scale, scale), batch, params)
    on_device = ForwardBatch(
        *(t.cuda() for t in (batch.token_ids, batch.positions, batch.slots, batch.query_starts, batch.seq_lens, batch.block_tables)),
        batch.num_decodes, batch.max_query_len, batch.max_seq_len,
    )  # fmt: skip
    if capability(q.cuda()) != 90:
        pytest.skip("needs wgmma")
    out = torch.empty_like(q, device="cuda")
    warp_specialized_prefill(q.cuda(), KVCache(*(part.cuda() for part in (*pages, scale, scale))), on_device, params, out)
    assert relative_error(out.flatten(1), expected) < 1e-2


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8])
def test_decodes_of_a_captured_step(cache_dtype: torch.dtype, size: int) -> None:
    """A captured step has its number of decodes on the device. Both launches have all rows, and give the results of a step that is not."""
    from stoker.kernels.triton.attention import launch as kernels

    rows = [(1, random.randrange(1, 1500)) for _ in range(150)]
    cache, batch = ragged([*rows, (1, 1), (2, 2), (700, 700), (300, 1100)], 2, size, 64, torch.bfloat16)
    scale = None if cache_dtype == torch.bfloat16 else (torch.rand(2) / 4 + 0.5).cuda()
    pages = (page.nan_to_num().to(cache_dtype).cuda() for page in (cache.keys, cache.values))  # type: ignore[union-attr]
    moved = KVCache(*pages, scale, scale)
    tensors = [t.cuda() for t in (batch.token_ids, batch.positions, batch.slots, batch.query_starts, batch.seq_lens, batch.block_tables)]
    known = ForwardBatch(*tensors, 151, batch.max_query_len, batch.max_seq_len)
    padding = 256 - batch.num_rows
    starts = torch.cat([tensors[3], tensors[3][-1:].expand(padding)])
    lens, tables = (torch.cat([t, t.new_zeros(padding, *t.shape[1:])]) for t in tensors[4:])
    captured = ForwardBatch(*tensors[:3], starts, lens, tables, 0, 1280, 5120)
    captured.decode_count, captured.row_count = (starts.new_tensor([count]) for count in (151, batch.num_rows))
    num_tokens, params = int(batch.query_starts[-1]), AttentionParams(size**-0.5)
    q = torch.randn(1280, 8, size, dtype=torch.bfloat16, device="cuda")
    expected = kernels.attention(q[:num_tokens], moved, known, params)
    assert relative_error(kernels.attention(q, moved, captured, params)[:num_tokens], expected) < 1e-2
