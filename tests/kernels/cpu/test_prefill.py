"""Attention of prefill rows in the C kernel, against float64, over ragged batches whose unused parts are poisoned."""

from __future__ import annotations

import pytest
import torch
from native_cases import TOLERANCE, needs_compiler
from oracle import Case, expected_attention, relative_error
from torch import Tensor

from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.kernels.native import attention
from stoker.kernels.types import AttentionParams

pytestmark = needs_compiler
CASES = {
    "one": Case([(2, 2)]),
    "mixed": Case([(1, 37), (1, 5), (3, 3), (13, 50), (130, 300)]),
    "own keys": Case([(40, 40), (5, 9)], heads=3, kv_heads=3, size=32),
    "groups of three": Case([(29, 161)], heads=9, kv_heads=3),
    "one key head": Case([(33, 70)], heads=7, kv_heads=1, size=16, value_size=48),
    "head 40": Case([(31, 31)], size=40),
    "head 18": Case([(9, 11)], size=18, value_size=5),
    "head 512": Case([(14, 40)], heads=2, kv_heads=1, size=512),
    "window": Case([(1, 200), (150, 420), (20, 20)], window=37),
    "chunk": Case([(64, 64), (65, 150), (3, 300)], chunk=64),
    "bfloat16": Case([(33, 140)], dtype=torch.bfloat16),
    "int8": Case([(7, 33), (40, 140)], cache_dtype=torch.int8),
    "padding": Case([(7, 33), (40, 140)], padding_tokens=5),
}


def attend(q: Tensor, cache: KVCache, batch: ForwardBatch, params: AttentionParams) -> Tensor:
    """Attention in prefill.c. Skips the test on processors without it."""
    found = attention._prefill(q, cache, batch, params)
    return found if found is not None else pytest.skip("no AVX2")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_prefill_rows(case: Case) -> None:
    q, cache, batch, params = case.build()
    found, tokens = attend(q, cache, batch, params), sum(queries for queries, _ in case.rows)
    assert found.dtype == q.dtype
    assert relative_error(found[:tokens], expected_attention(q, cache, batch, params)[:tokens]) < TOLERANCE[case.dtype]


def test_neither_chunks_nor_threads_change_results() -> None:
    threads = torch.get_num_threads()
    torch.manual_seed(5)
    q, cache, batch, params = Case([(150, 150)], heads=6, kv_heads=2, window=90).build()
    whole = attend(q, cache, batch, params)
    lengths = (70, 71, 149, 150)  # of the prompt, after each chunk
    try:
        torch.set_num_threads(3)
        for start, length in zip((0, *lengths), lengths, strict=False):
            chunk = ForwardBatch(
                *(torch.zeros(length - start, dtype=torch.int32) for _ in range(3)),
                torch.tensor([0, length - start], dtype=torch.int32),
                torch.tensor([length], dtype=torch.int32),
                batch.block_tables, 0, length - start, length,
            )  # fmt: skip
            assert torch.equal(attend(q[start:length], cache, chunk, params), whole[start:length])
    finally:
        torch.set_num_threads(threads)


def test_block_ids_out_of_range_raise() -> None:
    q, cache, batch, params = Case([(7, 40)]).build()
    batch.block_tables[0, 1] = 10**9
    with pytest.raises((IndexError, RuntimeError)):
        attention.attention(q, cache, batch, params)


def test_nan_scores_stay_in_their_head() -> None:
    q, cache, batch, params = Case([(20, 150)]).build()
    q[3, 1, 3] = float("nan")
    found = attend(q, cache, batch, params).view(20, 4, -1)
    assert found[3, 1].isnan().all() and found[3, [0, 2, 3]].isfinite().all() and found[[*range(3), *range(4, 20)]].isfinite().all()
