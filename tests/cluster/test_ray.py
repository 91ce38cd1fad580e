"""The Ray Serve application on a real cluster of a head and two nodes: protocols, scaling, updates, failures, engines on two hosts."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("ray")

from ray_cluster import deploy, kill, ray_cluster, stub_engine, stub_pids, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]  # deprecations inside Ray


@pytest.fixture(scope="module")
def ports() -> Iterator[tuple[int, int]]:
    """The HTTP and gRPC ports of Ray Serve."""
    with ray_cluster() as (_, http_port, grpc_port):
        yield http_port, grpc_port


@pytest.fixture
def client(ports: tuple[int, int]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{ports[0]}", timeout=60, trust_env=False) as client:
        yield client


def complete(client: httpx.Client, model: str, max_tokens: int = 8, **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={"model": model, "prompt": "hi", "max_tokens": max_tokens, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def replicas_of(client: httpx.Client, engine: str) -> list[dict[str, Any]]:
    return [row for row in client.get(f"/router/replicas?engine={engine}").json()["replicas"] if row["health"] == "ready"]


@contextlib.contextmanager
def load(client: httpx.Client, engine: str, num_requests: int) -> Iterator[None]:
    """Keep this many requests to an engine in flight, each of which gets all its tokens."""
    ended = threading.Event()

    def send() -> None:
        while not ended.is_set():
            assert complete(client, engine, max_tokens=50)["usage"]["completion_tokens"] == 50

    with concurrent.futures.ThreadPoolExecutor(num_requests) as threads:
        sending = [threads.submit(send) for _ in range(num_requests)]
        try:
            yield
        finally:
            ended.set()
    for each in sending:
        each.result()


@pytest.fixture(scope="module")
def two_engines(ports: tuple[int, int]) -> None:
    """One engine starts with one replica, and its load is its KV cache; the other one starts with none, and its load are its requests."""
    delays = {"max_replicas": 2, "upscale_delay_s": 0, "downscale_delay_s": 1}
    engines = [
        stub_engine("one", min_replicas=1, target_requests=1000, target_kv_usage=0.4, **delays),
        stub_engine("two", min_replicas=0, target_requests=4, target_kv_usage=1.0, **delays),
    ]
    deploy({"engines": engines, "ingress": {"host": "127.0.0.1"}})


def test_all_protocols(client: httpx.Client, ports: tuple[int, int], two_engines: None) -> None:
    import numpy as np
    import tritonclient.grpc as grpc

    wait_for(lambda: len(replicas_of(client, "one")) == 1, 60)
    assert client.get("/health").status_code == 200
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["one", "two"] and not replicas_of(client, "two")
    assert complete(client, "one")["usage"]["completion_tokens"] == 8
    chat = {"model": "one", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True}
    assert client.post("/v1/chat/completions", json=chat).text.endswith("data: [DONE]\n\n")
    assert client.post("/v2/models/one/generate", json={"text_input": "hi", "max_tokens": 4}).json()["text_output"]
    assert client.post("/api/generate", json={"model": "one", "prompt": "hi", "stream": False, "options": {"num_predict": 4}}).json()[
        "done"
    ]
    anthropic = {"model": "one", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    assert client.post("/v1/messages", json=anthropic).json()["role"] == "assistant"
    assert client.post("/invocations", json={"inputs": "hi", "parameters": {"max_new_tokens": 4}}).status_code == 200
    assert client.post("/v1/completions", json={"model": "none", "prompt": "hi"}).status_code == 404

    with grpc.InferenceServerClient(f"127.0.0.1:{ports[1]}") as triton:
        assert triton.is_server_live() and triton.is_server_ready() and triton.is_model_ready("one")
        assert {model.name for model in triton.get_model_repository_index().models} >= {"one", "two"}
        text = grpc.InferInput("text_input", [1, 1], "BYTES")
        text.set_data_from_numpy(np.array([[b"hi"]], dtype=object))
        limit = grpc.InferInput("max_tokens", [1, 1], "INT32")
        limit.set_data_from_numpy(np.array([[4]], dtype=np.int32))
        stream = grpc.InferInput("stream", [1, 1], "BOOL")
        stream.set_data_from_numpy(np.array([[True]]))
        results: queue.Queue[Any] = queue.Queue()
        triton.start_stream(lambda result, error: results.put((result, error)))
        triton.async_stream_infer("one", [text, limit, stream])
        result, error = results.get(timeout=30)
        assert error is None and result.as_numpy("text_output").size
        triton.stop_stream()
        with pytest.raises(Exception, match="none"):
            triton.infer("none", [text, limit])


def test_replicas_are_added_and_removed_with_the_load(client: httpx.Client, two_engines: None) -> None:
    """The stubs compute four sequences at a time, which fill their KV caches; further requests wait.

    Four requests to the first engine are far below its target of requests: only the usage of its KV cache adds a replica. The second one
    has none: eight requests start one, and those that wait there add another one; the usage of its KV cache alone would not.
    """
    assert not replicas_of(client, "two")
    with load(client, "one", 4), load(client, "two", 8):
        wait_for(lambda: len(replicas_of(client, "one")) == 2 and len(replicas_of(client, "two")) == 2, 100)
    wait_for(lambda: len(replicas_of(client, "one")) == 1 and not replicas_of(client, "two"), 100)
    assert complete(client, "two")["usage"]["completion_tokens"] == 8  # starts a replica again


def test_a_killed_replica_loses_no_request_and_an_update_loses_none(client: httpx.Client) -> None:
    engine = stub_engine("one", min_replicas=2, max_replicas=2)
    deploy({"engines": [engine], "ingress": {"host": "127.0.0.1"}})
    wait_for(lambda: len(replicas_of(client, "one")) == 2, 60)
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        requests = [threads.submit(complete, client, "one", 50) for _ in range(16)]
        wait_for(lambda: all(row["requests_in_flight"] for row in replicas_of(client, "one")), 20)
        url = replicas_of(client, "one")[0]["url"]
        kill(stub_pids()[url])
        assert all(request.result()["usage"]["completion_tokens"] == 50 for request in requests)
        recovered_s = wait_for(lambda: len({row["url"] for row in replicas_of(client, "one")} - {url}) == 2, 60)
        before = {row["url"] for row in replicas_of(client, "one")}
        requests = [threads.submit(complete, client, "one", 50) for _ in range(16)]
        deploy({"engines": [{**engine, "revision": "2"}], "ingress": {"host": "127.0.0.1"}})
        requests += [threads.submit(complete, client, "one", 50) for _ in range(8)]
        assert all(request.result()["usage"]["completion_tokens"] == 50 for request in requests)
    wait_for(lambda: len(replicas_of(client, "one")) == 2 and not before & {row["url"] for row in replicas_of(client, "one")}, 60)
    print(f"recovered after {recovered_s:.1f} s")


def test_an_engine_on_two_nodes(client: httpx.Client, engine: Callable[[str], Path]) -> None:
    """A replica is a placement group of two nodes, with a stage of the engine on each."""
    import ray

    path = engine("stages")
    settings = {"model": str(path), "name": "tiny", "nodes": 2, "cpus": 1, "serve": {"num-threads": 1}}
    deploy({"engines": [settings], "ingress": {"host": "127.0.0.1"}}, 180)
    assert complete(client, "tiny", ignore_eos=True)["usage"]["completion_tokens"] == 8
    groups = [group for group in ray.util.placement_group_table().values() if group["state"] == "CREATED" and len(group["bundles"]) == 2]
    assert len(groups) == 1 and groups[0]["strategy"] == "STRICT_SPREAD"
    assert len(set(groups[0]["bundles_to_node_id"].values())) == 2
    assert replicas_of(client, "tiny")[0]["publishes_events"]


def test_a_failed_start_is_reported(ports: tuple[int, int]) -> None:
    from ray import serve

    from stoker.ray import application

    target = serve.RunTarget(target=application({"engines": [stub_engine("bad", command="false")]}), name="bad", route_prefix="/bad")
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
    wait_for(lambda: "exited with status 1" in json.dumps(str(serve.status().applications["bad"])), 60)
    serve.delete("bad")
