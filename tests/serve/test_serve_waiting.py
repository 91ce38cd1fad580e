"""The endpoints while an engine is built: they report the load, and no connection is refused before the server is ready."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import httpx
from free_ports import free_port

from stoker.base import env
from stoker.server.processes.listeners import bind, listen
from stoker.server.processes.loading import LoadingServer
from stoker.server.protocols.sagemaker.options import LMIOptions
from stoker.server.settings import ServerSettings


def test_every_endpoint_reports_the_load() -> None:
    settings = ServerSettings(http_port=0, api_keys=("a-secret-key",))
    (listener,) = listen(settings)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with listener, httpx.Client(base_url=url, headers={"authorization": "Bearer a-secret-key"}) as client:
        with LoadingServer([listener], settings, "tiny") as loading_server:
            loading_server.report_progress("weights", 2, 5)
            ping = client.get("/ping")
            assert (ping.status_code, ping.json()) == (503, {"tiny": {"status": "Loading", "reason": "weights: 40 %"}})
            chat = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
            assert (chat.status_code, "weights: 40 %" in chat.json()["error"]["message"]) == (503, True)
            answers = {path: client.get(path).status_code for path in ("/health/live", "/health/ready", "/v2/health/ready")}
            assert answers["/health/live"] == 200
            assert {answers["/health/ready"], answers["/v2/health/ready"]} <= {400, 503}
            assert client.get("/v1/models", headers={"authorization": "Bearer wrong"}).status_code == 401
        with LoadingServer([listener], ServerSettings(protocols=("sagemaker", "openai"), options=LMIOptions()), "again"):
            assert httpx.get(f"{url}/ping").json()["again"]["status"] == "Loading"


def test_the_metrics_port_has_no_other_endpoints() -> None:
    settings = ServerSettings(http_port=0, metrics_port=0)
    api, metrics = listen(settings)
    with api, metrics, LoadingServer([api, metrics], settings, "tiny"):
        for listener, status in ((api, 200), (metrics, 404)):
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            assert (httpx.get(f"{url}/v2").status_code, httpx.get(f"{url}/metrics").status_code) == (status, 200)


def test_from_loading_to_ready_without_a_refusal(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text(f"option.model_id={checkpoint}\noption.max_tokens=512\noption.rotary_base=10000\n")
    port = free_port()
    command = [sys.executable, "-m", "stoker", "serve", str(tmp_path), "--port", str(port)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=env.child_environment(STOKER_LOG="warning"))
    assert process.stdout is not None
    seen: list[int] = []
    with process.stdout:
        try:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and 200 not in seen and process.poll() is None:
                try:
                    seen.append(httpx.get(f"http://127.0.0.1:{port}/ping", timeout=30).status_code)
                except httpx.ConnectError:
                    seen.append(0)
                except (httpx.RemoteProtocolError, httpx.ReadError):  # this process was suspended when the second server replaced the first
                    seen.append(1)
        finally:
            process.terminate()
            process.wait(30)
    responses = [state for state in seen if state != 1]
    states = [responses[i] for i in range(len(responses)) if i == 0 or responses[i] != responses[i - 1]]
    assert states == [0, 503, 200], seen


def test_a_port_in_use_is_reported_before_the_build(checkpoint: Path, tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as taken:
        command = [sys.executable, "-m", "stoker", "serve", str(checkpoint), "--port", str(taken.getsockname()[1])]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=env.child_environment())
    assert done.returncode == 2
    assert "cannot be used" in done.stderr
    assert not (tmp_path / "cache" / "engines").exists()


def test_a_missing_certificate_is_reported_before_the_build(checkpoint: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "stoker",
        "serve",
        str(checkpoint),
        "--port",
        "0",
        "--tls-certificate",
        "/nowhere.pem",
        "--tls-key",
        "k",
    ]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=env.child_environment())
    assert (done.returncode, "/nowhere.pem" in done.stderr) == (2, True)
    assert not (tmp_path / "cache" / "engines").exists()
