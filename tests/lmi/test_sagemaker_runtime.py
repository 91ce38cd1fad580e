"""The unmodified sagemaker-runtime client of boto3 against a live server."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import boto3
import botocore.exceptions
import pytest
from botocore.config import Config
from live_http import live_server
from lmi_recordings import FAILED, FOLDER, RecordedService

from stoker.server.protocols.sagemaker import eventstream

pytestmark = pytest.mark.compatibility(
    protocol="LMI and SageMaker", client="boto3", feature="invoke_endpoint, invoke_endpoint_with_response_stream, errors"
)

RECORDED = Path(FOLDER / "sagemaker-eventstream-bytes.txt").read_text()


def client(url: str) -> Any:
    keys = {"aws_access_key_id": "AKIDEXAMPLE", "aws_secret_access_key": "made-up", "region_name": "us-east-1"}
    return boto3.client("sagemaker-runtime", endpoint_url=url, config=Config(retries={"total_max_attempts": 1}), **keys)


async def call(method: str, body: Any, collect: Any, **members: Any) -> Any:
    data = json.dumps(body).encode()
    async with live_server(RecordedService(), protocols=("sagemaker",)) as url:

        def run() -> Any:
            arguments = {"EndpointName": "any", "ContentType": "application/json", **members}
            return collect(getattr(client(url), method)(Body=data, **arguments))

        return await asyncio.to_thread(run)


def parts(answer: dict[str, Any]) -> tuple[str, list[bytes]]:
    return answer["ContentType"], [event["PayloadPart"]["Bytes"] for event in answer["Body"]]


def recorded_frame(title: str) -> bytes:
    found = re.search(rf"^== {re.escape(title)}\n.*?^  hex: (\w+)$", RECORDED, flags=re.M | re.S)
    assert found is not None
    return bytes.fromhex(found[1])


def test_frames_as_recorded() -> None:
    first = b'{"token": {"id": 101, "text": "Hello"}}\n'
    last = b'{"token": {"id": 2, "text": ""}, "generated_text": "Hello"}\n'
    assert eventstream.part(first) == recorded_frame("PayloadPart, payload " + first.decode().replace("\n", "\\n"))
    assert eventstream.part(last) == recorded_frame("PayloadPart, payload " + last.decode().replace("\n", "\\n"))
    assert eventstream.part(b"") == recorded_frame("PayloadPart, empty payload")
    broken = eventstream.exception("ModelStreamError", "engine broke", "ModelInvocationTimeExceeded")
    assert broken == recorded_frame("exception ModelStreamError")
    error = {":error-code": "BadThing", ":error-message": "went wrong", ":message-type": "error"}
    assert eventstream.message(error, b"") == recorded_frame("error")


async def test_invoke_endpoint() -> None:
    body = {"inputs": "hi there", "parameters": {"max_new_tokens": 2}}
    kind, read = await call("invoke_endpoint", body, lambda answer: (answer["ContentType"], answer["Body"].read()), EndpointName="a b")
    assert (kind, read) == ("application/json", b'{"generated_text": "Hello,"}')


async def test_invoke_endpoint_with_every_member() -> None:
    members = {
        "Accept": "application/json",
        "CustomAttributes": "trace=1",
        "TargetVariant": "v1",
        "InferenceId": "inf-1",
        "InferenceComponentName": "ic-1",
    }
    read = await call("invoke_endpoint", {"inputs": "hi"}, lambda answer: answer["Body"].read(), **members)
    assert json.loads(read) == {"generated_text": "Hello, wörld"}


async def test_streams_are_event_streams() -> None:
    body = {"inputs": "hi there", "stream": True, "parameters": {"max_new_tokens": 2}}
    kind, found = await call("invoke_endpoint_with_response_stream", body, parts)
    assert kind == "application/jsonlines"
    assert b"".join(found) == (
        b'{"token": {"id": 101, "text": "Hello", "log_prob": -0.5}}\n'
        b'{"token": {"id": 102, "text": ",", "log_prob": -0.25}, "generated_text": "Hello,"}\n'
    )


async def test_whole_answers_are_event_streams_too() -> None:
    kind, found = await call("invoke_endpoint_with_response_stream", {"inputs": "hi"}, parts)
    assert (kind, b"".join(found)) == ("application/json", '{"generated_text": "Hello, wörld"}'.encode())


@pytest.mark.parametrize("method", ["invoke_endpoint", "invoke_endpoint_with_response_stream"])
async def test_errors_are_model_errors(method: str) -> None:
    with pytest.raises(botocore.exceptions.ClientError, match=r"ModelError.*Received client error \(400\)") as caught:
        await call(method, {"inputs": "hi", "parameters": {"temperatur": 1}}, lambda answer: answer)
    assert caught.value.response["OriginalStatusCode"] == 400
    assert "Did you mean temperature" in caught.value.response["OriginalMessage"]


async def test_an_error_in_a_stream_raises_in_the_client() -> None:
    with pytest.raises(botocore.exceptions.EventStreamError, match=f"ModelStreamError.*{FAILED}"):
        await call("invoke_endpoint_with_response_stream", {"inputs": "BOOM LATE", "stream": True}, parts)
