"""Reads and writes blocks of one rank's KV cache: as stored bytes, or as values that do not depend on its dtype and calibration."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from stoker.core.forward_batch import KVCache
from stoker.core.model_config import AttentionConfig, ModelConfig
from stoker.kernels.reference.rope import hadamard_transform, quantize, subtracted_mean
from stoker.quant.key_spreading import rotation
from stoker.runtime.transfer.layout import LayerLayout


class RankPages:
    """The caches of a rank's layers. Blocks are copied through host memory, on a GPU in a stream of their own.

    Called from threads other than that of the step loop, for blocks that no step writes meanwhile.
    """

    def __init__(self, caches: list[KVCache], model: ModelConfig, first_layer: int, device: torch.device) -> None:
        self.caches = caches
        self.num_blocks = caches[0].keys.shape[0] if caches else 0
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        attentions = [layer.attention for layer in model.layers[first_layer : first_layer + len(caches)]]
        self._rotations = [rotation(each) if isinstance(each, AttentionConfig) else (0, False) for each in attentions]

    def layer_layout(self, layer: int, heads: list[int], key_size: int, value_size: int) -> LayerLayout:
        """The layout of a local layer, with a digest of the scales, balance and mean of each head."""
        return LayerLayout(heads, key_size, value_size, [_digest(self.caches[layer], head) for head in range(len(heads))])

    def block_bytes(self, layer: int, num_heads: int, dtype: torch.dtype | None) -> int:
        """The bytes of one block of `num_heads` heads of a layer, keys and values together, in `dtype` or as stored."""
        cache = self.caches[layer]
        pages = [each for each in (cache.keys, cache.values) if each is not None]
        return sum(num_heads * each.shape[2] * each.shape[3] * (dtype or each.dtype).itemsize for each in pages)

    @torch.inference_mode()
    def read(self, layer: int, heads: list[int], blocks: list[int], first_block: int, dtype: torch.dtype | None) -> list[Tensor]:
        """Keys, and values unless keys contain them, of heads in blocks: uint8 [blocks × heads × block size × size × bytes], on the host.

        `dtype`: of the values after dequantization and without balance and mean; None: as stored. `first_block` is the index in the prompt
        of the first block, on which the mean depends.
        """
        cache = self.caches[layer]
        with self._side_stream():
            keys = self._select(cache.keys, heads, blocks)
            values = None if cache.values is None else self._select(cache.values, heads, blocks)
            if dtype is not None:
                keys = self._plain_keys(cache, layer, keys, heads, first_block).to(dtype)
                values = None if values is None else _scaled(values, cache.value_scale, heads).to(dtype)
            return [each.contiguous().view(torch.uint8).flatten().cpu() for each in (keys, values) if each is not None]

    @torch.inference_mode()
    def write(
        self, layer: int, heads: list[int], blocks: list[int], first_block: int, data: memoryview, dtype: torch.dtype | None
    ) -> None:  # fmt: skip
        """Store what `read` returned for the same number of heads and blocks: keys, then values. Raises ValueError for another size."""
        cache = self.caches[layer]
        expected = len(blocks) * self.block_bytes(layer, len(heads), dtype)
        if len(data) != expected:
            raise ValueError(f"a layer of {len(data)} bytes instead of {expected}")
        with self._side_stream(), self._completed():
            start = 0
            for is_key, pages in ((True, cache.keys), (False, cache.values)):
                if pages is None:
                    continue
                shape = (len(blocks), len(heads), pages.shape[2], pages.shape[3])
                kind = dtype or pages.dtype
                size = shape[0] * shape[1] * shape[2] * shape[3] * kind.itemsize
                x = torch.frombuffer(data, dtype=torch.uint8, count=size, offset=start).to(self._device).view(kind).view(shape)
                start += size
                if dtype is not None:
                    x = self._stored_keys(cache, layer, x, heads, first_block) if is_key else _quantized(x, cache.value_scale, heads, pages)
                self._store(pages, heads, blocks, x)

    @contextlib.contextmanager
    def _side_stream(self) -> Iterator[None]:
        """Use the stream of transfers in the block."""
        with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def _completed(self) -> Iterator[None]:
        """Wait at the end of the block, also after an error, until everything that it has launched is complete."""
        try:
            yield
        finally:
            if self._stream is not None:
                self._stream.synchronize()

    def _select(self, pages: Tensor, heads: list[int], blocks: list[int]) -> Tensor:
        """[blocks, heads, block size, size]. Selected as bytes, because index_select does not support every dtype of 8 bits."""
        index = torch.tensor(blocks, device=self._device)
        chosen = pages.view(torch.uint8).index_select(0, index)
        if heads != list(range(pages.shape[1])):
            chosen = chosen.index_select(1, torch.tensor(heads, device=self._device))
        return chosen.view(pages.dtype)

    def _store(self, pages: Tensor, heads: list[int], blocks: list[int], x: Tensor) -> None:
        """Store x [blocks, heads, block size, size]."""
        target, source = pages.view(torch.uint8), x.contiguous().view(torch.uint8)
        index = torch.tensor(blocks, device=self._device)
        if heads == list(range(pages.shape[1])):
            target.index_copy_(0, index, source)
        else:
            target[index[:, None], torch.tensor(heads, device=self._device)] = source

    def _plain_keys(self, cache: KVCache, layer: int, keys: Tensor, heads: list[int], first_block: int) -> Tensor:
        """Keys as they are after the rotary embedding, float32 if they were quantized."""
        keys = _scaled(keys, cache.key_scale, heads)
        if cache.key_mean is not None:
            keys = keys + self._means(cache, heads, keys, first_block)
        if cache.key_balance is not None:
            keys = hadamard_transform(keys, *self._rotations[layer]).div(cache.key_balance[heads, 0][:, None])
        return keys

    def _stored_keys(self, cache: KVCache, layer: int, keys: Tensor, heads: list[int], first_block: int) -> Tensor:
        """Keys as `rope_store` stores them, from those after the rotary embedding."""
        if cache.key_balance is not None:
            keys = hadamard_transform(keys.float() * cache.key_balance[heads, 0][:, None], *self._rotations[layer])
        if cache.key_mean is not None:
            keys = keys.float() - self._means(cache, heads, keys, first_block)
        return _quantized(keys, cache.key_scale, heads, cache.keys)

    def _means(self, cache: KVCache, heads: list[int], keys: Tensor, first_block: int) -> Tensor:
        """float32 [blocks, heads, block size, size]: the means that are subtracted from `keys` before they are stored."""
        count, size = keys.shape[0], keys.shape[2]
        positions = torch.arange(first_block * size, (first_block + count) * size, device=self._device)
        means: Tensor = subtracted_mean(cache, positions)[:, heads].unflatten(0, (count, size))
        return means.transpose(1, 2)


def _scaled(x: Tensor, scale: Tensor | None, heads: list[int]) -> Tensor:
    """x [blocks, heads, block size, size] dequantized, if there is a scale."""
    return x if scale is None else x.float() * scale[heads][:, None, None]


def _quantized(x: Tensor, scale: Tensor | None, heads: list[int], pages: Tensor) -> Tensor:
    """x in the dtype of `pages`, quantized if there is a scale."""
    return x.to(pages.dtype) if scale is None else quantize(x.float() / scale[heads][:, None, None], pages.dtype)


def _digest(cache: KVCache, head: int) -> bytes:
    """A digest of the calibration of one head; empty for a cache that is not quantized."""
    if cache.key_scale is None:
        return b""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in (cache.key_scale, cache.value_scale, cache.key_balance, cache.key_mean):
        if tensor is not None:
            digest.update(tensor[head].float().cpu().contiguous().numpy().tobytes())
    return digest.digest()
