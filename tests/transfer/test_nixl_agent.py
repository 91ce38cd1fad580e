"""Reads of NIXL as few regions, connections that are kept between transfers, and the thread of an agent that sleeps between events."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from pairs import Pair, Side, request
from test_transfers import prompt

from stoker.core.forward_batch import KVCache
from stoker.runtime.transfer import nixl_agent
from stoker.runtime.transfer.layout import LayerLayout, LayerRead, RankLayout
from stoker.runtime.transfer.nixl_agent import NixlAgent, block_runs
from stoker.runtime.worker_group.hosts.link import LinkError

NUM_BLOCKS, HEADS = 24, 3
LIMIT_S = 30.0
SOURCE = """
import sys, msgspec
from pathlib import Path
from test_nixl_agent import HEADS, agent_of, layout_of

agent = agent_of(HEADS)
for pages in agent.caches[0].keys, agent.caches[0].values:
    pages.copy_(pages.new_ones(pages.shape).cumsum(0))
Path(sys.argv[1]).write_bytes(msgspec.msgpack.encode(layout_of(agent, HEADS)))
print("ready", flush=True)
sys.stdin.read()
"""


def test_runs_of_blocks_ascend_on_both_sides() -> None:
    assert block_runs([4, 5, 6, 9], [1, 2, 3, 4]) == [(4, 1, 3), (9, 4, 1)]
    assert block_runs([6, 5, 4], [3, 2, 1]) == [(4, 1, 3)]
    assert block_runs([4, 5, 6], [3, 2, 1]) == [(4, 3, 1), (5, 2, 1), (6, 1, 1)]
    assert block_runs([], []) == []


def agent_of(heads: int) -> NixlAgent:
    pages = [torch.randn(NUM_BLOCKS, heads, 4, 8) for _ in range(2)]
    return NixlAgent([KVCache(*pages)], torch.device("cpu"))


def layout_of(agent: NixlAgent, heads: int, port: int = 1) -> RankLayout:
    layer = LayerLayout(list(range(heads)), 8, 8, [])
    return RankLayout(host="a", port=port, first_layer=0, layers=[layer], nixl=agent.metadata, pages=agent.pages, device=-1)


@pytest.mark.parametrize(
    ("num_source", "source", "own"),
    [(HEADS, [0, 1, 2], [0, 1, 2]), (HEADS, [2, 0, 1], [0, 1, 2]), (HEADS + 1, [1, 2, 3], [0, 1, 2]), (HEADS, [0, 1], [1, 2])],
)
def test_merged_reads_copy_what_reads_of_single_blocks_copy(
    monkeypatch: pytest.MonkeyPatch, num_source: int, source: list[int], own: list[int]
) -> None:
    pytest.importorskip("nixl")
    theirs, ours = agent_of(num_source), agent_of(HEADS)
    sizes: list[int] = []
    start_read = NixlAgent.start_read

    def counted(self: NixlAgent, name: str, local: Any, remote: Any, device: int) -> Any:
        sizes.append(len(local))
        return start_read(self, name, local, remote, device)

    monkeypatch.setattr(NixlAgent, "start_read", counted)
    reader = ours.open_reader(layout_of(ours, HEADS), layout_of(theirs, num_source))
    dice = random.Random(0)
    consecutive = (list(range(3, 15)), list(range(7, 19)))
    for blocks, targets in [consecutive, *(tuple(dice.sample(range(NUM_BLOCKS), 9) for _ in range(2)) for _ in range(8))]:
        for pages in ours.caches[0].keys, ours.caches[0].values:
            pages.zero_()
        num_bytes = reader.copy([LayerRead(0, source, 0, own)], block_runs(blocks, targets))
        reader.wait(10.0)
        assert num_bytes == 2 * len(blocks) * len(own) * 4 * 8 * 4
        for name in ("keys", "values"):
            expected, other = torch.zeros(NUM_BLOCKS, HEADS, 4, 8), getattr(theirs.caches[0], name)
            for block, target in zip(blocks, targets, strict=True):
                expected[target, own] = other[block, source]
            assert torch.equal(getattr(ours.caches[0], name), expected)
    is_whole = num_source == HEADS and source == own == [0, 1, 2]
    assert sizes[0] == (2 if is_whole else 2 * 12 * (2 if source == [2, 0, 1] else 1))
    assert reader.close()
    ours.close()
    theirs.close()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often agents were connected and disconnected."""
    api = pytest.importorskip("nixl._api").nixl_agent
    counts: Counter[str] = Counter()
    for name in ("add_remote_agent", "remove_remote_agent"):

        def counted(self: Any, argument: Any, name: str = name, function: Any = getattr(api, name)) -> Any:
            counts[name.split("_")[0]] += 1
            return function(self, argument)

        monkeypatch.setattr(api, name, counted)
    return counts


def test_two_transfers_use_one_connection(tiny_engine: Path, pair: type[Pair], calls: Counter[str]) -> None:
    both = pair(tiny_engine, transfer_backend="nixl")
    for seed in (80, 81):
        both.generate(request(prompt(seed, 60)))
    assert both.decode.stats.num_imports == 2
    assert 0 < both.decode.stats.import_read_time_s < both.decode.stats.import_time_s
    assert calls == {"add": 1}


def test_a_source_that_was_started_again_is_connected_again(tiny_engine: Path, pair: type[Pair], calls: Counter[str]) -> None:
    both = pair(tiny_engine, transfer_backend="nixl")
    both.generate(request(prompt(82, 60)))
    info = both.prefill.executor.info.transfer
    assert info is not None
    both.prefill.check_idle()
    both.prefill.executor.close()
    both.prefill = Side(tiny_engine, transfer_backend="nixl", transfer=f"127.0.0.1:{info.port}")
    wanted = request(prompt(83, 60))
    found = both.generate(wanted)
    assert (both.decode.stats.num_imports, both.decode.stats.num_failed_imports) == (2, 0)
    assert calls == {"add": 2, "remove": 1}
    assert found == pair(tiny_engine).prefill.generate(wanted)


def test_an_agent_whose_transfer_fails_is_dropped(
    tiny_engine: Path, pair: type[Pair], monkeypatch: pytest.MonkeyPatch, calls: Counter[str]
) -> None:
    both = pair(tiny_engine, transfer_backend="nixl")
    both.generate(request(prompt(84, 60)))
    with monkeypatch.context() as patch:
        patch.setattr(NixlAgent, "state", lambda self, handle: "ERR")
        both.generate(request(prompt(85, 60)))
    assert both.decode.stats.num_failed_imports == 1 and calls == {"add": 1, "remove": 1}
    both.generate(request(prompt(86, 60)))
    assert both.decode.stats.num_imports == 2 and calls == {"add": 2, "remove": 1}


def test_connections_are_bounded_and_end_when_nothing_uses_them(monkeypatch: pytest.MonkeyPatch, calls: Counter[str]) -> None:
    monkeypatch.setattr(nixl_agent, "MAX_REMOTE_AGENTS", 2)
    ours, others = agent_of(HEADS), [agent_of(HEADS) for _ in range(3)]
    own = layout_of(ours, HEADS)
    layouts = [layout_of(other, HEADS, port) for port, other in enumerate(others)]
    readers = [ours.open_reader(own, layout) for layout in layouts]
    assert calls == {"add": 3}  # all are used
    for reader in readers:
        assert reader.close() and reader.close()
    again = [ours.open_reader(own, layouts[2]) for _ in range(2)]
    assert calls == {"add": 3, "remove": 1}  # the one that was not used for the longest time
    ours.disconnect(again[0]._remote, has_failed=True)
    assert calls["remove"] == 1
    with pytest.raises(LinkError, match="still uses it"):
        ours.open_reader(own, layouts[2])
    assert again[1].close() and calls == {"add": 3, "remove": 2}
    assert ours.open_reader(own, layouts[2]).close() and calls["add"] == 4
    ours.close()
    assert calls["remove"] == 4
    for other in others:
        other.close()


def test_the_thread_of_an_agent_sleeps_while_nothing_is_transferred() -> None:
    pytest.importorskip("nixl")
    tasks = Path("/proc/self/task")
    before = {task.name for task in tasks.iterdir()}
    agent = agent_of(HEADS)
    threads = [task for task in tasks.iterdir() if task.name not in before]
    assert threads  # that of NIXL makes progress where this process is read
    deadline = time.monotonic() + LIMIT_S
    while {state := (thread / "stat").read_text().rpartition(") ")[2][0] for thread in threads} != {"S"}:
        assert time.monotonic() < deadline, f"a thread of the agent is never idle: {state}"
    agent.close()


@pytest.mark.parametrize("transports", ["", "tcp"])
def test_a_process_that_waits_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, transports: str) -> None:
    """Connections and, over TCP, reads need progress in the process that is read, of which only NIXL's thread runs."""
    pytest.importorskip("nixl")
    if transports:
        monkeypatch.setenv("UCX_TLS", transports)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([path for path in sys.path if path])}
    command = [sys.executable, "-c", SOURCE, str(tmp_path / "layout")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as source:
        assert source.stdout is not None and b"ready\n" in iter(source.stdout.readline, b"")
        ours = agent_of(HEADS)
        layout = msgspec.msgpack.decode((tmp_path / "layout").read_bytes(), type=RankLayout)
        heads = list(range(HEADS))
        for blocks, targets in (([1, 2, 3], [7, 8, 9]), ([20, 5, 6], [0, 3, 1])):
            reader = ours.open_reader(layout_of(ours, HEADS), layout)
            reader.copy([LayerRead(0, heads, 0, heads)], block_runs(blocks, targets))
            reader.wait(LIMIT_S)
            assert reader.close()
            for pages in ours.caches[0].keys, ours.caches[0].values:
                assert pages[targets].unique().tolist() == sorted(block + 1 for block in blocks)
        ours.close()
        source.communicate()
