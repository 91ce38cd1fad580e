"""Measures the Ray Serve application with stub replicas, whose steps take 20 ms and have up to 4 sequences, on a cluster of this machine.

    PYTHONPATH=src python benchmarks/ray_serve.py [scale] [latency] [latency_grpc] [kill] [zero] [zero_engine] \\
        [--json benchmarks/results/ray_serve.json]

scale: output tokens per second of one and of four replicas, each with as many requests as they have rows.
latency: time to the first token of streamed requests through Ray Serve and directly to the replica, alternately.
latency_grpc: the same for KServe over gRPC, through the ingress's own gRPC port.
kill: one of two replicas is killed under load; lost requests, and seconds until two replicas are ready again.
zero: seconds from a request to its answer when no replica runs.
zero_engine: the same with SmolLM2-135M on the CPU instead of a stub: its engine is in the cache, and its files were read before.

HAProxy is in front of the ingress, as with `stoker serve --ray`. RAY_SERVE_ENABLE_HA_PROXY=0 in the environment measures with Ray
Serve's own HTTP proxy; the names of these results end with _own_proxy.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from stoker.base import env
from stoker.cli.benchmark.results import provenance
from stoker.ray.haproxy import haproxy_variables

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / area) for area in ("cluster", "server")]
from free_ports import free_port  # noqa: E402
from ray_cluster import deploy, kill, ray_cluster, stub_engine, stub_pids, wait_for  # noqa: E402

NUM_ROWS = 4  # of one replica
NUM_TOKENS = 150


class Client:
    """Requests to the ingress."""

    def __init__(self, port: int) -> None:
        limits = httpx.Limits(max_connections=64, max_keepalive_connections=64)
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, limits=limits, trust_env=False)

    def complete(self, max_tokens: int, model: str = "stub") -> bool:
        """Whether a request gets all its tokens."""
        answer = self._client.post("/v1/completions", json={"model": model, "prompt": "hi", "max_tokens": max_tokens})
        return answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == max_tokens

    def ready(self) -> list[str]:
        """The URLs of the replicas that are ready."""
        rows = self._client.get("/router/replicas").json()["replicas"]
        return [row["url"] for row in rows if row["health"] == "ready"]

    def first_token_s(self, url: str = "") -> float:
        """Seconds to the first bytes of a streamed answer, which is read to its end, so that all connections are used again."""
        body = {"model": "stub", "prompt": "some words of a prompt " * 80, "max_tokens": 2, "stream": True}
        started = time.perf_counter()
        with self._client.stream("POST", f"{url}/v1/completions", json=body) as response:
            parts = response.iter_raw()
            next(parts)
            elapsed = time.perf_counter() - started
            for _ in parts:
                pass
        return elapsed


def deploy_engine(client: Client, num_replicas: int, engine: dict[str, Any], grpc_address: str | None = None) -> None:
    """Deploy this many replicas, and wait until the ingress uses them."""
    counts = {"min_replicas": num_replicas, "max_replicas": num_replicas}
    deploy({"engines": [counts | engine], "ingress": {"host": "127.0.0.1", "access_log": False}}, 180, grpc_address)
    wait_for(lambda: len(client.ready()) == num_replicas, 120)


def deploy_stubs(client: Client, num_replicas: int) -> None:
    """The same with stubs."""
    deploy_engine(client, num_replicas, stub_engine())


def num_replicas(engine: str) -> int:
    """The replicas of the engine in any state, as Ray Serve counts them."""
    from ray import serve

    return sum(serve.status().applications["stoker"].deployments[f"engine-{engine}"].replica_states.values())


def measure_scale(client: Client) -> dict[str, Any]:
    """Output tokens per second of one and of four replicas, the best of three rounds."""
    rates = {}
    for num_replicas in (1, 4):
        deploy_stubs(client, num_replicas)
        num_requests = NUM_ROWS * num_replicas
        found = []
        with concurrent.futures.ThreadPoolExecutor(num_requests) as threads:
            list(threads.map(client.complete, [2] * num_requests))
            for _ in range(3):
                started = time.perf_counter()
                assert all(threads.map(client.complete, [NUM_TOKENS] * num_requests))
                found.append(num_requests * NUM_TOKENS / (time.perf_counter() - started))
        rates[num_replicas] = max(found)
    return {"tokens_per_s_1": rates[1], "tokens_per_s_4": rates[4], "ratio": rates[4] / rates[1], "target_ratio": 3.7}


def measure_latency(client: Client, num_pairs: int = 200) -> dict[str, Any]:
    """Time to the first token, through the ingress and directly."""
    deploy_stubs(client, 1)
    (url,) = client.ready()
    return _compare(client.first_token_s, "", url, num_pairs)


def measure_latency_grpc(client: Client, num_pairs: int = 200) -> dict[str, Any]:
    """The same over gRPC."""
    import grpc

    address = f"127.0.0.1:{free_port()}"
    deploy_engine(client, 1, stub_engine(), address)
    (url,) = client.ready()
    replica = f"127.0.0.1:{httpx.get(f'{url}/health/replica', trust_env=False).json()['grpc_port']}"
    channels = {each: grpc.insecure_channel(each) for each in (address, replica)}

    def first_token_s(target: str) -> float:
        """Seconds to the first response of a stream, which is read to its end."""
        started = time.perf_counter()
        responses = channels[target].stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(iter([grpc_request()]))
        next(responses)
        elapsed = time.perf_counter() - started
        for _ in responses:
            pass
        return elapsed

    return _compare(first_token_s, address, replica, num_pairs)


def grpc_request() -> bytes:
    """The request of `Client.first_token_s` as a ModelInferRequest."""
    from tritonclient.grpc import service_pb2 as pb

    values = (
        ("text_input", "BYTES", {"bytes_contents": [b"some words of a prompt " * 80]}),
        ("max_tokens", "INT32", {"int_contents": [2]}),
        ("stream", "BOOL", {"bool_contents": [True]}),
    )
    tensor = pb.ModelInferRequest.InferInputTensor
    inputs = [tensor(name=name, datatype=kind, shape=[1, 1], contents=pb.InferTensorContents(**value)) for name, kind, value in values]
    return bytes(pb.ModelInferRequest(model_name="stub", inputs=inputs).SerializeToString())


def _compare(first_token_s: Callable[[str], float], ingress: str, replica: str, num_pairs: int) -> dict[str, Any]:
    """Times to the first token through the ingress and directly, alternately."""
    routed, direct = [], []
    for i in range(num_pairs):
        for target, times in ((ingress, routed), (replica, direct)) if i % 2 else ((replica, direct), (ingress, routed)):
            times.append(first_token_s(target))
    routed, direct = routed[num_pairs // 10 :], direct[num_pairs // 10 :]
    added = [a - b for a, b in zip(routed, direct, strict=True)]
    return {
        "pairs": len(added), "direct_median_ms": statistics.median(direct) * 1e3, "routed_median_ms": statistics.median(routed) * 1e3,
        "added_median_ms": statistics.median(added) * 1e3, "added_p25_ms": statistics.quantiles(added, n=4)[0] * 1e3, "target_ms": 2.0,
    }  # fmt: skip


def measure_kill(client: Client) -> dict[str, Any]:
    """Kill one of two replicas while 16 requests run, of which nothing was sent."""
    deploy_stubs(client, 2)
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        requests = [threads.submit(client.complete, NUM_TOKENS) for _ in range(16)]
        time.sleep(1)
        url = client.ready()[0]
        kill(stub_pids()[url])
        recovered_s = wait_for(lambda: len(set(client.ready()) - {url}) == 2, 120)
        lost = sum(not request.result() for request in requests)
    return {"requests": 16, "lost": lost, "recovered_s": recovered_s, "target_s": 10.0}


def measure_first_answers(client: Client, engine: dict[str, Any]) -> dict[str, Any]:
    """The first request to an engine without replicas, three times."""
    found = []
    for revision in range(3):
        deploy_engine(client, 0, engine | {"max_replicas": 1, "downscale_delay_s": 2, "revision": str(revision)})
        wait_for(lambda: not num_replicas(engine["name"]), 120)
        started = time.perf_counter()
        assert client.complete(2, engine["name"])
        found.append(time.perf_counter() - started)
    return {"seconds": found, "median_s": statistics.median(found), "target_s": 12.0}


def measure_zero(client: Client) -> dict[str, Any]:
    """An engine that is a stub."""
    return measure_first_answers(client, stub_engine())


def measure_zero_engine(client: Client) -> dict[str, Any]:
    """The engine of SmolLM2-135M with the weights of its checkpoint, which is built before if the cache lacks it."""
    from stoker.builder.build import build_cached
    from stoker.builder.config import BuildConfig
    from stoker.cli.default_model import default_checkpoint

    path = build_cached(default_checkpoint(), BuildConfig(device="cpu", quantization="AS_STORED"), verify="files").path
    size = sum(len(file.read_bytes()) for file in path.iterdir() if file.is_file())
    found = measure_first_answers(client, {"model": str(path), "name": "smollm2", "cpus": 1, "gpus": 0})
    return {"model": "SmolLM2-135M-Instruct", "engine_bytes": size, **found}


KINDS: dict[str, Callable[[Client], dict[str, Any]]] = {
    "scale": measure_scale, "latency": measure_latency, "latency_grpc": measure_latency_grpc,
    "kill": measure_kill, "zero": measure_zero, "zero_engine": measure_zero_engine
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = json.loads(args.json.read_text()) if args.json is not None and args.json.exists() else {}
    with tempfile.TemporaryDirectory(prefix="stoker-", dir="/tmp") as folder, contextlib.ExitStack() as cluster:
        env.set_ray_variables(haproxy_variables(Path(folder), free_port(), free_port(), free_port()))
        suffix = "" if os.environ["RAY_SERVE_ENABLE_HA_PROXY"] == "1" else "_own_proxy"
        _, http_port, _grpc_port = cluster.enter_context(ray_cluster(grpc=False))
        client = Client(http_port)
        for kind in args.kinds:
            load = os.getloadavg()[0]
            name = kind + suffix
            results[name] = {**KINDS[kind](client), "load_average_before": round(load, 1), "cores": os.cpu_count()}
            results.setdefault("provenance", {})[name] = provenance()
            print(name, json.dumps(results[name], indent=1), flush=True)
            if args.json is not None:
                args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
