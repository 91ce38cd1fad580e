"""A full disk below the state directory: requests that store something fail with the path, and others are not affected."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from live_http import asgi_client, events
from prometheus_client import values
from prometheus_client.mmap_dict import MmapedDict
from scripted_service import ScriptedService

from stoker.base.errors import ConfigError
from stoker.base.metrics import EXHAUSTED
from stoker.server.errors import describe
from stoker.server.metrics.frontend import MULTIPROCESS_DIR, FrontendMetrics
from stoker.server.metrics.shared_files import KINDS, NUM_BYTES, use_files

CONNECT = sqlite3.connect
PAGES = 12  # of the database: the empty one fits, and no long response


class LimitedDatabase(sqlite3.Connection):
    """A database that becomes full as on a full disk."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.execute(f"PRAGMA max_page_count={PAGES}")


async def test_responses_that_cannot_be_stored_fail_with_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **kwargs: CONNECT(*args, factory=LimitedDatabase, **kwargs))
    body = {"model": "tiny", "input": "hi", "metadata": {f"k{i}": "x" * 500 for i in range(16)}}
    file = tmp_path / "responses.sqlite"
    async with asgi_client(ScriptedService(), state_dir=str(tmp_path)) as client:
        for _ in range(20):
            if (refused := await client.post("/v1/responses", json=body)).status_code != 200:
                break
        assert refused.status_code == 507
        error = refused.json()["error"]
        assert error["code"] == "insufficient_storage" and str(file) in error["message"] and "disk is full" in error["message"]
        last = events_of((await client.post("/v1/responses", json={**body, "stream": True})).text)[-1]
        assert last["type"] == "response.failed" and str(file) in last["response"]["error"]["message"]
        assert (await client.post("/v1/responses", json={**body, "store": False})).status_code == 200
        assert (await client.post("/v1/responses", json={"input": "hi", "stream": True, "store": False})).status_code == 200
        assert (await client.post("/v1/completions", json={"prompt": "hi"})).status_code == 200


def events_of(text: str) -> list[Any]:
    return events("".join(line + "\n" for line in text.splitlines() if not line.startswith("event: ")))


async def test_files_that_cannot_be_written_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_bytes

    def fail(path: Path, data: bytes) -> int:
        """Write the first half, as on a disk that becomes full."""
        write(path, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    async with asgi_client(ScriptedService(), state_dir=str(tmp_path)) as client:
        monkeypatch.setattr(Path, "write_bytes", fail)
        upload = {"file": ("a.jsonl", b'{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "hi"}}')}
        refused = await client.post("/v1/files", files=upload, data={"purpose": "batch"})
        assert refused.status_code == 507 and f"{tmp_path}/files/" in refused.json()["error"]["message"]
        monkeypatch.undo()
        assert (await client.get("/v1/files")).json()["data"] == [] and not list((tmp_path / "files").iterdir())
        assert (await client.post("/v1/files", files=upload, data={"purpose": "batch"})).status_code == 200


def test_every_error_of_a_full_disk_has_a_reason() -> None:
    failure = describe(OSError(errno.ENOSPC, "No space left on device", "/state/batch"))
    assert failure.status == 507 and "/state/batch cannot be written: No space left on device" in failure.message


def test_the_files_of_the_counters_have_their_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write to a page of a sparse file on a full disk would end the frontend with SIGBUS."""
    monkeypatch.setattr(values, "ValueClass", values.ValueClass)
    use_files(tmp_path, 1)
    for kind in KINDS:
        path = tmp_path / f"{kind}_1.db"
        counts = MmapedDict(str(path))
        counts.write_value('["a", "a", {}]', 5.0, 0.0)
        counts.close()
        assert [value for _, value, _, _ in MmapedDict.read_all_values_from_file(str(path))] == [5.0]
        assert path.stat().st_blocks * 512 >= path.stat().st_size == NUM_BYTES

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    for index in (0, 1):
        with pytest.raises(ConfigError, match=rf"counter_{index}\.db cannot be written: No space left on device\. .* TMPDIR"):
            use_files(tmp_path, index)
    assert not (tmp_path / "counter_0.db").exists() and (tmp_path / "counter_1.db").exists(), "counts are not deleted"


def test_a_frontend_continues_the_counts_of_the_one_with_its_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "ValueClass", values.ValueClass)
    monkeypatch.setenv(MULTIPROCESS_DIR, str(tmp_path))
    for total in (1, 2, 3):  # frontends with index 0, one after the other
        metrics = FrontendMetrics(0)
        counter = metrics.of(EXHAUSTED, "http")
        assert counter.value == total - 1
        metrics.counter_buffer._shared = False  # there is no event loop
        counter.inc()
        metrics.counter_buffer.write()
    assert f'{EXHAUSTED.name}{{protocol="http"}} 3.0' in metrics._frontend_metrics().decode()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["counter_0.db", "histogram_0.db"]
