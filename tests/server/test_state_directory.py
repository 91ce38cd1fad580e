"""What a server stores and listens on is private to its user."""

from __future__ import annotations

import stat
from pathlib import Path

from live_http import asgi_client
from scripted_service import ScriptedService
from test_executor_restarts import stub, stub_server

from stoker.server.state_directory import StateDirectory

__all__ = ["stub"]


def readable_by_others(folder: Path) -> list[str]:
    """Files below a folder that users other than its owner can reach and read."""
    found = []
    for path in folder.rglob("*"):
        parents = [folder, *(parent for parent in path.parents if folder in parent.parents)]
        if all(parent.stat().st_mode & stat.S_IXOTH for parent in parents) and path.is_file() and path.stat().st_mode & stat.S_IROTH:
            found.append(path.name)
    return found


async def test_other_users_cannot_read_what_is_stored(tmp_path: Path) -> None:
    """Also if the operator has created the directory with the usual permissions."""
    tmp_path.chmod(0o755)
    async with asgi_client(ScriptedService("a"), state_dir=str(tmp_path)) as client:
        assert (await client.post("/v1/responses", json={"input": "a secret"})).status_code == 200
        file = {"file": ("batch.jsonl", b'{"a": "secret"}'), "purpose": (None, "batch")}
        assert (await client.post("/v1/files", files=file)).status_code == 200
        assert (await client.get("/v1/batches")).status_code == 200
        assert {path.name for path in tmp_path.rglob("*")} >= {"responses.sqlite", "files", "batches"}
        assert readable_by_others(tmp_path) == []


async def test_other_users_cannot_reach_the_sockets_of_a_server(stub: Path) -> None:
    async with stub_server(stub):
        names = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "/stoker-" in line]
        folders = {folder for name in names if (folder := Path(name).parent).is_dir()}
        assert folders and all(folder.stat().st_mode & 0o077 == 0 for folder in folders)


def test_the_locks_of_killed_processes_are_removed(tmp_path: Path) -> None:
    running = StateDirectory(str(tmp_path))
    (tmp_path / "owners" / "killed.lock").touch()
    other = StateDirectory(str(tmp_path))
    assert {path.stem for path in (tmp_path / "owners").iterdir()} == {running.owner, other.owner}
    assert other.is_running(running.owner) and running.is_running(other.owner) and not running.is_running("killed")
    running.close()
    other.close()
    assert list((tmp_path / "owners").iterdir()) == []
