"""The log: lines of requests and of the load, ids and trace contexts in HTTP headers and gRPC metadata, formats, levels and files."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_http import asgi_client
from scripted_service import ScriptedService, make_context

from stoker.base import logging as stoker_logging
from stoker.base.errors import ConfigError
from stoker.base.logging import LogConfig
from stoker.base.types import Timings
from stoker.runtime.request import ExecutorStats
from stoker.server.protocols.kserve.errors import TritonError
from stoker.server.protocols.kserve.log_settings import LogSettings
from stoker.server.telemetry.record import Generation, RequestRecord
from stoker.server.telemetry.summary import LoadLog, load_event
from stoker.server.telemetry.trace_context import new_trace, parse_parent

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}


@pytest.fixture
def log_file(tmp_path: Path) -> Iterator[Path]:
    """The file of the log, which has one JSON object per line during the test."""
    before = stoker_logging.current()
    path = tmp_path / "server.log"
    stoker_logging.apply(LogConfig(level="INFO", file=str(path), format="json"))
    yield path
    stoker_logging.apply(before)


def lines(path: Path, logger: str = "stoker.access") -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if row["logger"] == logger]


REQUESTS = {
    "openai": ("/v1/chat/completions", CHAT),
    "anthropic": ("/v1/messages", CHAT),
    "ollama": ("/api/chat", {"model": "tiny", "messages": CHAT["messages"], "stream": False, "options": {"num_predict": 5}}),
    "kserve": ("/v2/models/ensemble/generate", {"text_input": "Hi", "max_tokens": 5}),
    "sagemaker": ("/invocations", {"inputs": "Hi", "parameters": {"max_new_tokens": 5}}),
}


@pytest.mark.parametrize("protocol", REQUESTS)
async def test_each_request_has_one_line_and_its_ids_are_returned(protocol: str, log_file: Path) -> None:
    path, body = REQUESTS[protocol]
    async with asgi_client(ScriptedService("Hello, world")) as client:
        response = await client.post(path, json=body, headers={"x-request-id": "order 7", "traceparent": PARENT})
    assert response.status_code == 200, response.text
    assert response.headers["x-request-id"] == "order 7"
    version, trace_id, span_id, flags = response.headers["traceparent"].split("-")
    assert (version, trace_id, flags) == ("00", PARENT.split("-")[1], "01") and span_id != PARENT.split("-")[2]
    (line,) = lines(log_file)
    assert line["id"] == "order 7" and line["trace"] == trace_id and line["status"] == 200
    assert line["protocol"] == protocol and line["model"] == "tiny" and line["client"] == "127.0.0.1" and line["route"].startswith("/")
    assert line["tokens_in"] > 0 and line["tokens_out"] == 5 and line["tokens_cached"] == 2
    assert 0 <= line.get("ttft_s", 0) <= line["total_s"] < 60
    assert "prompt" not in line and "output" not in line


async def test_lines_of_streams_refusals_unknown_routes_and_probes(log_file: Path) -> None:
    async with asgi_client(ScriptedService("Hello"), api_keys=("secret-key",)) as client:
        headers = {"authorization": "Bearer secret-key"}
        await client.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers=headers)
        await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": -1}, headers=headers)
        await client.post("/v1/chat/completions", json=CHAT)
        await client.get("/nothing%0D%0Ahere")
        await client.get("/health")
        await client.get("/metrics", headers=headers)
    rows = lines(log_file)
    assert [(row["status"], row.get("error", ""), row["route"]) for row in rows] == [
        (200, "", "/v1/chat/completions"),
        (400, "bad_request", "/v1/chat/completions"),
        (401, "invalid_api_key", "/v1/chat/completions"),
        (404, "unknown_route", "-"),
    ]
    assert rows[0]["tokens_out"] == 5 and rows[0]["finish"] == "stop" and rows[0]["ttft_s"] <= rows[0]["total_s"]


async def test_contents_are_logged_only_on_request(log_file: Path) -> None:
    async with asgi_client(ScriptedService("Hello", "World"), log_requests="contents") as client:
        await client.post("/v1/completions", json={"prompt": "A\nB", "max_tokens": 5, "n": 2, "stream": True})
        await client.post("/v1/completions", json={"prompt": ["x", "y"], "max_tokens": 5})
    first, second = lines(log_file)
    assert first["prompt"] == ["A\nB"] and first["output"] == ["Hello", "World"] and first["tokens_out"] == 10
    assert second["prompt"] == ["x", "y"] and second["output"] == ["Hello", "Hello"]


async def test_without_a_log_of_requests_there_are_no_lines(log_file: Path) -> None:
    async with asgi_client(ScriptedService("Hello"), log_requests="none") as client:
        await client.post("/v1/chat/completions", json=CHAT)
    assert lines(log_file) == []
    with pytest.raises(ConfigError, match="log_requests"):
        await make_context(log_requests="all")


def test_text_lines_cannot_be_forged() -> None:
    from stoker.server.telemetry.access_log import _event

    record = RequestRecord('x" in=9\x0bstatus=1', client="::1", protocol="openai", method="POST", route="/v1/models")
    text = str(_event(record))
    assert "\x0b" not in text and """id='x" in=9\\x0bstatus=1'""" in text and " model=- key=- in=0 " in text


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
        b"00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
        b"00-00000000000000000000000000000000-b7ad6b7169203331-01",
        b"00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        b"ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
        b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01" + b"-" * 600,
        b" 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    ],
)
def test_invalid_trace_contexts_are_ignored(header: bytes) -> None:
    assert parse_parent(header) is None


def test_trace_contexts_are_those_of_opentelemetry() -> None:
    """The oracle is OpenTelemetry's own propagator."""
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    for context in (parse_parent(PARENT.encode(), b"a=1,b=2"), parse_parent(b"cc" + PARENT[2:].encode() + b"-x"), new_trace(sampled=True)):
        assert context is not None
        theirs = TraceContextTextMapPropagator().extract({"traceparent": context.header})
        span = trace.get_current_span(theirs).get_span_context()
        assert (span.trace_id, span.span_id) == (int(context.trace_id, 16), int(context.span_id, 16))
        assert bool(span.trace_flags & 1) == context.sampled
    assert parse_parent(PARENT.encode(), b"a=1\n") is not None and parse_parent(PARENT.encode(), b"a" * 600).state == ""  # type: ignore[union-attr]


def test_phases_are_returned_as_server_timing() -> None:
    record = RequestRecord("a", client="-", protocol="openai", method="POST", route="/")
    timings = Timings(0.002, 0.010, 0.050, 100.0, 0.01, prepare_s=0.001)
    assert timings.phases() == pytest.approx(
        {"prepare": 0.001, "queue": 0.002, "prefill": 0.007, "decode": 0.04, "compute": 0.047, "total": 0.05}
    )
    record.generations = [Generation("m", 0.0, 1.0, usage=Any, timings=timings)]
    assert record.response_headers() == []
    record.returns_timings = True
    expected = b"prepare;dur=1.000, queue;dur=2.000, prefill;dur=7.000, decode;dur=40.000, compute;dur=47.000, total;dur=50.000"
    assert record.response_headers() == [(b"server-timing", expected)]


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_has_the_times_of_phases_on_request(stream: bool) -> None:
    body = {**CHAT, "stream": stream, "stream_options": {"include_usage": True}} if stream else CHAT
    service = ScriptedService("Hello, world")
    service.timings = Timings(0.002, 0.008, 0.02, 5.0, 0.003, prepare_s=0.001)
    async with asgi_client(service) as client:
        with_times, without = [
            (await client.post("/v1/chat/completions", json=body, headers=headers)).text for headers in ({"x-return-timings": "1"}, {})
        ]
    assert "timings_ms" not in without
    usage = json.loads(with_times.split("data: ")[-2] if stream else with_times)["usage"]
    assert usage["timings_ms"] == {"prepare": 1.0, "queue": 2.0, "prefill": 5.0, "decode": 12.0, "compute": 17.0, "total": 20.0}
    assert usage["completion_tokens"] == 5


async def test_a_line_about_the_load(log_file: Path) -> None:
    before = ExecutorStats(num_steps=1)
    now = ExecutorStats(
        num_steps=9, num_running=3, num_waiting=2, num_blocks=10, num_free_blocks=7, num_decode_tokens=500, num_prefill_tokens=60,
        num_reused_tokens=40, num_preemptions=1,
    )  # fmt: skip
    event = load_event("m", before, now, 10.0)
    assert str(event) == "model=m output=50.0 tokens/s prompt=6.0 tokens/s running=3 waiting=2 kv=30.0% reuse=40.0% preemptions=1"
    assert load_event("m", now, now, 10.0) is None
    restarted = load_event("m", now, ExecutorStats(num_steps=20, num_decode_tokens=30, num_prefill_tokens=70, num_reused_tokens=30), 10.0)
    assert restarted is not None, "a new executor counts from 0"
    assert (restarted.output_tokens_per_s, restarted.prompt_tokens_per_s, restarted.reuse, restarted.preemptions) == (3.0, 7.0, 0.3, 0)
    service = ScriptedService("Hello")
    load_log = LoadLog((await make_context(service)).repository, None)
    await load_log.write()
    assert lines(log_file, "stoker.load") == []
    load_log._before["tiny"] = (load_log._before["tiny"][0] - 10, before)
    await load_log.write()
    (line,) = lines(log_file, "stoker.load")
    assert line["model"] == "tiny" and line["kv_usage"] == 0.3 and line["running"] == 0


async def test_one_frontend_writes_the_lines_about_the_load(tmp_path: Path) -> None:
    repository = (await make_context(ScriptedService("Hello"))).repository
    first, second = LoadLog(repository, tmp_path), LoadLog(repository, tmp_path)
    stop = first.start()
    assert (first._has_lock(), second._has_lock(), first._has_lock()) == (True, False, True)
    stop()
    assert second._has_lock()


async def test_tritons_log_settings(log_file: Path) -> None:
    context = await make_context(ScriptedService("Hello"))
    settings, log = LogSettings(context.coordination), stoker_logging.get_logger("stoker.test")
    initial = {
        "log_file": str(log_file),
        "log_info": True,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 0,
        "log_format": "JSON",
    }
    assert settings.values() == initial
    assert await settings.change({}) == initial
    changed = await settings.change({"log_info": False, "log_format": "ISO8601"})
    assert changed == {**initial, "log_info": False, "log_format": "ISO8601"}
    log.info("hidden")
    log.warning("shown")
    assert (await settings.change({"log_verbose_level": 3, "log_warning": False}))["log_verbose_level"] == 3
    log.debug("verbose")
    log.warning("hidden")
    moved = await settings.change({"log_file": "other.log", "log_format": "default"})
    assert moved["log_file"] == str(log_file.parent / "other.log")
    log.error("in the other file")
    text = log_file.read_text()
    assert "hidden" not in text and re.search(r"(?m)^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z W stoker.test: shown$", text)
    assert "verbose" in text and "in the other file" in (log_file.parent / "other.log").read_text()
    link = log_file.parent / "link.log"
    link.symlink_to(log_file)
    refused = [{"log_file": name} for name in ("../x.log", "/etc/passwd", "config.json", "a/b.log", "link.log", "", "a\nb.log")]
    refused += [
        {"log_level": 1},
        {"log_info": 1},
        {"log_verbose_level": 5},
        {"log_verbose_level": True},
        {"log_format": "xml"},
        {"log_format": []},
    ]
    for change in refused:
        with pytest.raises(TritonError):
            await settings.change({"log_error": False, **change})
    assert settings.values() == moved


async def test_the_file_of_the_log_cannot_be_set_without_one_at_the_start() -> None:
    before = stoker_logging.current()
    stoker_logging.apply(LogConfig())
    try:
        async with asgi_client(ScriptedService("Hello")) as client:
            response = await client.post("/v2/logging", json={"log_file": "x.log"})
            assert response.status_code == 400 and "can not be updated through network protocol" in response.json()["error"]
            assert (await client.post("/v2/logging", json={"log_verbose_level": 2})).json()["log_verbose_level"] == 2
            assert logging.getLogger("stoker").level == logging.DEBUG
            assert (await client.get("/v2/logging")).json()["log_verbose_level"] == 2
    finally:
        stoker_logging.apply(before)


def test_invalid_configurations_of_the_log(tmp_path: Path) -> None:
    before = stoker_logging.current()
    with pytest.raises(ConfigError, match="xml"):
        stoker_logging.apply(LogConfig(format="xml"))
    with pytest.raises(ConfigError, match="cannot be opened: No such file"):
        stoker_logging.apply(LogConfig(file=str(tmp_path / "no" / "x.log")))
    assert stoker_logging.current() == before


async def test_a_renamed_log_file_is_opened_again(log_file: Path) -> None:
    log = stoker_logging.get_logger("stoker.test")
    log.info("before")
    log_file.rename(log_file.with_suffix(".1"))
    log.info("after")
    assert [row["message"] for row in lines(log_file, "stoker.test")] == ["after"]
