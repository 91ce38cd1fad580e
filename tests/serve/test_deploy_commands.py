"""The command line, probes and folders of the Helm chart, with a real server."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from stoker.cli.server_process import running_server

# Writes the path of every file that Python code of the server and its processes opens for writing, and of every folder that it creates.
AUDIT = """
import os, sys
log = os.open({log!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        os.write(log, os.fsencode(arguments[0]) + b"\\n")
    elif event == "os.mkdir":
        os.write(log, os.fsencode(os.path.abspath(arguments[0])) + b"\\n")
sys.addaudithook(hook)
"""


def test_the_command_of_the_chart(
    tiny_engine: Path, script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probes need no key, other routes do; the server writes to the mounted folders only, and stops."""
    pytest.importorskip("helm_python", reason="make check-deploy installs Helm")
    check_deploy = script("check_deploy")
    deployment = next(o for o in check_deploy.render(check_deploy.VALUES["all"]) if o["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    (tmp_path / "keys").write_text("secret-key-1\n")
    cache, temporary, log = tmp_path / "cache", tmp_path / "tmp", tmp_path / "opened"
    temporary.mkdir()
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit" / "sitecustomize.py").write_text(AUDIT.format(log=str(log)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'audit'}:{':'.join(sys.path)}")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("STOKER_CACHE", str(cache))
    monkeypatch.setenv("HF_HOME", str(cache / "huggingface"))
    replaced = {"8000": "0", "8001": "0", "0.0.0.0": "127.0.0.1"}
    options = [replaced.get(argument, argument) for argument in container["args"][2:]]
    options = [str(tmp_path / "keys") if option.startswith("/etc/stoker/api-keys/") else option for option in options]

    with running_server(tiny_engine, [*options, "--kv-cache-tokens", "1024"]) as url, httpx.Client(base_url=url) as client:
        for name in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert client.get(container[name]["httpGet"]["path"]).status_code == 200
        assert client.get("/v1/models").status_code == 401
        client.headers["Authorization"] = "Bearer secret-key-1"
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
    written = {line for line in log.read_text().splitlines() if not line.startswith(("/dev/", "/proc/"))}
    assert any(line.startswith(str(cache)) for line in written)
    assert {line for line in written if not line.startswith((str(cache), str(temporary)))} == set()
