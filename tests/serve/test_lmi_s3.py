"""Models in S3: checkpoints, prebuilt engines and model data, missing and truncated objects; and requests of boto3's sagemaker-runtime."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from moto.server import ThreadedMotoServer

from stoker import LLM, SamplingParams
from stoker.base.errors import CheckpointError, StokerError
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.cli.prepare_server import engine_info
from stoker.cli.server_process import running_server
from stoker.deploy.deployment import EngineSource
from stoker.deploy.lmi.package import package
from stoker.deploy.prepare import PreparedEngine, prepare_engine, read_deployment
from stoker.engine.reader import Engine

S3 = pytest.mark.compatibility(protocol="LMI and SageMaker", client="boto3", feature="models and model data in S3, then invoke_endpoint")

PROPERTIES = "option.model_id=s3://models/{}\noption.tensor_parallel_degree=1\noption.max_rolling_batch_size=4\n"


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "hunter2",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": f"http://{host}:{port}",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        client = boto3.client("s3")
        client.create_bucket(Bucket="models")
        yield client
    server.stop()


@pytest.fixture(scope="module")
def archive(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packaged")
    build(checkpoint, folder / "engine", BuildConfig(dtype="float32"), verify="files")
    package(engine_info(folder / "engine"), folder / "model.tar.gz", {"option.max_tokens": "512"})
    return folder / "model.tar.gz"


def put(client: Any, folder: Path, prefix: str) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            client.upload_file(str(file), "models", f"{prefix}/{file.relative_to(folder)}")


def prepare(folder: Path, prefix: str) -> PreparedEngine:
    folder.mkdir()
    (folder / "serving.properties").write_text(PROPERTIES.format(prefix))
    return prepare_engine(read_deployment(folder, {}), {})


@S3
def test_a_checkpoint(s3: Any, checkpoint: Path, tmp_path: Path) -> None:
    put(s3, checkpoint, "llama")
    found = prepare(tmp_path / "lmi", "llama")
    config = Engine.open(found.engine, verify=True).config
    assert (found.deployment.format, config.limits.max_batch_size) == ("lmi", 4)
    assert prepare(tmp_path / "again", "llama").engine == found.engine, "built once"


@S3
def test_the_prebuilt_layout(s3: Any, archive: Path, tmp_path: Path) -> None:
    """A prefix with tensorrt_llm/, with and without other objects."""
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "data")
    put(s3, tmp_path / "data", "complete")
    put(s3, tmp_path / "data" / "tensorrt_llm", "alone/tensorrt_llm")
    for prefix in ("complete", "alone"):
        found = prepare(tmp_path / f"lmi-{prefix}", prefix)
        assert isinstance(found.deployment.source, EngineSource)
        Engine.open(found.engine, verify=True)
        assert found.deployment.runtime.max_batch_size == 4, "lower than that of the engine"


def test_missing_objects(s3: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="s3://models/none has no objects"):
        prepare(tmp_path / "lmi", "none")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_truncated_objects(name: str, s3: Any, checkpoint: Path, tmp_path: Path) -> None:
    put(s3, checkpoint, f"cut-{name}")
    data = (checkpoint / name).read_bytes()
    s3.put_object(Bucket="models", Key=f"cut-{name}/{name}", Body=data[: len(data) // 2])
    with pytest.raises(StokerError) as caught:
        prepare(tmp_path / "lmi", f"cut-{name}")
    assert name in str(caught.value) and "hunter2" not in str(caught.value)
    assert not list((tmp_path / "cache" / "engines").glob("*/config.json"))


def test_a_truncated_archive(s3: Any, archive: Path, tmp_path: Path) -> None:
    s3.put_object(Bucket="models", Key="cut/model.tar.gz", Body=archive.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model\.tar\.gz cannot be unpacked"):
        read_deployment("s3://models/cut/model.tar.gz", {})


@S3
def test_from_model_data_to_boto3(s3: Any, archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As documented by LMI: model data in S3, an endpoint, and sagemaker-runtime, with another endpoint_url only.

    A limit that is lower than that of the engine applies to each request.
    """
    monkeypatch.setenv("OPTION_MAX_OUTPUT_LEN", "12")
    s3.upload_file(str(archive), "models", "prefix/mymodel.tar.gz")
    with LLM(archive.parent / "engine", device="cpu", kv_cache_tokens=512) as llm:
        expected = llm.generate("a story", SamplingParams(max_tokens=12, temperature=0.0)).choices[0].text
    body = json.dumps({"inputs": "a story", "parameters": {"max_new_tokens": 12, "do_sample": False}})
    streaming = json.dumps({"inputs": "a story", "parameters": {"max_new_tokens": 12}, "stream": True})
    options = {"EndpointName": "trt-llm-lmi-model", "ContentType": "application/json"}
    with running_server("s3://models/prefix/mymodel.tar.gz", ["--port", "0"]) as url:
        runtime = boto3.client("sagemaker-runtime", endpoint_url=url, config=Config(retries={"total_max_attempts": 1}))
        complete = json.loads(runtime.invoke_endpoint(Body=body, **options)["Body"].read())
        events = runtime.invoke_endpoint_with_response_stream(Body=streaming, **options)["Body"]
        with pytest.raises(ClientError, match="the engine's max_output_len is 12"):
            runtime.invoke_endpoint(Body=body.replace("12", "13"), **options)
        lines = io.BytesIO(b"".join(event["PayloadPart"]["Bytes"] for event in events)).readlines()
    records = [json.loads(line) for line in lines]
    assert complete == {"generated_text": expected}
    assert records[-1]["generated_text"] == expected == "".join(record["token"]["text"] for record in records)
