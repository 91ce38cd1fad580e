"""`stoker list`, `rm`, `ps` and `cache`, on a cache directory with copies of a small engine."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import msgspec
import pytest
from filelock import FileLock

from stoker.cli.commands.cache.prune import DEFAULT_DAYS
from stoker.cli.main import main
from stoker.deploy.cached_engines import cached_engines
from stoker.deploy.prepare import local_path
from stoker.server.processes.running import RunningServer, registered, running_servers

Run = Callable[..., tuple[int, str, str]]
DAY_S = 86400
ONE, TWO, OTHER = ("1" * 40, "12" * 20, "f" * 40)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process; returns its exit status, standard output and standard error."""

    def call(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["stoker", *args])
        capfd.readouterr()
        status = main()
        printed = capfd.readouterr()
        return status, printed.out, printed.err

    return call


@pytest.fixture
def cache(tiny_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory with two engines of org/tiny and one of other.gguf, used 1, 40 and 3 days ago."""
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for address, name, days in ((ONE, "org/tiny", 1), (TWO, "org/tiny", 40), (OTHER, "other.gguf", 3)):
        engine = tmp_path / "cache" / "engines" / address
        shutil.copytree(tiny_engine, engine)
        config = json.loads((engine / "config.json").read_text())
        config["checkpoint"]["name"] = name
        (engine / "config.json").write_text(json.dumps(config))
        used_at = time.time() - days * DAY_S - 60
        os.utime(engine, (used_at, used_at))
    return tmp_path / "cache"


def test_list_shows_the_engines_by_their_last_use(cache: Path, run: Run, tiny_engine: Path) -> None:
    (cache / "engines" / ("a" * 40)).mkdir()
    (cache / "engines" / ("a" * 40) / "config.json").write_text('{"format_version": 1}')  # of an old version
    status, output, _ = run("list")
    assert status == 0
    title, *lines = [line.split() for line in output.splitlines()]
    assert title[:3] == ["NAME", "ID", "SIZE"]
    assert [(line[0], line[1]) for line in lines] == [("tiny", ONE[:12]), ("other", OTHER[:12]), ("tiny", TWO[:12])]
    assert "1 d ago" in output and "40 d ago" in output
    rows = json.loads(run("list", "--json")[1])
    assert rows[0]["checkpoint"] == "org/tiny"
    assert rows[0]["num_bytes"] == sum(f.stat().st_size for f in tiny_engine.iterdir() if f.name != "config.json")


def test_a_name_or_id_of_the_list_is_a_model(cache: Path, run: Run) -> None:
    assert local_path("other", {}) == cache / "engines" / OTHER
    assert local_path(TWO[:4], {}) == cache / "engines" / TWO
    status, _, error = run("inspect", "tiny")
    assert (status, "tiny is the name of 2 engines: 111111111111 (NO_QUANT, float32), 121212121212" in error) == (2, True)
    status, _, error = run("inspect", "tinny")
    assert (status, "tinny does not exist. Name a directory" in error) == (2, True)


def test_rm_removes_what_is_named_and_nothing_else(cache: Path, run: Run) -> None:
    assert run("rm", "tiny")[0] == 2
    assert run("rm", "other", "nothing")[0] == 2
    assert len(cached_engines()) == 3  # all names are checked before the first engine is removed
    status, output, _ = run("rm", TWO[:12], "other")
    assert status == 0 and output.count("Removed ") == 2
    assert [engine.id for engine in cached_engines()] == [ONE[:12]]
    assert run("rm", "tiny", "--all")[0] == 0
    assert cached_engines() == [] and run("list")[1:] == ("", "No engine is cached. Build one: stoker pull MODEL.\n")


@contextmanager
def health_server(status: int) -> Iterator[str]:
    """A server that answers every request with `status`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("status", "state"), [(200, "ready"), (503, "not ready")])
def test_ps_shows_servers_and_rm_protects_their_engines(status: int, state: str, cache: Path, run: Run) -> None:
    engine = cache / "engines" / OTHER
    with health_server(status) as url, registered(url, "my-model", engine):
        _, output, _ = run("ps")
        assert output.splitlines()[1].split()[:2] == ["my-model", url]
        assert state in output and str(os.getpid()) in output
        assert json.loads(run("ps", "--json")[1])[0]["engine"] == str(engine)
        refused = run("rm", "other")
        assert (refused[0], f"other is served at {url}. Stop the server, or use --force." in refused[2]) == (2, True)
        assert str(engine) not in run("cache", "prune", "--days", "0", "--dry-run")[1]
    assert run("ps")[1:] == ("", "No server is running. Start one: stoker serve MODEL.\n")


def test_a_killed_server_is_not_listed(cache: Path) -> None:
    with registered("http://127.0.0.1:1", "m", cache):
        (file,) = (cache / "running").iterdir()
        server = msgspec.json.decode(file.read_bytes(), type=RunningServer)
        earlier = msgspec.structs.replace(server, process_start="0")  # a process that had the same id
        file.write_bytes(msgspec.json.encode(earlier))
        assert running_servers() == [] and not file.exists()


def test_cache_size_and_prune(cache: Path, run: Run) -> None:
    (cache / "native").mkdir()
    (cache / "native" / "kernels.so").write_bytes(b"x" * 5000)
    (cache / "sources" / "archives" / "0123").mkdir(parents=True)
    parts = {part["name"]: part for part in json.loads(run("cache", "size", "--json")[1])}
    assert set(parts) == {"engines", "native", "sources"}
    assert parts["native"]["num_bytes"] == 5000 and parts["engines"]["num_entries"] == 3
    assert "total" in run("cache", "size")[1]
    assert DEFAULT_DAYS == 30
    planned = run("cache", "prune", "--dry-run")[1]
    assert TWO in planned and ONE not in planned and len(cached_engines()) == 3
    run("cache", "prune")
    assert [engine.id for engine in cached_engines()] == [ONE[:12], OTHER[:12]]
    building = cache / "engines" / f".{OTHER}.building-host-1.2"
    building.mkdir()
    with FileLock(cache / "engines" / f"{OTHER}.lock"):  # another process builds
        run("cache", "prune", "--days", "0")
        assert building.exists() and [engine.id for engine in cached_engines()] == [OTHER[:12]]
    run("cache", "prune", "--days", "0")
    assert not building.exists()
    assert cached_engines() == [] and not (cache / "sources" / "archives" / "0123").exists()
    assert (cache / "native" / "kernels.so").exists()
    assert run("cache", "prune", "--days", "-1")[0] == 2
