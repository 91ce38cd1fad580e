"""Copies of keys and values between slots, against a loop over the moves."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from stoker.core.forward_batch import KVCache
from stoker.kernels.reference import pages as reference
from stoker.kernels.triton import pages as kernels

SIZE = 16
PATHS = [[(37, 36), (39, 37), (42, 38)], [(15, 14), (16, 15), (18, 16), (33, 17)], [(1, 0)], []]  # across the ends of blocks


@pytest.mark.parametrize("module", [reference, kernels])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("path", PATHS, ids=len)
def test_moves(module: ModuleType, dtype: torch.dtype, path: list[tuple[int, int]]) -> None:
    """A cache with keys and values of different widths, a latent cache, and one that is a view of a larger tensor."""
    bits = [
        torch.randint(0, 120, shape, dtype=torch.uint8)
        for shape in ((4, 2, SIZE, 40), (4, 2, SIZE, 24), (4, 1, SIZE, 72), (4, 6, SIZE, 40))
    ]
    pages = [(each.view(dtype) if each.shape[-1] % dtype.itemsize == 0 else each).clone() for each in bits]
    both = pages[3]
    caches = [KVCache(pages[0], pages[1]), KVCache(pages[2], None), KVCache(both[:, :2], both[:, 2:4])]
    expected = [each.clone().view(torch.uint8) for each in pages]
    for source, target in path:
        for each in (*expected[:3], expected[3][:, :4]):
            each[target // SIZE, :, target % SIZE] = each[source // SIZE, :, source % SIZE]
    module.move_tokens(caches, torch.tensor(path, dtype=torch.int32).view(-1, 2))
    assert all(torch.equal(one.view(torch.uint8), other) for one, other in zip(pages, expected, strict=True))
