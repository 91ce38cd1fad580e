"""Converts the changes of a step to a batch of events."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from stoker.runtime.kv.events.log import BlockChange
from stoker.runtime.kv.events.wire import DEVICE_MEDIUM, BlockRemoved, BlockStored, Event, EventBatch, adapter_and_salt, block_hash
from stoker.runtime.kv.prefix_index import PrefixNode


def make_batch(changes: Iterable[BlockChange], tokens_per_block: int, now_s: float) -> EventBatch:
    """The batch for changes in their order. Consecutive blocks of one prefix, and consecutive removals, share an event."""
    events: list[Event] = []
    last: BlockChange | None = None
    for change in changes:
        node = change.node
        event = events[-1] if events else None
        if not change.stored:
            if isinstance(event, BlockRemoved):
                event.block_hashes.append(block_hash(node))
            else:
                events.append(BlockRemoved(block_hashes=[block_hash(node)], medium=DEVICE_MEDIUM))
        elif isinstance(event, BlockStored) and last is not None and node.parent is last.node:
            _extend(event, node)
        else:
            events.append(_first_of(node, tokens_per_block))
        last = change
    return EventBatch(now_s, events, 0)


def _first_of(node: PrefixNode, tokens_per_block: int) -> BlockStored:
    """An event for one block."""
    parent, root = node.parent, node.parent
    while isinstance(root, PrefixNode):
        root = root.parent
    adapter, salt = adapter_and_salt(root)
    is_first = not isinstance(parent, PrefixNode)
    return BlockStored(
        block_hashes=[block_hash(node)],
        parent_block_hash=block_hash(parent) if isinstance(parent, PrefixNode) else None,
        token_ids=_token_ids(node),
        block_size=tokens_per_block,
        lora_id=adapter,
        medium=DEVICE_MEDIUM,
        lora_name=None if adapter is None else f"adapter-{adapter}",
        extra_keys=[[salt]] if salt and is_first else None,
    )


def _extend(event: BlockStored, node: PrefixNode) -> None:
    """Append the block after the last one of `event`."""
    event.block_hashes.append(block_hash(node))
    event.token_ids += _token_ids(node)
    if event.extra_keys is not None:
        event.extra_keys.append(None)


def _token_ids(node: PrefixNode) -> list[int]:
    """The token ids of a block, which its node holds as bytes."""
    return array("i", node.chunk).tolist()
