"""Files and batches with the real `openai` client over a loopback socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from live_http import live_app, live_server
from openai.types import Batch, FileObject
from scripted_service import ScriptedService, make_context

from stoker.base.errors import QueueFullError
from stoker.server.application import make_app
from stoker.server.errors import BodyError, ContentTypeError
from stoker.server.http.form_data import read_form
from stoker.server.protocols.openai.batches import execution
from stoker.server.protocols.openai.batches.lines import MAX_ERRORS, BatchLinesError, read_batch_lines

pytestmark = pytest.mark.compatibility(protocol="OpenAI", client="openai", feature="files and batches")

ENDED = ("completed", "failed", "cancelled", "expired")
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService("Hello", max_output_len=1024)


@pytest.fixture
async def client(service: ScriptedService) -> AsyncIterator[openai.AsyncOpenAI]:
    async with live_server(service) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        yield client


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "tiny", **body}}


def content(*lines: Any) -> bytes:
    return "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines).encode()


async def upload(client: openai.AsyncOpenAI, data: bytes) -> FileObject:
    file = await client.files.create(file=("in.jsonl", data), purpose="batch")
    FileObject.model_validate(file.model_dump())
    return file


async def create(client: openai.AsyncOpenAI, data: bytes, endpoint: str = CHAT, **fields: Any) -> Batch:
    file = await upload(client, data)
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)  # type: ignore[arg-type]


async def ended(client: openai.AsyncOpenAI, batch: Batch) -> Batch:
    async with asyncio.timeout(20):
        while batch.status not in ENDED:
            await asyncio.sleep(0.01)
            batch = await client.batches.retrieve(batch.id)
            Batch.model_validate(batch.model_dump())
    return batch


async def results(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    text = (await client.files.content(file_id)).text
    return {value["custom_id"]: value for value in map(json.loads, text.splitlines())}


async def test_a_batch(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    lines = [line("a", messages=USER), line("b", messages=USER, n=2), line("c", messages=[]), line("d", messages=USER, model="nope")]
    batch = await ended(client, await create(client, content(*lines, ""), metadata={"k": "v"}))
    assert batch.status == "completed" and batch.metadata == {"k": "v"} and batch.completed_at is not None
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (4, 2, 2)
    answers, failures = await results(client, batch.output_file_id), await results(client, batch.error_file_id)
    assert set(answers) == {"a", "b"} and set(failures) == {"c", "d"}
    assert answers["a"]["response"]["body"]["choices"][0]["message"]["content"] == "Hello"
    assert answers["a"]["response"]["status_code"] == 200 and answers["a"]["error"] is None
    assert [failures[name]["response"]["status_code"] for name in "cd"] == [400, 404]
    assert failures["c"]["response"]["body"]["error"]["param"] == "messages"
    assert batch.usage is not None and batch.usage.output_tokens == 15  # three answers of five tokens
    assert {request.priority for request in service.requests} == {execution.BATCH_PRIORITY}
    assert [each.id async for each in client.batches.list(limit=1)] == [batch.id]


async def test_completions_and_responses(client: openai.AsyncOpenAI) -> None:
    completions = await ended(client, await create(client, content(line("a", "/v1/completions", prompt="x")), "/v1/completions"))
    assert (await results(client, completions.output_file_id))["a"]["response"]["body"]["choices"][0]["text"] == "Hello"
    responses = await ended(client, await create(client, content(line("a", "/v1/responses", input="x")), "/v1/responses"))
    assert (await results(client, responses.output_file_id))["a"]["response"]["body"]["status"] == "completed"
    assert responses.usage is not None and responses.usage.output_tokens == 5


async def test_wrong_lines_fail_the_batch(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    wrong = [
        "{",
        "5",
        {"url": CHAT, "body": {}},
        {**line("a"), "method": "GET"},
        {**line("b"), "url": "/v1/embeddings"},
        {**line("c"), "body": []},
        line("d", stream=True),
        line("e", messages=USER),
        line("e", messages=USER),
    ]
    batch = await ended(client, await create(client, content(*wrong)))
    assert batch.status == "failed" and batch.errors is not None and batch.errors.data is not None and service.requests == []
    assert [(error.line, error.param) for error in batch.errors.data] == [
        (1, None),
        (2, None),
        (3, "custom_id"),
        (4, "method"),
        (5, "url"),
        (6, "body"),
        (7, "body.stream"),
        (9, "custom_id"),
    ]
    empty = await ended(client, await create(client, b"\n\n"))
    assert empty.errors is not None and empty.errors.data is not None and empty.errors.data[0].code == "empty_file"
    with pytest.raises(BatchLinesError) as many:
        read_batch_lines(b"{\n" * 1000, (CHAT,))
    assert len(many.value.errors) == MAX_ERRORS


async def test_a_full_queue_is_waited_for(client: openai.AsyncOpenAI, service: ScriptedService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "RETRY_S", 0.01)
    service.error = QueueFullError(1, 1, 1.0)
    batch = await create(client, content(*(line(str(i), messages=USER) for i in range(40))))
    while len(service.requests) < 10:
        await asyncio.sleep(0.01)
    assert service.requests and (await client.batches.retrieve(batch.id)).status == "in_progress"
    service.error = None
    batch = await ended(client, batch)
    assert batch.request_counts is not None and batch.request_counts.completed == 40


async def test_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "POLL_S", 0.01)
    service = ScriptedService("Hello", max_batch_size=2)  # at most four requests are in flight
    async with live_server(service) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as client:
        batch = await create(client, content(*(line(str(i), messages=USER) for i in range(60))))
        while len(service.requests) < 20:
            await asyncio.sleep(0)
        service.hold = asyncio.Event()  # the others never end
        cancelling = await client.batches.cancel(batch.id)
        assert cancelling.status == "cancelling" and cancelling.cancelling_at is not None
        batch = await ended(client, batch)
        assert batch.status == "cancelled" and batch.cancelled_at is not None and batch.cancelling_at is not None
        assert batch.request_counts is not None and 0 < batch.request_counts.completed < 60
        assert len(await results(client, batch.output_file_id)) == batch.request_counts.completed
        assert service.num_streaming == 0
        with pytest.raises(openai.BadRequestError, match="cancelled"):
            await client.batches.cancel(batch.id)


async def test_a_batch_continues_after_a_restart(tmp_path: Path) -> None:
    service = ScriptedService("Hello", max_batch_size=2)  # at most four requests are in flight
    settings = {"state_dir": str(tmp_path / "state")}
    lines = content(*(line(str(i), messages=USER) for i in range(60)))

    async def start(**more: Any) -> Any:
        context = await make_context(service, **settings, **more)
        return context, make_app(context)

    context, app = await start()
    async with live_app(app, context.settings) as port, openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x") as client:
        batch = await create(client, lines)
        output = tmp_path / "state" / "batches" / batch.id / "output.jsonl"
        while not output.exists() or output.read_bytes().count(b"\n") < 10:
            await asyncio.sleep(0)
        for start_work in context.background:
            start_work()()  # the returned function stops the work
        await asyncio.sleep(0.01)
        assert (await client.batches.retrieve(batch.id)).status == "in_progress"
    with output.open("ab") as file:
        file.write(b'{"id": "batch_req_1", "custom_id": "cut')  # the process ended while it wrote
    done = output.read_bytes().count(b"\n")
    assert done < 60
    num_requests = len(service.requests)
    context, app = await start()
    async with live_app(app, context.settings) as port, openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x") as client:
        stops = [start_work() for start_work in context.background]
        batch = await ended(client, await client.batches.retrieve(batch.id))
        assert batch.status == "completed" and batch.request_counts is not None and batch.request_counts.completed == 60
        assert set(await results(client, batch.output_file_id)) == {str(i) for i in range(60)}
        assert len(service.requests) - num_requests == 60 - done  # only the others are executed
        for stop in stops:
            stop()


async def test_files(client: openai.AsyncOpenAI) -> None:
    data = bytes(range(256)) + b"\r\n--x\r\n"
    file = await client.files.create(file=("ä b.bin", data), purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600})
    assert (file.bytes, file.filename, file.purpose) == (len(data), "ä b.bin", "user_data") and file.expires_at == file.created_at + 3600
    assert (await client.files.content(file.id)).content == data and (await client.files.retrieve(file.id)).id == file.id
    other = await upload(client, b"x")
    assert [each.id async for each in client.files.list(purpose="batch", limit=1)] == [other.id]
    assert {each.id async for each in client.files.list()} == {file.id, other.id}
    assert (await client.files.delete(file.id)).deleted
    for missing in (file.id, "file-../../etc/passwd", "file-" + "0" * 32):
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(missing)
    with pytest.raises(openai.BadRequestError, match="purpose"):
        await client.files.create(file=b"x", purpose="vision")
    with pytest.raises(openai.NotFoundError):
        await client.batches.retrieve("batch_1")
    with pytest.raises(openai.NotFoundError, match="no file"):
        await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        await client.batches.create(input_file_id=other.id, endpoint="/v1/embeddings", completion_window="24h")


async def test_files_are_bounded(service: ScriptedService) -> None:
    async with (
        live_server(service, max_stored_bytes=1 << 20, max_request_bytes=1 << 20) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client,
    ):
        first = await upload(client, b"x" * 700_000)
        with pytest.raises(openai.APIStatusError, match="max-stored-bytes") as full:
            await upload(client, b"x" * 700_000)
        assert full.value.status_code == 413
        await client.files.delete(first.id)
        await upload(client, b"x" * 700_000)
        async with httpx.AsyncClient(base_url=url) as http:
            too_large = await http.post("/v1/files", files={"file": b"x" * 1_100_000}, data={"purpose": "batch"})
            assert too_large.status_code == 413
            assert (await http.post("/v1/files", json={"file": "x"})).status_code == 415
            form = {"headers": {"content-type": "multipart/form-data; boundary=b"}, "content": b"--b\r\nx"}
            assert (await http.post("/v1/files", **form)).status_code == 400  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--b--",
        b"--b\r\n\r\nx\r\n--b--",
        b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\nx',
        b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--",
        b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\nx\r\n' * 40 + b"--b--",
    ],
)
def test_a_damaged_form_is_refused(body: bytes) -> None:
    with pytest.raises(BodyError):
        read_form(b"multipart/form-data; boundary=b", body)


def test_a_form_needs_a_boundary() -> None:
    with pytest.raises(ContentTypeError):
        read_form(b"multipart/form-data", b"--b--")
