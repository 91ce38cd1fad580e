"""Block events: they describe the prefix index exactly, and have the form that vLLM's subscribers read."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from stoker.base.config import RuntimeConfig
from stoker.base.errors import ConfigError
from stoker.base.types import SamplingParams
from stoker.runtime.kv.events.batches import make_batch
from stoker.runtime.kv.events.log import BlockEventLog
from stoker.runtime.kv.events.publisher import EventPublisher
from stoker.runtime.kv.events.wire import END, encode_batch
from stoker.runtime.kv.manager import KVCacheManager
from stoker.runtime.request import PrefixRoot, Sequence, TokenRequest

SIZE = 4


def sequence(tokens: list[int], salt: str = "", adapter: int = -1) -> Sequence:
    request = TokenRequest(request_id="r", prompt_ids=tokens, params=SamplingParams(max_tokens=1), cache_salt=salt, adapter=adapter)
    seq = Sequence(0, request, 0, 0.0)
    seq.max_computed = len(tokens)
    return seq


def compute(cache: KVCacheManager, seq: Sequence) -> None:
    """Compute and commit the tokens of a sequence, and release its blocks."""
    cache.admit(seq, cache.match(seq))
    cache.register(seq, len(seq.tokens))
    cache.retire(seq)
    cache.release(seq)


def expected_hash(root: PrefixRoot, tokens: list[int]) -> int:
    """The hash of the last block of `tokens`, computed from its definition."""
    digest = hashlib.sha256(repr(root).encode()).digest()
    for start in range(0, len(tokens), SIZE):
        digest = hashlib.sha256(digest + array("i", tokens[start : start + SIZE]).tobytes()).digest()
    return int.from_bytes(digest, "big") & (1 << 64) - 1


def events_of(cache: KVCacheManager) -> list[dict[str, Any]]:
    """The events since the last call, as a subscriber without Stoker's types decodes them."""
    assert cache.event_log is not None
    _, events, rank = msgspec.msgpack.decode(encode_batch(make_batch(cache.event_log.pop(), SIZE, 12.5)))
    assert rank == 0
    return events


@pytest.fixture
def cache() -> KVCacheManager:
    return KVCacheManager(6, SIZE, prefix_reuse=True, event_log=BlockEventLog())


def test_the_blocks_of_a_prompt_are_one_event(cache: KVCacheManager) -> None:
    tokens = list(range(10))
    compute(cache, sequence(tokens, salt="tenant"))
    hashes = [expected_hash("tenant", tokens[:4]), expected_hash("tenant", tokens[:8])]
    assert events_of(cache) == [
        {
            "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None, "token_ids": tokens[:8], "block_size": 4,
            "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [["tenant"], None],
        }
    ]  # fmt: skip


def test_an_event_names_the_block_before_and_the_adapter(cache: KVCacheManager) -> None:
    compute(cache, sequence([1] * 5, adapter=2))
    events_of(cache)
    compute(cache, sequence([1] * 4 + [2] * 5, adapter=2))
    (event,) = events_of(cache)
    assert event["parent_block_hash"] == expected_hash((2, ""), [1] * 4)
    assert (event["token_ids"], event["lora_id"], event["lora_name"]) == ([2] * 4, 2, "adapter-2")
    assert "extra_keys" not in event


def test_evicted_and_poisoned_blocks_are_removed(cache: KVCacheManager) -> None:
    compute(cache, sequence([1] * 9))
    stored = events_of(cache)[0]["block_hashes"]
    compute(cache, sequence([2] * 24))  # needs all six blocks
    removed = [event for event in events_of(cache) if event["type"] == "BlockRemoved"]
    assert removed == [{"type": "BlockRemoved", "block_hashes": [stored[1], stored[0]], "medium": "GPU"}]
    seq = sequence([2] * 9)
    cache.admit(seq, cache.match(seq))
    cache.poison(seq.blocks)
    (event,) = events_of(cache)
    assert (event["type"], len(event["block_hashes"])) == ("BlockRemoved", 3)  # one was evicted for the third block of `seq`


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=24), st.sampled_from(["", "a"]), st.integers(0, 9)), max_size=30)
)
def test_events_describe_the_prefix_index(prompts: list[tuple[list[int], str, int]]) -> None:
    cache = KVCacheManager(6, SIZE, prefix_reuse=True, event_log=BlockEventLog())
    present: set[int] = set()
    for tokens, salt, dice in prompts:
        seq = sequence(tokens, salt)
        if dice == 0 and len(tokens) > SIZE:
            cache.admit(seq, cache.match(seq))
            cache.poison(seq.blocks)
            cache.retire(seq)
            cache.release(seq)
        else:
            compute(cache, seq)
        for event in events_of(cache):
            hashes = event["block_hashes"]
            if event["type"] == "BlockStored":
                assert len(event["token_ids"]) == SIZE * len(hashes) and not present.intersection(hashes)
                present.update(hashes)
            else:
                assert present.issuperset(hashes)
                present.difference_update(hashes)
    assert cache.index is not None
    nodes = [node for node in map(cache.index.node_of, range(6)) if node is not None]
    assert present == {int.from_bytes(node.digest[-8:], "big") for node in nodes}


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    publisher = EventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", "kv@test", SIZE)
    yield publisher
    publisher.close()
    publisher.close()


def test_subscribers_receive_numbered_batches_and_request_those_that_they_missed(cache: KVCacheManager, publisher: EventPublisher) -> None:
    assert publisher.address.replay is not None and cache.event_log is not None
    with zmq.Context() as context, context.socket(zmq.SUB) as sub, context.socket(zmq.REQ) as req:
        for socket in (sub, req):
            socket.set(zmq.RCVTIMEO, 20_000)
            socket.set(zmq.LINGER, 0)
        sub.subscribe(b"kv@")
        sub.connect(publisher.address.endpoint)
        number = -1
        while number < 0:  # until the subscription has arrived
            compute(cache, sequence([len(cache.event_log._changes)] * 4))
            compute(cache, sequence([7] * 24))
            publisher.publish(cache.event_log.pop())
            if sub.poll(50):
                topic, raw, payload = sub.recv_multipart()
                number = int.from_bytes(raw, "big")
        assert topic == b"kv@test"
        req.connect(publisher.address.replay)
        req.send((0).to_bytes(8, "big"))
        raw, first = req.recv_multipart()
        assert (int.from_bytes(raw, "big"), msgspec.msgpack.decode(first)[1]) == (0, [{"type": "AllBlocksCleared"}])
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.set(zmq.RCVTIMEO, 20_000)
        dealer.set(zmq.LINGER, 0)
        dealer.connect(publisher.address.replay)
        dealer.send_multipart((b"", number.to_bytes(8, "big")))
        empty, raw, again = dealer.recv_multipart()
        assert (empty, int.from_bytes(raw, "big"), again) == (b"", number, payload)
        while raw != END:
            _, raw, again = dealer.recv_multipart()
        assert again == b""


def test_a_port_in_use_is_refused(publisher: EventPublisher) -> None:
    with pytest.raises(ConfigError, match=r"kv_events='tcp://.*' cannot be used: Address already in use"):
        EventPublisher(publisher.address.endpoint, None, "", SIZE)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_events": "5557"}, r"kv_events='5557' is refused\. Use tcp://HOST:PORT"),
        ({"kv_events": "tcp://*:5557", "kv_events_replay": "udp://*:1"}, "kv_events_replay='udp://.*' is refused"),
        ({"kv_events_replay": "tcp://*:5558"}, "kv_events_replay='tcp://.*' has no effect without kv_events"),
        ({"kv_events_topic": "kv"}, "kv_events_topic='kv' has no effect"),
        ({"kv_events": "tcp://*:5557", "prefix_reuse": False}, "kv_events needs prefix_reuse"),
    ],
)
def test_useless_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RuntimeConfig(**fields)
