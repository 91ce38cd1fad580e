"""Rotary position embedding and the write into the paged KV cache by the C kernel (rope.c), after norms by another (norm.c)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from stoker.kernels.native.library import ABSENT, FLOAT32, INT32, ROPE_STORE, TensorInfo, kernels, tensor_info
from stoker.kernels.native.linear import ACTIVATION_DTYPES
from stoker.kernels.native.norm import norm
from stoker.kernels.native.pages import native_pages
from stoker.kernels.reference import rope as reference
from stoker.kernels.types import Rotary

if TYPE_CHECKING:
    from stoker.core.forward_batch import KVCache


rotate_heads = reference.rotate_heads


def rope_store(q: Tensor, k: Tensor, v: Tensor, rotary: Rotary, cache: KVCache, slots: Tensor) -> Tensor:
    """Normalize and rotate q and k and store k and v (`ops.rope_store`) by C kernels where they are supported, else by the reference.

    Norms are calls of their own, which run on all cores.
    """
    norms = rotary.norms
    if norms is not None:
        q, k = (norm(x, weight, None, norms.eps, "rms") for x, weight in ((q, norms.q_weight), (k, norms.k_weight)))
        rotary = rotary._replace(norms=None)
    if _rope_store(q, k, v, tensor_info(rotary.positions), tensor_info(rotary.cos_sin), rotary.interleaved, cache, tensor_info(slots)):
        return q
    return reference.rope_store(q, k, v, rotary, cache, slots)


def _rope_store(
    q: Tensor, k: Tensor, v: Tensor, positions: TensorInfo, cos_sin: TensorInfo, interleaved: bool, cache: KVCache, slots: TensorInfo
) -> bool:
    """Run the kernel, which rotates q in place. Returns False, with nothing changed, when it does not support the arguments."""
    library, pages = kernels(), native_pages(cache, ACTIVATION_DTYPES.get(q.dtype, -1))
    if isinstance(library, str) or pages is None or not (k.dtype == v.dtype == q.dtype and k.is_cpu and v.is_cpu):
        return False
    (tokens, heads, size), q_stride, k_stride, v_stride = q.shape, q.stride(), k.stride(), v.stride()
    num_blocks, kv_heads, block_size, _ = pages.keys.shape
    if not (
        pages.keys.shape[3] == size
        and k.shape == (tokens, kv_heads, size)
        and v.shape == (tokens, kv_heads, pages.values.shape[3])
        and q_stride[2] == k_stride[2] == v_stride[2] == 1
        and positions.dtype == slots.dtype == INT32
        and positions.shape == slots.shape == (tokens,)
        and (cos_sin is ABSENT or (cos_sin.dtype == FLOAT32 and len(cos_sin.shape) == 2))
    ):
        return False
    num_positions, dim = cos_sin.shape or (0, 0)
    return not library.rope_store(
        ROPE_STORE(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            positions.address,
            slots.address,
            cos_sin.address,
            pages.key_scale.address,
            pages.value_scale.address,
            pages.key_balance.address,
            pages.keys.address,
            pages.values.address,
            tokens,
            heads,
            kv_heads,
            size,
            pages.values.shape[3],
            *q_stride[:2],
            *k_stride[:2],
            *v_stride[:2],
            dim,
            num_positions,
            interleaved,
            num_blocks,
            block_size,
            ACTIVATION_DTYPES[q.dtype],
            pages.keys.dtype,
        )
    )
