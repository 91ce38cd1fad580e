"""Converts the changes of a step to a batch of events."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from stoker.runtime.kv.events.log import BlockChanges
from stoker.runtime.kv.events.wire import DEVICE_MEDIUM, BlockRemoved, BlockStored, Event, EventBatch, adapter_and_salt, block_hashes
from stoker.runtime.kv.prefix_index import PrefixNode


def make_batch(changes: Iterable[BlockChanges], tokens_per_block: int, now_s: float) -> EventBatch:
    """The batch for changes in their order. Consecutive blocks of one prefix, and consecutive removals, share an event."""
    events: list[Event] = []
    last: PrefixNode | None = None  # of the newest event, if that is a BlockStored
    for nodes, stored in changes:
        event = events[-1] if events else None
        if not stored:
            hashes, last = list(block_hashes(nodes)), None
            if isinstance(event, BlockRemoved):
                event.block_hashes += hashes
            else:
                events.append(BlockRemoved(block_hashes=hashes, medium=DEVICE_MEDIUM))
            continue
        for node in nodes:
            if isinstance(event, BlockStored) and node.parent is last:
                _extend(event, node)
            else:
                event = _first_of(node, tokens_per_block)
                events.append(event)
            last = node
    return EventBatch(now_s, events, 0)


def _first_of(node: PrefixNode, tokens_per_block: int) -> BlockStored:
    """An event for one block."""
    parent, root = node.parent, node.parent
    while isinstance(root, PrefixNode):
        root = root.parent
    adapter, salt = adapter_and_salt(root)
    is_first = not isinstance(parent, PrefixNode)
    return BlockStored(
        block_hashes=[*block_hashes([node])],
        parent_block_hash=block_hashes([parent])[0] if isinstance(parent, PrefixNode) else None,
        token_ids=_token_ids(node),
        block_size=tokens_per_block,
        lora_id=adapter,
        medium=DEVICE_MEDIUM,
        lora_name=None if adapter is None else f"adapter-{adapter}",
        extra_keys=[[salt]] if salt and is_first else None,
    )


def _extend(event: BlockStored, node: PrefixNode) -> None:
    """Append the block after the last one of `event`."""
    event.block_hashes += block_hashes([node])
    event.token_ids += _token_ids(node)
    if event.extra_keys is not None:
        event.extra_keys.append(None)


def _token_ids(node: PrefixNode) -> list[int]:
    """The token ids of a block, which its node holds as bytes."""
    return array("i", node.chunk).tolist()
