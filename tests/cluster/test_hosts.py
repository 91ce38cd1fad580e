"""One engine on several hosts, which are network namespaces: equal tokens, delays, failures of ranks, hosts and links, rejections."""

from __future__ import annotations

import os
import signal
import threading
import time
import urllib.error
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hosts import NO_HOSTS, Network, can_make_hosts
from rank_executors import load
from served_nodes import MAX_TOKENS, PROMPTS, ServedNodes

from stoker.base.types import SamplingParams
from stoker.engine.reader import Engine
from stoker.frontend.tokenizer import Tokenizer
from stoker.profiling.mailbox import SynchronousMailbox
from stoker.runtime.request import TokenRequest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not can_make_hosts(), reason=NO_HOSTS), pytest.mark.timeout(180)]

Build = Callable[[str], Path]
Expected = Callable[[str], list[str]]
MAX_END_S = 10.0  # from a failure to the end of the engine


@pytest.fixture(scope="module")
def expected(engine: Build) -> Callable[[str], list[str]]:
    """The greedy completions of PROMPTS with all ranks on this host, by mapping. All but `experts` have the same model."""
    return cache(lambda mapping: on_one_host(engine("experts" if mapping == "experts" else "stages")))


def on_one_host(engine: Path) -> list[str]:
    """The greedy completions of PROMPTS, with all ranks on this host."""
    executor, tokenizer = load(engine), Tokenizer.load(engine)
    mailbox = executor.mailbox
    assert isinstance(mailbox, SynchronousMailbox)
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    mailbox.submit([TokenRequest(request_id=prompt, prompt_ids=tokenizer.encode(prompt), params=params) for prompt in PROMPTS])
    tokens: dict[str, list[int]] = {prompt: [] for prompt in PROMPTS}
    while any(len(ids) < MAX_TOKENS for ids in tokens.values()):
        executor.turn(0.0)
        for output in mailbox.pop_outputs():
            assert output.error is None, output.error
            tokens[output.request_id] += output.token_ids
    executor.close()
    return [tokenizer.decode(ids) for ids in tokens.values()]


def failing_request(nodes: ServedNodes) -> threading.Thread:
    """A thread that sends one long request after the other until one fails. The first has been answered when this returns."""
    answered = threading.Event()

    def run() -> None:
        try:
            for _ in range(1000):
                nodes.complete(64)
                answered.set()
        except (urllib.error.URLError, OSError):
            return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert answered.wait(30), nodes.all_logs()
    return thread


def assert_ended(nodes: ServedNodes, rank: int, deadline: float) -> None:
    """A node ends with an error before `deadline` (monotonic seconds), and its ranks end with it."""
    assert nodes.processes[rank].wait(max(deadline - time.monotonic(), 0.0)) == 1, nodes.all_logs()
    while nodes.network.hosts[rank].pids():
        assert time.monotonic() < deadline, f"ranks of node {rank} continue without it"
        time.sleep(0.02)


@pytest.fixture
def nodes(network: Network, tmp_path: Path) -> ServedNodes:
    return ServedNodes(network, tmp_path)


@pytest.mark.parametrize("mapping", ["stages", "tensor", "both", "experts"])
def test_tokens_equal_those_of_one_host(mapping: str, engine: Build, expected: Expected, nodes: ServedNodes) -> None:
    tokens = expected(mapping)
    nodes.start_all(engine(mapping))
    assert nodes.complete() == tokens
    if mapping == "stages":
        assert "2 ranks on 2 nodes: pipeline across nodes, tensor within a node" in nodes.log(0)
        assert "node 0 (10.77.0.1): stage 1, rank 1 (leader)" in nodes.log(0) and "node 1 (10.77.0.2): stage 0, rank 0" in nodes.log(1)
    if mapping == "both":
        assert "node 1 (10.77.0.2): stage 0, ranks 0, 1" in nodes.log(1)
        nodes.network.delay_s = 0.02
        assert nodes.complete() == tokens
        nodes.network.delay_s = 0.0
        stalled = threading.Timer(0.1, nodes.network.stall, [3.0])
        stalled.start()
        started = time.monotonic()
        assert nodes.complete(64)[0].startswith(tokens[0][:4]) and nodes.complete() == tokens
        assert time.monotonic() - started > 2.5
    if mapping in ("tensor", "experts"):
        assert "2 ranks on 2 nodes: tensor across nodes" in nodes.log(0)
    nodes.processes[1].send_signal(signal.SIGTERM)  # schedulers stop all nodes at once: node 1 continues until node 0 ends
    nodes.wait_for(1, "node 0 ends the engine, after the requests in flight")
    assert nodes.complete() == tokens
    nodes.processes[0].send_signal(signal.SIGTERM)
    assert [nodes.processes[rank].wait(20) for rank in (0, 1)] == [0, 0], nodes.all_logs()
    assert "Traceback" not in nodes.all_logs()


def test_three_hosts_have_a_stage_each(engine: Build, expected: Expected, tmp_path: Path) -> None:
    network = Network(3)
    try:
        nodes = ServedNodes(network, tmp_path)
        nodes.start_all(engine("three stages"))
        assert nodes.complete() == expected("three stages")
        assert "node 2 (10.77.0.3): stage 1, rank 1" in nodes.log(0)
        request = failing_request(nodes)
        deadline = time.monotonic() + MAX_END_S
        network.hosts[2].power_off()
        assert_ended(nodes, 0, deadline)
        assert_ended(nodes, 1, deadline)
        request.join(max(deadline - time.monotonic(), 0.0))
        assert not request.is_alive(), "the request does not end"
        assert "worker_group.leader: node 2 (" in nodes.log(0) and "10.77.0.3) closed the connection" in nodes.log(0), nodes.all_logs()
        reason = nodes.log(1).split("node 0 has ended the engine: ")[-1]
        assert reason.startswith("node 2 (") and "10.77.0.3) closed the connection" in reason, nodes.all_logs()
    finally:
        network.close()


@pytest.mark.parametrize("failure", ["rank", "host", "link", "node 0"])
def test_a_failure_ends_the_engine_with_a_message_that_names_it(failure: str, engine: Build, nodes: ServedNodes) -> None:
    nodes.start_all(engine("both"))
    request = failing_request(nodes)
    first, other = nodes.network.hosts
    deadline = time.monotonic() + MAX_END_S
    if failure == "rank":
        followers = [pid for pid in other.pids() if b"worker_group.follower" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(followers) == 2
        os.kill(max(followers), signal.SIGKILL)
        text = "10.77.0.2): rank 1 on cpu was killed by SIGKILL"
    elif failure == "host":
        other.power_off()
        text = "10.77.0.2) closed the connection"
    elif failure == "link":
        nodes.network.cut.add(1)
        text = "10.77.0.2) has sent nothing for 5 s"
    else:
        first.power_off()
        text = ""
    if text:
        assert_ended(nodes, 0, deadline)
        assert "worker_group.leader: node 1 (" in nodes.log(0) and text in nodes.log(0), nodes.all_logs()
        request.join(max(deadline - time.monotonic(), 0.0))
        assert not request.is_alive(), "the request does not end"
    if failure != "host":
        assert_ended(nodes, 1, deadline)
    if failure == "node 0":
        assert "node 0 (10.77.0.1:9000) closed the connection" in nodes.log(1)
    if failure == "link":
        assert "node 0 (10.77.0.1:9000) has sent nothing for 5 s" in nodes.log(1)


def test_nodes_that_differ_are_rejected_and_others_may_join(engine: Build, expected: Expected, nodes: ServedNodes) -> None:
    path, experts = engine("stages"), engine("experts")
    nodes.start(0, path, "--rendezvous-timeout-s", "170")
    assert nodes.start(1, experts).wait(90) == 2
    assert f"the engine is {_digest(experts)} there, and {_digest(path)} on node 0" in nodes.log(1)
    assert nodes.start(1, path, "--kv-cache-tokens", "1024").wait(90) == 2
    assert "kv_cache_tokens is 1024 there, and None on node 0" in nodes.log(1)
    assert nodes.start(1, path, token="another secret of the tests").wait(90) == 2
    assert "shared secret" in nodes.log(1)
    assert "has another shared secret" in nodes.log(0) and "kv_cache_tokens is 1024 there" in nodes.log(0)
    nodes.start(1, path)
    nodes.wait_until_served()
    assert nodes.complete() == expected("stages")


def _digest(path: Path) -> str:
    from stoker.runtime.worker_group.hosts.messages import _engine_digest

    return _engine_digest(Engine.open(path))
