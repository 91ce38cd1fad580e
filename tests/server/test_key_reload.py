"""SIGHUP reads the file of API keys again, without interrupting requests; limits hold over two frontends. The executor has no model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import httpx
from test_executor_restarts import BODY, FRONTEND, hold, running, service_manager, stub, stub_server
from test_tenants import KEY, OTHER, bearer, write_keys

__all__ = ["stub"]  # a fixture


async def until_logged(served: object, text: str) -> None:
    async with asyncio.timeout(30):
        while not any(text in line for line in served.lines()):  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)


async def test_keys_are_reloaded_in_all_frontends(stub: Path, tmp_path: Path) -> None:
    file = write_keys(tmp_path, "    requests_per_minute: 6\n")
    log = tmp_path / "usage.jsonl"
    settings = {
        "api_keys_file": file,
        "usage_log": str(log),
        "num_frontends": 2,
        "environment": {"NOTIFY_SOCKET": str(tmp_path / "notify")},
    }
    with service_manager(str(tmp_path / "notify")) as notified:
        async with stub_server(stub, **settings) as (served, client):
            url = served.url
            client.headers.update(bearer(OTHER))
            statuses = []
            for frontend in served.children(FRONTEND) * 2:  # a suspended frontend accepts no connection, so each one serves in turn
                os.kill(frontend, signal.SIGSTOP)
                async with httpx.AsyncClient(base_url=url, timeout=30, headers=bearer(KEY)) as other:
                    statuses += [(await other.post("/v1/completions", json={**BODY, "max_tokens": 2})).status_code for _ in range(2)]
                os.kill(frontend, signal.SIGCONT)
            assert statuses[:6] == [200] * 6 and 429 in statuses[6:], "the frontends share the limit"

            hold(stub, 1)
            call = asyncio.create_task(client.post("/v1/completions", json={**BODY, "max_tokens": 3}))
            await running(client, 1)
            Path(file).write_text("keys:\n  - name: team-a\n    key: another-key-1\n  - name: team-c\n    key: third-key-012\n")
            served.process.send_signal(signal.SIGHUP)
            await until_logged(served, "reloaded ")
            for _ in range(4):
                async with httpx.AsyncClient(base_url=url, timeout=30) as other:
                    assert (await other.get("/v1/models", headers=bearer(OTHER))).status_code == 401
                    assert (await other.get("/v1/models", headers=bearer("third-key-012"))).status_code == 200
            (stub / "hold").unlink()
            assert (await call).status_code == 200, "a request that had begun is not interrupted"

            Path(file).write_text("keys:\n  - name: team-a\n    key: another-key-1\n    priority: high\n")
            served.process.send_signal(signal.SIGHUP)
            await until_logged(served, f"the API keys are not reloaded: {file}:4: priority is 'high'.")
            async with httpx.AsyncClient(base_url=url, timeout=30) as other:
                assert (await other.get("/v1/models", headers=bearer("third-key-012"))).status_code == 200, "the present keys remain"
            assert len([message for message in notified if "RELOADING" in message]) == 2
            served.process.terminate()
            assert await served.ended() == 0
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [record["key"] for record in records].count("team-a") == statuses.count(200)
    assert records[-1]["key"] == "team-b" and records[-1]["completion_tokens"] == 3
    assert not any(key in "".join(served.lines()) for key in (KEY, OTHER, "another-key-1"))
