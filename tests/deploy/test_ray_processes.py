"""The processes of a replica of Ray Serve, without a Ray cluster: their output, their failures, their end, and their keys."""

from __future__ import annotations

import asyncio
import pickle
import shlex
import socket
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from stoker.base import env
from stoker.base.errors import ConfigError
from stoker.ray import application
from stoker.ray.engine_replica import EngineReplica, HostActor
from stoker.ray.ingress import Ingress
from stoker.ray.serve import RayAddress, serve
from stoker.ray.server_process import ServerProcess
from stoker.ray.settings import ApplicationSettings, EngineSettings

# Output as of CUDA errors and tracebacks: blank lines, bytes that are no UTF-8, a line over the limit, and more than a pipe holds.
NOISY = r"""
import sys
out = sys.stdout.buffer
out.write(b"\nTraceback:\n\n\xff\xfe\n" + b"x" * (3 << 20) + b"\n" + b"\n" * (1 << 18))
out.write(b"m is served at http://127.0.0.1:1 (ready)\n\nlast line\n")
out.flush()
sys.stdin.read()
sys.exit(3)
"""


def process_of(code: str) -> ServerProcess:
    """A process that runs `code` instead of a server."""
    return ServerProcess(f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}", {}, {})


async def test_the_whole_output_is_read() -> None:
    process = process_of(NOISY)
    assert process.failure is None  # before the start
    await process.stop(1)
    await process.start()
    assert await process.wait_until_ready(50) == "http://127.0.0.1:1"
    assert process.failure is None
    assert process._process is not None and process._process.stdin is not None
    process._process.stdin.close()
    await process._reading
    assert process.failure is not None and process.failure.startswith("the server exited with status 3:")
    assert process.failure.endswith("\n\nlast line")
    await process.stop(50)


async def test_stopping_ends_although_another_process_keeps_the_output_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank processes of a server inherit its output."""
    monkeypatch.setattr("stoker.ray.server_process._END_S", 0.01)
    child = "subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()'])"
    process = process_of(f"import subprocess, sys; {child}; print('m is served at http://127.0.0.1:1', flush=True)")
    await process.start()
    await process.wait_until_ready(50)
    await asyncio.wait_for(process.stop(0.01), 50)
    assert process._process is not None and process._process.stdin is not None and process._process.stdout is not None
    process._process.stdin.close()
    await process._process.stdout.read()  # the end of the child


async def test_a_host_that_is_starting_has_not_failed_and_a_failed_start_is_reported() -> None:
    """Ray calls `failure` while `start` runs."""
    host = HostActor()
    settings: Any = SimpleNamespace(command="/absent/program")
    starting = asyncio.ensure_future(host.start(settings, {}, {}))
    while host._server is None:
        await asyncio.sleep(0)
    assert await host.failure() is None
    replica: Any = SimpleNamespace(_server=ServerProcess("true", {}, {}), _starts=[asyncio.get_running_loop().create_future()])
    replica._hosts = [SimpleNamespace(failure=SimpleNamespace(remote=host.failure))]
    await EngineReplica._check_processes(replica)
    await asyncio.wait([starting])
    replica._starts = [starting]
    with pytest.raises(RuntimeError, match=r"host 1 of the replica could not be started: .*/absent/program"):
        await EngineReplica._check_processes(replica)


def test_requests_do_not_change_the_thread_in_the_ingress() -> None:
    """A part of a response would wait for two event loops. Only the ingress receives requests from Ray Serve; the router logs them."""
    from ray.serve._private import constants

    ingress = application({"engines": [{"model": "org/model"}]})._bound_deployment
    engine = ingress.init_args[2]._bound_deployment
    name = "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD"
    assert getattr(constants, name) is True  # Ray Serve reads the variable, and its default is another one
    assert ingress.ray_actor_options["runtime_env"]["env_vars"][name] == "0"
    assert name not in engine.ray_actor_options["runtime_env"]["env_vars"]
    assert ingress._deployment_config.logging_config["enable_access_log"] is False
    assert engine._deployment_config.logging_config["enable_access_log"] is False


@pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field")
def test_loads_are_reported_every_second() -> None:
    """A start from zero replicas waits for the next report of the ingress. By default, Ray Serve sends one every ten seconds."""
    ingress = application({"engines": [{"model": "org/model", "min_replicas": 0}]})._bound_deployment
    engine = ingress.init_args[2]._bound_deployment
    assert engine._deployment_config.autoscaling_config.metrics_interval_s == 1.0


def test_keys_are_arguments_that_no_message_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray prints runtime_env, and the representation of arguments can be in messages."""
    monkeypatch.setenv("STOKER_API_KEY", "api-key-0123456789")
    monkeypatch.setenv("STOKER_ADMIN_KEY", "admin-key-0123456789")
    settings = {"engines": [{"model": "org/model", "serve": {"api_keys": "/shared/keys.txt"}}]}
    ingress = application(settings)._bound_deployment
    engine = ingress.init_args[2]._bound_deployment
    for deployment in (ingress, engine):
        shown = repr((deployment.ray_actor_options, deployment.init_args, deployment.init_kwargs))
        assert "key-0123456789" not in shown and "METRIC_PUSH_INTERVAL" in shown
    passed = pickle.loads(pickle.dumps(engine.init_args[2]))
    assert ingress.init_args[1] == passed
    monkeypatch.delenv("STOKER_ADMIN_KEY")
    monkeypatch.setenv("STOKER_API_KEY", "another-key")
    monkeypatch.setattr("stoker.ray.ingress.logging.configure", lambda level: None)
    Ingress(ingress.init_args[0], passed)
    assert (env.api_key(), env.admin_key()) == ("api-key-0123456789", "admin-key-0123456789")
    monkeypatch.delenv("STOKER_API_KEY")
    with pytest.raises(ConfigError, match=r"api_keys=/shared/keys.txt is refused without STOKER_API_KEY: health checks"):
        application(settings)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "ray_address=127.0.0.1:1 cannot be reached: Connection refused. Start a cluster with: ray start --head."),
        ("ray://127.0.0.1:1", "ray_address=ray://127.0.0.1:1 cannot be reached: Connection refused."),
        ("127.0.0.1:port", "ray_address='127.0.0.1:port' is refused. Write HOST:PORT"),
    ],
)
def test_an_address_without_a_cluster_is_refused_before_ray_tries_it(address: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.init", lambda **options: pytest.fail("Ray was called"))
    settings = ApplicationSettings(engines=(EngineSettings(model="org/model"),))
    with pytest.raises(ConfigError) as given:
        serve(settings, RayAddress(address=address), pytest.fail)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError) as from_environment:
        serve(settings, RayAddress(), pytest.fail)
    assert str(given.value).startswith(message) and str(from_environment.value) == str(given.value)


@pytest.fixture
def without_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster would be started, which these tests do not reach."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", lambda **options: pytest.fail("Ray was called"))


def test_an_address_that_accepts_connections_is_left_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ApplicationSettings(engines=(EngineSettings(model="org/model"),))
    tried: list[str] = []

    def init(address: str, **options: object) -> None:
        tried.append(address)
        raise ConnectionError("no cluster")

    monkeypatch.setattr("ray.init", init)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        addresses = [f"{host}:{port}", f"ray://{host}:{port}", "auto"]
        for address in addresses:
            with pytest.raises(ConfigError, match="no cluster"):
                serve(settings, RayAddress(address=address), pytest.fail)
    assert tried == addresses


@pytest.mark.usefixtures("without_cluster")
def test_a_grpc_port_in_use_is_refused_before_ray_starts() -> None:
    settings = ApplicationSettings(engines=(EngineSettings(model="org/model"),))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--grpc-port.*{port}|{port}.*--grpc-port"):
            serve(settings, RayAddress(grpc_port=port), pytest.fail)


@pytest.mark.usefixtures("without_cluster")
def test_the_ingress_of_a_new_cluster_gets_the_grpc_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Serve's proxies get none: they would listen on all addresses."""
    found: list[str | None] = []

    def run(application: Any, *rest: object) -> int:
        found.append(application._bound_deployment.init_kwargs["grpc_address"])
        return 0

    monkeypatch.setattr("stoker.ray.serve._run", run)
    monkeypatch.setattr("stoker.ray.serve.haproxy_variables", lambda *ports: {})
    settings = ApplicationSettings(engines=(EngineSettings(model="org/model"),))
    assert serve(settings, RayAddress(grpc_port=0), pytest.fail) == 0
    assert serve(settings, RayAddress(), pytest.fail) == 0
    address, without = found
    assert address is not None and address.startswith("127.0.0.1:") and not address.endswith(":0") and without is None
