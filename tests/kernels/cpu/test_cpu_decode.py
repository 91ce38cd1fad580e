"""Special cases of the CPU reference for small decode steps give the same results as the general case."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.core.packed_weight import PackedWeight
from stoker.kernels.reference import attention, quant_int8, rope
from stoker.kernels.types import AttentionParams, Fusion, Rotary

SIZE, BLOCK = 16, 4


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cache(blocks: int = 8, heads: int = 2) -> KVCache:
    return KVCache(torch.zeros(blocks, heads, BLOCK, SIZE), torch.zeros(blocks, heads, BLOCK, SIZE))


def codes(rows: int, columns: int) -> Tensor:
    return torch.randint(-127, 128, (rows, columns), dtype=torch.int8)


def test_an_int8_row_does_not_depend_on_the_others() -> None:
    x, weight, scale, bias = torch.randn(5, 96), codes(160, 96), torch.rand(160), torch.randn(160)
    packed, residual = PackedWeight("int8", weight, scale, bias=bias), torch.randn(5, 160)
    together = quant_int8.packed_linear(x, packed, Fusion(residual=residual))
    exact = x.double() @ (weight * scale[:, None].double()).t() + bias + residual
    assert (together - exact).abs().max() < 1e-4 * exact.abs().max()
    for row in range(5):
        alone = quant_int8.packed_linear(x[row : row + 1], packed, Fusion(residual=residual[row : row + 1]))
        torch.testing.assert_close(alone[0], together[row], rtol=1e-6, atol=float(1e-6 * exact.abs().max()))


@pytest.mark.parametrize("rows", [1, 3])
def test_int8_rows_of_zeros_and_nan(rows: int) -> None:
    x = torch.zeros(rows, 64)
    packed = PackedWeight("int8", codes(32, 64), torch.rand(32))
    assert not quant_int8.packed_linear(x, packed).any()
    x[-1, 3] = float("nan")
    found = quant_int8.packed_linear(x, packed)
    assert found[-1].isnan().all() and not found[:-1].isnan().any()


@pytest.mark.parametrize("dim", [SIZE, SIZE // 2])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("slots", [(9,), (-1,), (9, -1, 3), (-1, -1)])
def test_fused_queries_and_keys_rotate_like_separate_ones(slots: tuple[int, ...], interleaved: bool, dim: int) -> None:
    count = len(slots)
    heads = torch.randn(count, 4 + 2 + 2, SIZE)
    q, k, v = heads.split((4, 2, 2), dim=1)
    rotary = Rotary(ints(*range(7, 7 + count)), torch.randn(32, dim), interleaved)
    joined, apart = cache(), cache()
    found = rope.rope_store(q, k, v, rotary, joined, ints(*slots))
    want = rope.rope_store(q.clone(), k.clone(), v.clone(), rotary, apart, ints(*slots))
    assert torch.equal(found, want)
    assert torch.equal(joined.keys, apart.keys) and joined.values is not None and apart.values is not None
    assert torch.equal(joined.values, apart.values)
    assert all(torch.equal(joined.values[slot // BLOCK, :, slot % BLOCK], v[i]) for i, slot in enumerate(slots) if slot >= 0)
    assert bool(joined.values.any()) == (max(slots) >= 0)


@pytest.mark.parametrize("params", [AttentionParams(0.3), AttentionParams(0.3, window=3)])
@pytest.mark.parametrize("lens", [(6,), (6, 11, 1)])
def test_decode_by_pytorchs_kernel_equals_the_general_case(lens: tuple[int, ...], params: AttentionParams) -> None:
    rows, pages = len(lens), cache(blocks=3 * len(lens))
    assert pages.values is not None
    pages.keys.normal_()
    pages.values.normal_()
    tables = torch.randperm(3 * rows).to(torch.int32).view(rows, 3)
    positions = ints(*(n - 1 for n in lens))
    batch = ForwardBatch(
        token_ids=ints(*[0] * rows), positions=positions, slots=positions, query_starts=torch.arange(rows + 1, dtype=torch.int32),
        seq_lens=ints(*lens), block_tables=tables, num_decodes=rows, max_query_len=1, max_seq_len=max(lens),
    )  # fmt: skip
    q = torch.randn(rows, 4, SIZE)
    found = attention.attention(q, pages, batch, params)
    batch.shared.clear()
    wide = KVCache(pages.keys.double(), pages.values.double())  # PyTorch's kernel is used for float32 only
    torch.testing.assert_close(found, attention.attention(q.double(), wide, batch, params).float(), rtol=1e-5, atol=1e-5)
