"""Ids, trace contexts, timings and lines of the log of gRPC calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as tgrpc
from triton_server import running
from tritonclient.grpc._utils import _get_inference_request

from stoker.base import logging as stoker_logging
from stoker.base.logging import LogConfig
from stoker.server.protocols.kserve.grpc.calls import client_address

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def log_file(tmp_path: Path) -> Iterator[Path]:
    """The file of the log, which has one JSON object per line during the test."""
    before = stoker_logging.current()
    path = tmp_path / "server.log"
    stoker_logging.apply(LogConfig(level="INFO", file=str(path), format="json"))
    yield path
    stoker_logging.apply(before)


def inputs() -> list[Any]:
    text, tokens = tgrpc.InferInput("text_input", [1, 1], "BYTES"), tgrpc.InferInput("max_tokens", [1, 1], "INT32")
    text.set_data_from_numpy(np.array([[b"Hi"]], dtype=object))
    tokens.set_data_from_numpy(np.array([[4]], dtype=np.int32))
    return [text, tokens]


def test_grpc_calls_have_ids_and_lines(log_file: Path) -> None:
    answers: Queue[Any] = Queue()
    with running() as server:
        client = tgrpc.InferenceServerClient(server.grpc)
        metadata = (("x-request-id", "mine"), ("traceparent", PARENT), ("x-return-timings", "1"))
        request = _get_inference_request(
            model_name="ensemble", inputs=inputs(), model_version="", request_id="message-1", outputs=None, sequence_id=0,
            sequence_start=False, sequence_end=False, priority=0, timeout=None, parameters=None,
        )  # fmt: skip
        _, call = client._client_stub.ModelInfer.with_call(request, metadata=metadata)
        trailing = dict(call.trailing_metadata())
        assert trailing["x-request-id"] == "mine" and trailing["traceparent"].startswith(PARENT[:36])
        assert re.fullmatch(r"prepare;dur=[\d.]+, queue;.*, total;dur=[\d.]+", trailing["server-timing"])
        _, call = client._client_stub.ModelInfer.with_call(request)
        assert dict(call.trailing_metadata())["x-request-id"] == "message-1"
        client.start_stream(lambda result, error: answers.put(error or result))
        for name in ("ensemble", "unknown"):
            client.async_stream_infer(name, inputs(), request_id=name, enable_empty_final_response=True)
            while not isinstance(result := answers.get(timeout=30), Exception) and not is_final(result):
                pass
        client.stop_stream()
        client.close()
    rows = [json.loads(line) for line in log_file.read_text().splitlines()]
    rows = [row for row in rows if row["logger"] == "stoker.access"]
    assert [(row["id"], row["route"], row["status"] < 400) for row in rows] == [
        ("mine", "ModelInfer", True),
        ("message-1", "ModelInfer", True),
        ("ensemble", "ModelStreamInfer", True),
        ("unknown", "ModelStreamInfer", False),
    ]
    assert rows[0]["trace"] == PARENT.split("-")[1] and rows[0]["protocol"] == "grpc" and rows[0]["client"] == "127.0.0.1"
    assert all(row["tokens_out"] > 0 and row["queue_s"] >= 0 and row["model"] == "tiny" for row in rows[:3])
    assert rows[3]["error"]


def is_final(result: Any) -> bool:
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


def test_addresses_of_clients() -> None:
    assert client_address("ipv4:10.0.0.1:5000") == "10.0.0.1" and client_address("unix:") == "unix"
    assert client_address("ipv6:%5B::1%5D:5000") == client_address("ipv6:[::1]:5000") == "::1"
