"""Embedding lookup, `resolve` and `remember` in the interpreter."""

from __future__ import annotations

import pytest
import torch

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.reference import embedding as reference
from stoker.kernels.triton import embedding as kernels
from stoker.kernels.triton.gemm.quantized import int8 as quant_int8


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [5, 576, 4096])
def test_copies_rows(size: int, dtype: torch.dtype, index: torch.dtype) -> None:
    table = torch.randn(50, size).to(dtype)
    ids = torch.randint(0, 50, (9,), dtype=index)
    assert torch.equal(kernels.embedding(ids, table), table[ids.long()])


def test_ids_outside_the_table_give_zeros() -> None:
    table = torch.randn(10, 16)
    out = kernels.embedding(torch.tensor([-1, 3, 10, 2**31 - 1], dtype=torch.int32), table)
    assert torch.equal(out[1], table[3]) and not out[[0, 2, 3]].any()


def test_a_shard_of_a_wider_table() -> None:
    table = torch.randn(10, 64)[:, :48]
    assert torch.equal(kernels.embedding(torch.tensor([4, 2]), table), table[[4, 2]])


def test_nothing_to_do() -> None:
    assert kernels.embedding(torch.zeros(0, dtype=torch.int32), torch.zeros(3, 8)).shape == (0, 8)


@pytest.mark.parametrize("count", [0, 1, 7, 1500])
def test_resolve(count: int) -> None:
    last = torch.randint(0, 5000, (33,), dtype=torch.int32)
    ids = torch.where(torch.rand(count) < 0.5, -1 - torch.randint(0, 33, (count,)), torch.randint(0, 5000, (count,))).int()
    want = [int(last[-1 - i]) if i < 0 else i for i in ids.tolist()]
    assert kernels.resolve(ids, last).tolist() == reference.resolve(ids, last).tolist() == want


@pytest.mark.parametrize("count", [0, 1, 7, 1500])
def test_remember(count: int) -> None:
    """Rows in any order; padding goes to the element after the last row; -1 where a row has no token."""
    rows = torch.randperm(2000)[:count].int()
    rows[count // 2 :] = torch.where(torch.rand(count - count // 2) < 0.3, 2000, rows[count // 2 :])
    ids, before = torch.randint(-1, 5000, (count,), dtype=torch.int32), torch.randint(0, 5000, (2001,), dtype=torch.int32)
    want, (here, there) = before.tolist(), (before.clone(), before.clone())
    for row, token_id in zip(rows.tolist(), ids.tolist(), strict=True):
        want[row] = max(token_id, 0)
    kernels.remember(here, rows, ids)
    reference.remember(there, rows, ids)
    assert here.tolist()[:-1] == there.tolist()[:-1] == want[:-1], "the token of the padding row is undefined, the others are not"


@pytest.mark.parametrize("size", [5, 1500])
def test_int8_rows(size: int) -> None:
    table, scale = torch.randint(-127, 128, (10, size), dtype=torch.int8), torch.rand(10)
    out = quant_int8.packed_embedding(torch.tensor([3, -1, 9, 10], dtype=torch.int32), PackedWeight("int8", table, scale), torch.bfloat16)
    assert torch.equal(out[[0, 2]], (table.float() * scale[:, None]).bfloat16()[[3, 9]]) and not out[[1, 3]].any()
