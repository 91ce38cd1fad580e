"""Triton's trace extension: settings over HTTP and gRPC, with the steps of Triton's own test, and the files of traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as tgrpc
import tritonclient.http as thttp
from google.protobuf import json_format
from triton_server import RunningServer, running, until
from tritonclient.utils import InferenceServerException

from stoker.base.errors import ConfigError
from stoker.server.protocols.kserve.model_config import TritonOptions
from stoker.server.protocols.kserve.models.catalogue import default_models
from stoker.server.protocols.kserve.tracing import file
from stoker.server.protocols.kserve.tracing.settings import DEFAULTS, check_setting, read_trace_config

CLIENTS = {"http": thttp, "grpc": tgrpc}
TIMES = [
    "REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END", "INFER_RESPONSE_COMPLETE",
    "REQUEST_END",
]  # fmt: skip


def options(path: Path, **settings: Any) -> TritonOptions:
    start = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_file": str(path)} | settings
    return TritonOptions(models=default_models(), unary=True, trace=start)


def settings_of(client: Any, kind: str, changed: dict[str, Any] | None = None, model: str | None = None) -> dict[str, Any]:
    """The settings after a change, or the present ones, in the form of HTTP."""
    if changed is None:
        answer = client.get_trace_settings(model_name=model)
    else:
        answer = client.update_trace_settings(model_name=model, settings=changed)
    if kind == "http":
        return dict(answer)
    values = {name: item["value"] for name, item in json_format.MessageToDict(answer)["settings"].items()}
    return {name: value if name == "trace_level" else value[0] for name, value in values.items()}


@pytest.mark.parametrize("kind", CLIENTS)
def test_settings_of_the_server_and_of_a_model(tmp_path: Path, kind: str) -> None:
    """The steps of test_http_update_settings and test_http_clear_settings in Triton's qa/L0_trace."""
    path = tmp_path / "trace.json"
    with running(options=options(path)) as server:
        client = CLIENTS[kind].InferenceServerClient(getattr(server, kind))
        initial = {**DEFAULTS, "trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_file": str(path)}
        assert settings_of(client, kind) == settings_of(client, kind, model="ensemble") == initial
        for changed, model in (({"trace_file": "model.log"}, "ensemble"), ({"trace_mode": "opentelemetry"}, None)):
            with pytest.raises(InferenceServerException, match="can not be updated through network protocol"):
                settings_of(client, kind, changed, model)
        for call in (lambda: settings_of(client, kind, model="no"), lambda: settings_of(client, kind, {"trace_rate": "2"}, "no")):
            with pytest.raises(InferenceServerException, match="Request for unknown model : no"):
                call()
        both = {**initial, "trace_level": ["TIMESTAMPS", "TENSORS"]}
        assert settings_of(client, kind, {"trace_level": ["TIMESTAMPS", "TENSORS"]}) == both == settings_of(client, kind, model="ensemble")
        settings_of(client, kind, {"trace_rate": "12", "log_frequency": "34"}, "ensemble")
        settings_of(client, kind, {"trace_rate": "56", "trace_count": "78", "trace_level": ["OFF"]})
        assert settings_of(client, kind, {"trace_rate": None, "trace_count": None}) == {**initial, "trace_level": ["OFF"]}
        of_model = {**initial, "trace_level": ["OFF"], "trace_rate": "12", "log_frequency": "34"}
        assert settings_of(client, kind, model="ensemble") == of_model
        assert settings_of(client, kind, {"trace_rate": None, "trace_level": None}, "ensemble") == {**of_model, "trace_rate": "1"}
        client.close()


def infer(server: RunningServer, kind: str, request_id: str, model: str = "ensemble") -> None:
    module = CLIENTS[kind]
    text, tokens = module.InferInput("text_input", [1, 1], "BYTES"), module.InferInput("max_tokens", [1, 1], "INT32")
    text.set_data_from_numpy(np.array([["Hi, é"]], dtype=object))
    tokens.set_data_from_numpy(np.array([[4]], dtype=np.int32))
    client = module.InferenceServerClient(getattr(server, kind))
    client.infer(model, [text, tokens], request_id=request_id)
    client.close()


def traces(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The entries of each trace, by the id of its request."""
    entries = json.loads(path.read_text())
    names = {entry["id"]: entry["request_id"] for entry in entries if "model_name" in entry}
    return {name: [entry for entry in entries if entry["id"] == trace_id] for trace_id, name in names.items()}


def test_timestamps_and_tensors_are_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with running(options=options(path, trace_level=["TIMESTAMPS", "TENSORS"])) as server:
        infer(server, "http", "one")
        until(lambda: path.exists() and path.stat().st_size > 0)
        assert list(traces(path)) == ["one"]
        infer(server, "grpc", "two")
    found = traces(path)
    assert list(found) == ["one", "two"]
    for name, (received, sent) in {"one": ("HTTP_RECV", "HTTP_SEND"), "two": ("GRPC_WAITREAD", "GRPC_SEND")}.items():
        head, *rest = found[name]
        assert head["model_name"] == "ensemble" and head["model_version"] == 1
        times = [(stamp["name"], stamp["ns"]) for entry in rest for stamp in entry.get("timestamps", ())]
        assert [stamp for stamp, _ in times] == [f"{received}_START", f"{received}_END", *TIMES, f"{sent}_START", f"{sent}_END"]
        assert [ns for _, ns in times] == sorted(ns for _, ns in times)
        tensors = [(entry["activity"], entry["tensor"]) for entry in rest if "tensor" in entry]
        inputs = {tensor["name"]: tensor for activity, tensor in tensors if activity == "TENSOR_QUEUE_INPUT"}
        assert inputs["text_input"] == {"name": "text_input", "data": "Hi, é", "shape": "1,1", "dtype": "BYTES"}
        assert inputs["max_tokens"] == {"name": "max_tokens", "data": "4", "shape": "1,1", "dtype": "INT32"}
        assert any(activity == "TENSOR_BACKEND_OUTPUT" and tensor["name"] == "text_output" for activity, tensor in tensors)


def test_rate_count_and_frequency(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with running(options=options(path, trace_rate="2", trace_count="2", log_frequency="2")) as server:
        for i in range(8):
            infer(server, "http", str(i))
        until(path.with_name("trace.json.0").exists)
        httpx.post(
            f"http://{server.http}/v2/models/ensemble/trace/setting", json={"trace_count": "1", "trace_rate": 1, "log_frequency": "0"}
        )
        infer(server, "http", "last")
        infer(server, "http", "after the last")
    assert list(traces(path.with_name("trace.json.0"))) == ["1", "3"]
    assert list(traces(path)) == ["last"] and len(list(tmp_path.iterdir())) == 2


def test_a_level_needs_a_file() -> None:
    with running() as server:
        url = f"http://{server.http}/v2/trace/setting"
        answer = httpx.post(url, json={"trace_level": ["TIMESTAMPS"]})
        assert answer.status_code == 400 and "without a trace file" in answer.json()["error"]
        assert httpx.post(url, json={"trace_level": ["OFF"]}).json() == httpx.get(url).json() == DEFAULTS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("trace_level", []), ("trace_level", ["MAX"]), ("trace_level", ["OFF", "TENSORS"]), ("trace_level", 1), ("trace_rate", "0"),
        ("trace_rate", "x"), ("trace_rate", "1" * 30), ("trace_rate", True), ("trace_count", "-2"), ("log_frequency", "-1"),
        ("log_frequency", ["1", "2"]), ("trace_rate", 1.5), ("trace_rate", "٣"),
    ],
)  # fmt: skip
def test_invalid_settings(name: str, value: Any) -> None:
    with pytest.raises(Exception, match=f"trace setting '{name}' must be"):
        check_setting(name, value)


def test_options_of_the_command_line() -> None:
    texts = ["level=TIMESTAMPS", "level=TENSORS", "rate=10", "count=5", "triton,file=/tmp/t.json", "triton,log-frequency=3", "mode=triton"]
    expected = {
        "trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "10", "trace_count": "5", "trace_file": "/tmp/t.json", "log_frequency": "3",
        "trace_mode": "triton",
    }  # fmt: skip
    assert read_trace_config(texts) == (expected, None)
    settings, url = read_trace_config(["mode=opentelemetry", "opentelemetry,url=http://localhost:4318", "level=TIMESTAMPS", "rate=100"])
    assert url == "http://localhost:4318" and settings["trace_mode"] == "opentelemetry" and settings["trace_rate"] == "100"
    for wrong in (["level"], ["color=red"], ["jaeger,url=x"], ["rate=0"], ["level=TIMESTAMPS"], ["mode=opentelemetry", "level=TIMESTAMPS"]):
        with pytest.raises(ConfigError, match="--trace-config"):
            read_trace_config(wrong)


def test_a_file_is_always_a_whole_array(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    for expected in ([1], [1, 2], [1, 2, 3]):
        file.append(path, [{"id": expected[-1]}])
        assert [entry["id"] for entry in json.loads(path.read_text())] == expected
