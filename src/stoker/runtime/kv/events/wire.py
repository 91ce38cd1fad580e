"""The messages of vLLM's KV event stream, as Dynamo, llm-d and `stoker route` read them.

A message has three frames: the topic, a sequence number (8 bytes, big-endian) and a batch in msgpack. A batch is an array, and its events
are maps with the key `type`, as vLLM publishes them since its pull request 42892; `decode_batch` reads this form only. A subscriber that
missed batches sends the number of the first one to the replay address, from a REQ socket or with an empty frame in front, and receives
(empty frame, number, batch) for each batch that is still in memory, then the number END with an empty batch.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence as Seq
from functools import lru_cache

import msgspec

from stoker.runtime.kv.prefix_index import PrefixNode
from stoker.runtime.request import PrefixRoot

DEVICE_MEDIUM = "GPU"  # vLLM's name for the memory in which steps read blocks, also used on a CPU
END = (-1).to_bytes(8, "big", signed=True)  # sequence number of the last message of a replay
MAX_BATCH_BYTES = 64 << 20


class EventAddress(msgspec.Struct, frozen=True):
    """Where the events of an executor are published: ZeroMQ addresses with the actual ports."""

    endpoint: str
    replay: str | None
    topic: str


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    """Consecutive blocks of one prefix that can be reused from now on. `token_ids` has `block_size` ids for each hash."""

    block_hashes: list[int]
    parent_block_hash: int | None  # of the block before the first one; None at the start of a prompt
    token_ids: list[int]
    block_size: int
    lora_id: int | None  # index of the adapter
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None  # per block; the first block of a prompt has its cache salt


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    """Blocks that cannot be reused any more."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """No block can be reused any more: the first event of an executor."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """The events of one step."""

    ts: float  # seconds since 1970
    events: list[Event]
    data_parallel_rank: int | None = None


encode_batch = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(EventBatch).decode


def decode_batch(payload: bytes) -> EventBatch:
    """The batch of a message. Raises ValueError for a malformed one."""
    if len(payload) > MAX_BATCH_BYTES:
        raise ValueError(f"a batch of {len(payload)} bytes exceeds the limit of {MAX_BATCH_BYTES}")
    try:
        return _decode(payload)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"a batch is malformed: {error}") from None


def hashes_of_digests(digests: Seq[bytes]) -> tuple[int, ...]:
    """The block hash for each digest of the prefix index: its last eight bytes as an unsigned number, as vLLM shortens its hashes."""
    return _hash_format(len(digests)).unpack(b"".join(digests))


@lru_cache(4096)
def _hash_format(num_digests: int) -> struct.Struct:
    """The format of `num_digests` digests of 32 bytes, of which the last eight are read."""
    return struct.Struct(">" + "24xQ" * num_digests)


def block_hashes(nodes: Seq[PrefixNode]) -> tuple[int, ...]:
    """The hash of each block, which covers its adapter, its cache salt, and all tokens up to its end."""
    return hashes_of_digests([node.digest for node in nodes])


def adapter_and_salt(root: PrefixRoot) -> tuple[int | None, str]:
    """(index of the adapter or None, cache salt) of a prefix root."""
    return (None, root) if isinstance(root, str) else root
