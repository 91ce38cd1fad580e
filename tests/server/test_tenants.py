"""Named API keys: the file, limits in every protocol, priorities, quotas, metrics, and the log of the usage."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import re
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from live_http import until
from scripted_service import ScriptedService, make_context

from stoker.base.errors import ConfigError
from stoker.server.application import make_app
from stoker.server.errors import RateLimitError
from stoker.server.settings import ServerSettings
from stoker.server.tenants.accepted_keys import with_slots
from stoker.server.tenants.counters import MAX_SLOTS, CounterTable
from stoker.server.tenants.key_file import KeyEntry, digest_of, read_key_file
from stoker.server.tenants.limits import KeyLimits, Moment
from stoker.server.tenants.usage_log import UsageLog, UsageRecord, read_tokens

KEY, OTHER = "sk-team-a-0123456789", "sk-team-b-0123456789"
COMPLETION = {"prompt": [65, 66, 67, 68], "max_tokens": 6}
MESSAGES = [{"role": "user", "content": "Hi"}]
DIGEST = digest_of(OTHER).hex()


def write_keys(folder: Path, text: str = "", name: str = "keys.yaml") -> str:
    """A file with the keys of team-a, which has the fields in `text`, and of team-b, which has no limits."""
    entries = f"keys:\n  - name: team-a\n    key: {KEY}\n{text}  - name: team-b\n    sha256: '{DIGEST}'\n"
    (folder / name).write_text(entries)
    return str(folder / name)


@contextlib.asynccontextmanager
async def tenants(service: ScriptedService, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server in this process, without a supervisor."""
    context = await make_context(service, **settings)
    transport = httpx.ASGITransport(make_app(context))
    async with httpx.AsyncClient(transport=transport, base_url="http://stoker") as client:
        yield client
    context.cleanup.close()


def usage(key: str, num_tokens: int, time: str | None = None) -> bytes:
    """A line of the log."""
    record = UsageRecord(time or datetime.now(UTC).isoformat(), key, "id", "tiny", num_tokens, 0, 0, "stop", 0.1)
    return msgspec.json.encode(record) + b"\n"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ":1: keys is missing"),
        ("keys: []", ":1: keys is not a list"),
        ("keys:\n  - key: sk-0123456789", ":2: name is missing"),
        ("keys:\n  - name: a b\n    key: sk-0123456789", ":2: name is refused"),
        ("keys:\n  - name: a\n", ":2: key is missing"),
        ("keys:\n  - name: a\n    key: 12345678", ":3: key: an API key is refused"),
        ("keys:\n  - name: a\n    key: short", ":3: key: an API key is refused"),
        ("keys:\n  - name: a\n    sha256: abc", ":3: sha256 is refused"),
        ("keys:\n  - name: a\n    key: sk-0123456789\n    rpm: 5", ":4: rpm is an unknown field"),
        ("keys:\n  - name: a\n    key: sk-0123456789\n    requests_per_minutes: 5", "Use one of: requests_per_minute"),
        ("keys:\n  - name: a\n    key: sk-0123456789\n    requests_per_minute: 0", ":4: requests_per_minute is '0'"),
        ("keys:\n  - name: a\n    key: sk-0123456789\n    tokens_per_minute: many", ":4: tokens_per_minute is 'many'"),
        (
            "keys:\n  - name: a\n    key: sk-0123456789\n    tokens_per_day: 5",
            ":4: tokens_per_day needs a log of the usage",
        ),
        ("keys:\n  - name: a\n    key: sk-0123456789\n  - name: a\n    key: sk-0123456780", ":4: name is the same as in line 2"),
        ("keys:\n  - name: a\n    key: sk-0123456789\n  - name: b\n    key: sk-0123456789", ":5: key is the same as in line 3"),
        ("keys: [", "line 1"),
        ("other: 1\nkeys:\n  - name: a\n    key: sk-0123456789", ":1: other is an unknown field"),
    ],
)
def test_an_invalid_file_is_rejected_with_line_and_field(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "keys.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_key_file(tmp_path / "keys.yaml", counts_quotas=False)
    assert expected in str(caught.value) and "sk-0123" not in str(caught.value) and "short" not in str(caught.value)


def test_files_with_and_without_names(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("first-key-1\n\nsecond-key-2\n")
    (entry,) = read_key_file(tmp_path / "keys", counts_quotas=False)
    assert entry == KeyEntry(digests=(digest_of("first-key-1"), digest_of("second-key-2")))
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [{"name": "a", "key": [KEY, "an-older-key"], "priority": -3}]}))
    (entry,) = read_key_file(tmp_path / "keys.json", counts_quotas=False)
    assert entry == KeyEntry(name="a", digests=(digest_of(KEY), digest_of("an-older-key")), priority=-3)
    (tmp_path / "empty").write_text("\n")
    for name in ("empty", "missing"):
        with pytest.raises(ConfigError, match=name):
            read_key_file(tmp_path / name, counts_quotas=False)
    with pytest.raises(ConfigError, match="usage_log is refused without a file of API keys"):
        ServerSettings(usage_log="usage")


async def test_requests_per_minute_priority_and_headers(tmp_path: Path) -> None:
    service = ScriptedService()
    file = write_keys(tmp_path, "    requests_per_minute: 2\n    priority: -2\n")
    async with tenants(service, api_keys_file=file, api_keys=("an-unnamed-key",)) as client:
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 401
        assert (await client.post("/v1/completions", json=COMPLETION, headers=bearer("sk-team-a"))).status_code == 401
        first = await client.post("/v1/completions", json={**COMPLETION, "priority": 3}, headers=bearer(KEY))
        assert first.status_code == 200 and first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert 1 < float(first.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 30
        assert "x-ratelimit-limit-tokens" not in first.headers
        assert service.requests[-1].priority == -2 * (1 << 33) + 3
        assert (await client.get("/v1/models", headers=bearer(KEY))).status_code == 200, "only POST counts"
        assert (await client.post("/v1/completions", json=COMPLETION, headers=bearer(KEY))).status_code == 200
        refused = await client.post("/v1/completions", json=COMPLETION, headers=bearer(KEY))
        assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 30
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "the limit requests_per_minute=2 of the key team-a is reached" in error["message"] and KEY not in refused.text
        for key in (OTHER, "an-unnamed-key"):
            answer = await client.post("/v1/completions", json=COMPLETION, headers=bearer(key))
            assert answer.status_code == 200 and "x-ratelimit-limit-requests" not in answer.headers
        metrics = (await client.get("/metrics", headers=bearer(OTHER))).text
        assert 'stoker_key_requests_total{key="team-a",outcome="length"} 2.0' in metrics
        assert 'stoker_key_tokens_total{key="team-a",kind="prompt"} 8.0' in metrics
        assert 'stoker_key_tokens_total{key="team-a",kind="cached"} 4.0' in metrics
        assert 'stoker_key_tokens_total{key="team-b",kind="completion"} 6.0' in metrics
        assert 'stoker_key_refusals_total{key="team-a",limit="requests_per_minute"} 1.0' in metrics
        assert set(re.findall(r'key="([^"]*)"', metrics)) == {"team-a", "team-b"} and KEY not in metrics


CALLS: dict[str, dict[str, Any]] = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 6, "stream": True},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 6},
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, "max_tokens": 6},
    "/api/generate": {"model": "tiny", "prompt": "Hi", "stream": False},
    "/v2/models/ensemble/generate": {"text_input": "Hi", "max_tokens": 6},
    "/v2/models/ensemble/generate_stream": {"text_input": "Hi", "max_tokens": 6, "stream": True},
    "/invocations": {"inputs": "Hi", "parameters": {"max_new_tokens": 6}},
    "/v1/models/tiny:predict": {"prompt": "Hi", "max_tokens": 6},
}


async def test_every_protocol_refuses_a_request_without_tokens(tmp_path: Path) -> None:
    """The quota of the day is used up by a line of the log, so each request is refused when it begins to generate."""
    log = tmp_path / "usage.jsonl"
    log.write_bytes(usage("team-a", 100) + b'{"torn": ')
    file = write_keys(tmp_path, "    tokens_per_day: 100\n    requests_per_minute: 1000\n")
    service = ScriptedService()
    async with tenants(service, api_keys_file=file, usage_log=str(log)) as client:
        for path, body in CALLS.items():
            answer = await client.post(path, json=body, headers=bearer(KEY))
            assert answer.status_code == 429 and int(answer.headers["retry-after"]) <= 86400, (path, answer.text)
            assert answer.headers["x-ratelimit-limit-requests"] == "1000"
            text = answer.text.replace(r"\u003d", "=")  # as Java's JSON library writes it
            assert "tokens_per_day=100 of the key team-a" in text or path.endswith(":predict"), text
        assert (await client.post("/v1/completions", json=COMPLETION, headers=bearer(KEY))).json()["error"]["code"] == "insufficient_quota"
        assert not service.requests
        assert (await client.post("/v1/completions", json=COMPLETION, headers=bearer(OTHER))).status_code == 200


async def test_concurrent_requests_cannot_exceed_the_tokens_together(tmp_path: Path) -> None:
    """Each request reserves 10 tokens, and returns those that it did not generate."""
    service = ScriptedService("Hi")
    service.hold = asyncio.Event()
    file = write_keys(tmp_path, "    tokens_per_minute: 25\n")
    async with tenants(service, api_keys_file=file) as client:
        calls = [asyncio.create_task(client.post("/v1/completions", json=COMPLETION, headers=bearer(KEY))) for _ in range(6)]
        await until(lambda: sum(call.done() for call in calls) == 4)
        assert service.num_streaming == 2
        assert all(call.result().status_code == 429 for call in calls if call.done())
        service.hold.set()
        answers = [answer for call in calls if (answer := await call).status_code == 200]
        assert len(answers) == 2
        after = await client.post("/v1/completions", json={**COMPLETION, "max_tokens": 1}, headers=bearer(KEY))
        assert after.status_code == 200, "two requests used 6 of 10 tokens each, so 13 are free"
        assert after.headers["x-ratelimit-limit-tokens"] == "25" and 8 <= int(after.headers["x-ratelimit-remaining-tokens"]) < 25
        service.error = ConfigError("the request is refused")
        larger = {"prompt": [65] * 20, "max_tokens": 100}
        assert (await client.post("/v1/completions", json=larger, headers=bearer(KEY))).status_code == 429
        assert (await client.post("/v1/completions", json=larger, headers=bearer(OTHER))).status_code == 400


async def test_the_usage_is_on_the_disk_before_the_answer_ends(tmp_path: Path) -> None:
    log = tmp_path / "usage.jsonl"
    service = ScriptedService()
    async with tenants(service, api_keys_file=write_keys(tmp_path), usage_log=str(log)) as client:
        answer = await client.post("/v1/completions", json=COMPLETION, headers={**bearer(KEY), "x-request-id": "mine"})
        (line,) = log.read_text().splitlines()
        record = json.loads(line)
        assert record | {"time": "", "duration_s": 0, "request_id": ""} == {
            "time": "", "key": "team-a", "request_id": "", "model": "tiny", "prompt_tokens": 4, "cached_tokens": 2,
            "completion_tokens": answer.json()["usage"]["completion_tokens"], "outcome": "length", "duration_s": 0,
        }  # fmt: skip
        assert KEY not in line and record["request_id"] and datetime.fromisoformat(record["time"]).tzinfo is not None
        log.rename(tmp_path / "usage.1")
        async with client.stream("POST", "/v1/completions", json={**COMPLETION, "stream": True}, headers=bearer(OTHER)) as stream:
            async for part in stream.aiter_lines():
                if '"finish_reason":"length"' in part:
                    assert json.loads(log.read_text())["key"] == "team-b", "after log rotation, a new file"
        assert (await client.post("/v1/completions", json={**COMPLETION, "top_p": 9}, headers=bearer(KEY))).status_code == 400
        assert len(log.read_text().splitlines()) == 1, "a refused request used nothing"


async def test_a_log_that_cannot_be_written_fails_the_request(tmp_path: Path) -> None:
    """/dev/full refuses every write as a full disk does."""
    service = ScriptedService()
    async with tenants(service, api_keys_file=write_keys(tmp_path), usage_log="/dev/full") as client:
        stream = await client.post("/v1/completions", json={**COMPLETION, "stream": True}, headers=bearer(KEY))
        assert stream.status_code == 200 and "The usage of the request cannot be recorded" in stream.text
        assert '"finish_reason":"length"' not in stream.text
        refused = await client.post("/v1/completions", json=COMPLETION, headers=bearer(KEY))
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert len(service.requests) == 1, "the second request is refused before it runs"


def test_the_quota_is_read_from_the_log(tmp_path: Path) -> None:
    lines = [
        usage("a", 5, "2026-02-03T10:00:00+00:00"),
        usage("a", 7, "2026-02-02T10:00:00+00:00"),
        usage("b", 1, "2026-01-31T10:00:00+00:00"),
    ]
    (tmp_path / "log").write_bytes(b"".join(lines) + b"{}\n" + lines[0][:20])
    assert read_tokens(tmp_path / "log", "2026-02-03", "2026-02") == {"a": (5, 12)}
    assert read_tokens(tmp_path / "missing", "2026-02-03", "2026-02") == {}


async def test_lines_of_the_log_are_whole(tmp_path: Path) -> None:
    """Two processes that append to one file are two objects here; a torn last line does not damage the next one."""
    (tmp_path / "log").write_bytes(b'{"torn')
    logs = [UsageLog(tmp_path / "log") for _ in range(2)]
    record = UsageRecord("t", "a", "id", "tiny", 1, 0, 1, "stop", 0.5)
    await asyncio.gather(*(logs[number % 2].append(record) for number in range(200)))
    for log in logs:
        log.close()
    lines = [line for line in (tmp_path / "log").read_bytes().splitlines() if line]
    assert lines[0] == b'{"torn' and lines[1:] == [msgspec.json.encode(record)] * 200
    with pytest.raises(ConfigError, match=r"usage_log=.* cannot be opened: No such file"):
        UsageLog(tmp_path / "missing" / "log")


def count_requests(path: str, number: int, accepted: Any) -> None:
    """Count requests until the limit refuses them, in a process of its own."""
    limits = KeyLimits(KeyEntry(name="a", digests=(), requests_per_minute=100, slot=3), CounterTable(Path(path)))
    for _ in range(number):
        with contextlib.suppress(RateLimitError):
            limits.count_request()
            accepted.release()


def test_limits_hold_over_processes(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    accepted = context.Semaphore(0)
    processes = [context.Process(target=count_requests, args=(str(tmp_path / "counters"), 80, accepted)) for _ in range(3)]
    started = time.monotonic()
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    free_meanwhile = (time.monotonic() - started) * 100 / 60
    assert 100 <= accepted.get_value() <= 101 + free_meanwhile


def test_a_slot_that_another_process_holds_is_used_without_the_lock(tmp_path: Path) -> None:
    table = CounterTable(tmp_path / "counters")

    def hold(ready: Any) -> None:
        with CounterTable(tmp_path / "counters").change(5):
            ready.set()
            multiprocessing.get_context("fork").Event().wait(30)

    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=hold, args=(ready,))
    process.start()
    assert ready.wait(30)
    KeyLimits(KeyEntry(name="a", digests=(), requests_per_minute=100, slot=5), table).count_request()
    process.kill()
    process.join(30)
    assert table.read(5).requests == 1.0
    table.close()


def test_quotas_begin_again_with_the_day_and_the_month(monkeypatch: pytest.MonkeyPatch) -> None:
    table = CounterTable()
    limits = KeyLimits(KeyEntry(name="a", digests=(), tokens_per_day=10, tokens_per_month=15), table)

    def at(text: str) -> None:
        moment = Moment(0.0, datetime.fromisoformat(text).replace(tzinfo=UTC))
        monkeypatch.setattr(Moment, "now", classmethod(lambda cls: moment))

    def refused() -> RateLimitError:
        with pytest.raises(RateLimitError) as caught:
            limits.reserve(1)
        return caught.value

    at("2026-01-30T23:00:00")
    limits.reserve(10)
    error = refused()
    assert (error.limit_name, error.retry_after_s, error.code) == ("tokens_per_day", 3600, "insufficient_quota")
    limits.settle(10, 4)
    limits.reserve(6)
    at("2026-01-31T00:00:00")
    limits.reserve(5)
    error = refused()
    assert (error.limit_name, error.retry_after_s) == ("tokens_per_month", 86400)
    at("2026-01-30T00:00:00")
    assert refused().limit_name == "tokens_per_month", "a clock that is set back begins no new day"
    at("2026-02-01T00:00:00")
    limits.reserve(1)
    table.close()


def test_slots_stay_with_their_names() -> None:
    slots: dict[str, int] = {}
    names = [KeyEntry(name=str(number), digests=()) for number in range(3)]
    assert [entry.slot for entry in with_slots(names, slots)] == [0, 1, 2]
    assert [entry.slot for entry in with_slots([names[2], KeyEntry(name="new", digests=())], slots)] == [2, 3]
    full = {str(number): number for number in range(MAX_SLOTS)}
    assert with_slots([names[1], KeyEntry(name="newer", digests=())], full)[0].slot == 1
    assert full["newer"] not in (1,) and len(set(full.values())) == len(full)
