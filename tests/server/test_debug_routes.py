"""The routes for diagnosis: they require the admin key, and return no contents of requests."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_http import asgi_client
from scripted_service import ScriptedService

from stoker.base.errors import ConfigError
from stoker.cli.api_keys import read_admin_key
from stoker.server.settings import ServerSettings

ADMIN = "an-admin-key-0123"


async def test_the_state_requires_the_admin_key() -> None:
    async with asgi_client(ScriptedService()) as client:
        closed = await client.get("/debug/state")
        assert closed.status_code == 403 and "the server has no admin key. Start it with --admin-key-file" in closed.json()["error"]
    async with asgi_client(ScriptedService(), admin_key=ADMIN, api_keys=("a-client-key",), protocols=("openai",)) as client:
        for headers in ({}, {"authorization": "Bearer a-client-key"}, {"authorization": f"Basic {ADMIN}"}):
            refused = await client.get("/debug/state", headers=headers)
            assert refused.status_code == 401 and ADMIN not in refused.text
        state = await client.get("/debug/state", headers={"authorization": f"Bearer {ADMIN}"})
        assert state.status_code == 200 and state.json()["model"] == "tiny"
        assert {"stats", "running", "waiting", "tiers"} <= set(state.json())
        assert (await client.get("/v1/models", headers={"authorization": f"Bearer {ADMIN}"})).status_code == 401, "it is no client's key"


def test_the_admin_key_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_ADMIN_KEY", f" {ADMIN} ")
    assert read_admin_key(None) == ADMIN
    (tmp_path / "key").write_text("another-admin-key\n")
    assert read_admin_key(tmp_path / "key") == "another-admin-key"
    (tmp_path / "key").write_text("first-key-1\nsecond-key-2\n")
    with pytest.raises(ConfigError, match="has 2 lines"):
        read_admin_key(tmp_path / "key")
    with pytest.raises(ConfigError, match="an API key is refused"):
        ServerSettings(admin_key="short")


async def test_a_profile_is_sent_and_deleted(tmp_path: Path) -> None:
    service, admin = ScriptedService(), {"authorization": f"Bearer {ADMIN}"}
    async with asgi_client(service, admin_key=ADMIN) as client:
        assert (await client.post("/debug/profile")).status_code == 401
        wrong = {"steps=0": "steps", "steps=1001": "steps", "steps=x": "steps", "time_s=301": "time_s", "step=5": "step"}
        for query, field in wrong.items():
            refused = await client.post(f"/debug/profile?{query}", headers=admin)
            assert refused.status_code == 400 and refused.json()["error"].startswith(f"{field}="), refused.text
        assert (await client.post("/debug/profile", headers=admin)).status_code == 503, "no step ran"
        service.profile_folder = tmp_path / "profile"
        service.profile_folder.mkdir()
        trace = await client.post("/debug/profile?steps=7", headers=admin)
        assert trace.json() == {"traceEvents": []} and trace.headers["x-profiled-steps"] == "7"
        assert not service.profile_folder.exists()
