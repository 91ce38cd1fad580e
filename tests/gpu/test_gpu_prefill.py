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
from stoker.kernels.types import AttentionParams

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
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("sizes", "features", "block", "cache_dtype"), CASES)
def test_prefill(sizes: tuple[int, int, int], features: dict, block: int, cache_dtype: torch.dtype | None, dtype: torch.dtype) -> None:
    """Rows of 1 to 400 queries, after keys that a step before stored or after none. Unused slots of 16-bit caches are NaN."""
    from stoker.kernels.triton.attention.warp_specialized.launch import tile_counter, warp_specialized_prefill
    from stoker.kernels.triton.device import capability

    heads, kv_heads, size = sizes
    rows = [(1, random.randrange(1, 300)) for _ in range(3)]
    rows += [(q, q + seen) for q, seen in ((1, 1), (2, 0), (70, 1000), (random.randrange(129, 400), 0), (128, 128), (65, 63))]
    cache, batch = ragged(rows, kv_heads, size, block, dtype)
    assert cache.values is not None
    batch.num_decodes = 3
    scale = None
    if cache_dtype is not None:
        scale = torch.rand(kv_heads) / 4 + 0.5
        cache = KVCache(*(page.nan_to_num().to(cache_dtype) for page in (cache.keys, cache.values)), scale, scale)
    q = torch.randn(int(batch.query_starts[-1]), (heads + 2) * size).to(dtype)[:, : heads * size].view(-1, heads, size)
    sinks = torch.randn(heads) if "sinks" in features else None
    window = features.get("window")
    pages = cache.keys.double().nan_to_num(), cache.values.double().nan_to_num()  # type: ignore[union-attr]
    clean = KVCache(*pages) if scale is None else KVCache(*(page * scale.double()[:, None, None] for page in pages))
    expected = attention_reference.attention(q.double(), clean, batch, AttentionParams(size**-0.5, window=window, sinks=sinks))
    on_device = ForwardBatch(
        *(t.cuda() for t in (batch.token_ids, batch.positions, batch.slots, batch.query_starts, batch.seq_lens, batch.block_tables)),
        batch.num_decodes, batch.max_query_len, batch.max_seq_len,
    )  # fmt: skip
    moved = KVCache(*(None if t is None else t.cuda() for t in (cache.keys, cache.values, cache.key_scale, cache.value_scale)))  # type: ignore[arg-type]
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
