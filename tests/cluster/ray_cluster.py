"""A Ray cluster on this machine: a head and two further node processes, with free ports and small object stores."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from free_ports import free_port

STORE_BYTES = 80 << 20
CPUS_OF_NODE = 16  # slots for actors; they do not reserve cores
STUB_PATH = os.pathsep.join(str(Path(__file__).parents[2] / folder) for folder in ("src", "tests/server", "tests/frontend"))
STUB = f"{sys.executable} {Path(__file__).parent / 'ray_stub.py'}"


@contextlib.contextmanager
def ray_cluster(grpc: bool = True, num_nodes: int = 2) -> Iterator[tuple[str, int, int]]:
    """The address of the cluster, and the HTTP and gRPC ports of Ray Serve. This process is connected to the cluster."""
    variables = {
        "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2] / "src"), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    from stoker.ray.grpc_service import SERVICER

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": CPUS_OF_NODE, "object_store_memory": STORE_BYTES, "include_dashboard": False},
    )
    try:
        for _ in range(num_nodes):
            cluster.add_node(num_cpus=CPUS_OF_NODE, object_store_memory=STORE_BYTES)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="WARNING")
        http_port, grpc_port = free_port(), free_port()
        options = {"port": grpc_port, "grpc_servicer_functions": [SERVICER]} if grpc else None
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": http_port}, grpc_options=options)
        yield cluster.address, http_port, grpc_port
        serve.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def deploy(settings: dict[str, Any], timeout_s: float = 90, grpc_address: str | None = None) -> None:
    """Deploy the application, and wait until it runs."""
    from ray import serve

    from stoker.ray.deployments import build_application
    from stoker.ray.settings import read_settings

    target = serve.RunTarget(target=build_application(read_settings(settings), grpc_address), name="stoker", route_prefix="/")
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)

    def runs() -> bool:
        status = serve.status().applications["stoker"]
        assert status.status not in ("DEPLOY_FAILED", "UNHEALTHY"), status
        return bool(status.status == "RUNNING")

    wait_for(runs, timeout_s)


def wait_for(condition: Callable[[], object], timeout_s: float) -> float:
    """Wait until a condition is true. Returns the seconds that it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() < started + timeout_s, "not in time"
        time.sleep(0.05)
    return time.monotonic() - started


def stub_engine(name: str = "stub", **settings: Any) -> dict[str, Any]:
    """The settings of an engine that is a stub."""
    return {
        "model": "stub", "name": name, "cpus": 0.5, "gpus": 0, "command": STUB, "env": {"PYTHONPATH": STUB_PATH}, "listen": "127.0.0.1",
        "kv_events": False, "drain_timeout_s": 10, **settings,
    }  # fmt: skip


def stub_pids() -> dict[str, int]:
    """URL of each stub on this machine: the id of its process."""
    import yaml

    found: dict[str, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                if len(words) > 4 and words[1].endswith("ray_stub.py"):
                    options = yaml.safe_load(Path(words[4]).read_text())
                    found[f"http://{options['host']}:{options['port']}"] = int(entry.name)
    return found


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
