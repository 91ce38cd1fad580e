"""Copies keys and values between slots of the paged KV cache: those of accepted draft tokens, whose tree has other nodes between them.

    for (source, target) in moves, in order:   pages[target] = pages[source]        slot = block × block_size + place

Grid: (pages, heads). Each CTA copies all moves of one head, one after another, because the source of a move may be the target of a later
one. A thread copies the same features of every token, so that the order within a thread is sufficient. All layers are one launch: the
addresses of their pages are in a table.

Theoretical floor: the launch. One accepted path of 4 drafts of Llama-3.1-8B moves at most 0.5 MB.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels.triton.integers import next_power_of_2
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait

if TYPE_CHECKING:
    from stoker.core.forward_batch import KVCache


def move_tokens(caches: list[KVCache], moves: Tensor) -> None:
    """Copy keys and values between slots (`ops.move_tokens`), in one launch for all pages of the same shape."""
    groups: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for cache in caches:
        for pages in (cache.keys, cache.values):
            if pages is not None and pages.numel():
                _, heads, block_size, size = pages.shape
                width = pages.element_size()
                groups[heads, block_size, size * width, pages.stride(0) * width, pages.stride(1) * width].append(pages.data_ptr())
    for (heads, block_size, size, stride_block, stride_head), addresses in groups.items():
        move_tokens_kernel[(len(addresses), heads)](
            _address_table(tuple(addresses), moves.device),
            moves,
            len(moves),
            stride_block,
            stride_head,
            BLOCK_SIZE=block_size,
            SIZE=size,
            WIDTH=next_power_of_2(size),
            num_warps=1,
            **pdl_launch_options(moves),
        )


@lru_cache(maxsize=64)
def _address_table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """The addresses as int64 on the device."""
    return torch.tensor(addresses, dtype=torch.int64, device=device)


@triton.jit(do_not_specialize=["num_moves"])
def move_tokens_kernel(
    pages_ptr,  # int64 [pages]: the address of each [num_blocks, heads, BLOCK_SIZE, SIZE] bytes
    moves_ptr,  # int32 [num_moves, 2]: the slots (source, target)
    num_moves,
    stride_block,  # in bytes
    stride_head,
    BLOCK_SIZE: tl.constexpr,
    SIZE: tl.constexpr,  # bytes of a token of one head
    WIDTH: tl.constexpr,  # SIZE, rounded up to a power of two
    USE_PDL: tl.constexpr,
):
    """One CTA: all moves of one head of one layer's keys or values."""
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    head_ptr = tl.load(pages_ptr + tl.program_id(0)).to(tl.pointer_type(tl.uint8)) + tl.program_id(1).to(tl.int64) * stride_head
    byte = tl.arange(0, WIDTH)
    for i in range(num_moves):
        source = tl.load(moves_ptr + 2 * i).to(tl.int64)
        target = tl.load(moves_ptr + 2 * i + 1).to(tl.int64)
        source_ptr = head_ptr + source // BLOCK_SIZE * stride_block + source % BLOCK_SIZE * SIZE
        target_ptr = head_ptr + target // BLOCK_SIZE * stride_block + target % BLOCK_SIZE * SIZE
        token = tl.load(source_ptr + byte, mask=byte < SIZE, other=0)
        tl.store(target_ptr + byte, token, mask=byte < SIZE)
