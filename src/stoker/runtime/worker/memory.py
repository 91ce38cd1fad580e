"""The memory budget of a device: computes the size of the KV cache and logs how the memory is used."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from stoker.base.config import Limits, RuntimeConfig
from stoker.base.errors import ConfigError
from stoker.core.forward_batch import KVCache
from stoker.core.model_config import ModelConfig
from stoker.layers.decoder import kv_width, local_kv_shapes
from stoker.layers.state_cache import StateCache
from stoker.runtime.schedule.planner import max_sampled_tokens

_DEFAULT_FRACTION = {"cuda": 0.9, "cpu": 0.5}


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes of one device. `free`: free memory after the weights were loaded."""

    device: str
    total: int
    weights: int
    free: int
    activations: int | None  # peak of the largest step; None: not measured
    graphs: int
    kv: int
    num_blocks: int
    tokens_per_block: int
    states: int = 0  # recurrent states of sequences, and snapshots of them

    @property
    def left_over(self) -> int:
        """The bytes that remain unused."""
        return self.free - (self.activations or 0) - self.graphs - self.kv - self.states

    @property
    def purposes(self) -> dict[str, int]:
        """The total, and the bytes of each purpose; these sum up to the total."""
        return {
            "total": self.total,
            "others": max(self.total - self.free - self.weights, 0),
            "weights": self.weights,
            "activations": self.activations or 0,
            "graphs": self.graphs,
            "KV cache": self.kv,
            **({"states": self.states} if self.states else {}),
            "left over": self.left_over,
        }

    def table(self) -> str:
        """The budget as a table for the log."""
        tokens = self.num_blocks * self.tokens_per_block
        notes = {
            "others": "libraries, other processes",
            "activations": "not measured on this device" if self.activations is None else "largest step",
            "KV cache": f"{self.num_blocks} blocks of {self.tokens_per_block} = {tokens} tokens",
        }
        lines = [f"  {name:<12} {size / 2**30:9.3f} GiB  {notes.get(name, '')}".rstrip() for name, size in self.purposes.items()]
        return "\n".join([f"memory of {self.device}:", *lines])


def block_bytes(model: ModelConfig, block_size: int, dtype: torch.dtype, layers: range | None = None, tensor_parallel: int = 1) -> int:
    """The number of bytes of one block in all `layers` of a rank."""
    layers = range(model.num_layers) if layers is None else layers
    return sum(kv_width(model, layer, tensor_parallel) for layer in layers) * block_size * dtype.itemsize


def free_memory(device: torch.device) -> tuple[int, int]:
    """(free, total) memory of the device in bytes. Free memory includes what PyTorch's allocator has reserved but does not use."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # Memory that the allocator has cached is available too.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return tuple(int(fields[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))  # type: ignore[return-value]


def num_kv_blocks(free: int, bytes_per_block: int, limits: Limits, config: RuntimeConfig, device: str) -> int:
    """The number of KV cache blocks that `config` requests and that fit, at most what all sequences can use.

    It is the smaller one of the requested token count and the fraction of `free` bytes. Raises ConfigError if not enough blocks fit.
    """
    size = limits.tokens_per_block
    fraction = config.kv_cache_fraction if config.kv_cache_fraction is not None else _DEFAULT_FRACTION[device]
    fitting = int(free * fraction) // max(bytes_per_block, 1)  # blocks without attention take no memory
    if config.kv_cache_tokens is not None:
        requested = -(-config.kv_cache_tokens // size)
        if config.kv_cache_fraction is None and requested * bytes_per_block > free:
            need, have = requested * bytes_per_block / 2**30, free / 2**30
            raise ConfigError(
                f"kv_cache_tokens={config.kv_cache_tokens} needs {need:.2f} GiB and {have:.2f} GiB are free.",
                cure=f"Use at most {free // bytes_per_block * size}.",
            )
        return requested if config.kv_cache_fraction is None else min(requested, fitting)
    sequences = config.max_num_sequences or config.max_batch_size or limits.max_batch_size
    useful = sequences * -(-limits.max_seq_len // size)
    if config.prefix_reuse:
        useful *= 2  # to cache the blocks of as many finished sequences
    if fitting < 1:
        raise ConfigError(
            f"{fraction:g} of {free / 2**30:.2f} GiB holds no KV block of {bytes_per_block / 2**20:.1f} MiB.",
            cure="Raise kv_cache_fraction, or use a smaller engine.",
        )
    return min(fitting, useful)


def num_snapshots(free: int, slot_bytes: int, num_rows: int, num_verified: int, config: RuntimeConfig, device: str) -> int:
    """The number of snapshots of recurrent states that are kept for prefix reuse, beside the states of `num_rows` sequences and those of
    `num_verified` tokens of a step with drafts.

    It is twice the number of sequences, if that takes at most a quarter of the memory that the states of the sequences leave. `free` and
    `slot_bytes`, the size of one sequence's states, are in bytes. Raises ConfigError if the states of the sequences do not fit.
    """
    fraction = config.kv_cache_fraction if config.kv_cache_fraction is not None else _DEFAULT_FRACTION[device]
    needed = (num_rows + 1 + num_verified) * slot_bytes
    room = int(free * fraction) - needed
    if room <= 0:
        fitting = max(int(free * fraction) // slot_bytes - 1 - num_verified, 0)
        smaller = "Use fewer draft tokens, or speculate=none." if num_verified else "Use a smaller engine."
        drafts = f" and of {num_verified} tokens of a step with drafts" if num_verified else ""
        raise ConfigError(
            f"max_num_sequences={num_rows} is refused: the recurrent states of {num_rows} sequences{drafts} need "
            f"{needed / 2**30:.2f} GiB, and {int(free * fraction) / 2**30:.2f} GiB are available for them.",
            cure=f"Use at most {fitting} for max_num_sequences and max_batch_size." if fitting else smaller,
        )
    return min(2 * num_rows, room // 4 // slot_bytes) if config.prefix_reuse else 0


def num_verified_slots(max_rows: int, max_drafts: int) -> int:
    """The number of slots, the last ones, for the states after the tokens of a step of `max_rows` rows that verifies drafts; 0 without
    drafts. One more than it has tokens, for padding."""
    return min(max_rows * (1 + max_drafts), max_sampled_tokens(max_rows)) + 1 if max_drafts else 0


def make_caches(
    model: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device,
    layers: range | None = None, tensor_parallel: int = 1, states: StateCache | None = None,
) -> list[KVCache]:  # fmt: skip
    """A zeroed cache for each layer of a rank, with its recurrent state in `states`. Layers that share keys and values have one cache.

    Unwritten slots must be finite, because attention multiplies masked values by zero.
    """
    caches: list[KVCache] = []
    layers = range(model.num_layers) if layers is None else layers
    for i, layer in enumerate(layers):
        if (shared := model.kv_layer(layer)) != layer:
            caches.append(caches[layers.index(shared)])
            continue
        heads, key, value = local_kv_shapes(model, layer, tensor_parallel)
        shape = (num_blocks, heads, block_size)
        keys = _zeros((*shape, key), dtype, device)
        state = states.layers[i] if states is not None else None
        caches.append(KVCache(keys, _zeros((*shape, value), dtype, device) if value else None, state=state))
    return caches


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros.

    On the CPU it consists of zero pages of the operating system, which use memory only when they are written. torch.zeros writes all pages,
    which takes 70 s for 12 GB on a small machine.
    """
    if device.type != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
