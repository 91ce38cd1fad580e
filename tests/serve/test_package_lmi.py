"""`stoker package lmi`: the archive, errors, and serving of the archive."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tarfile
from pathlib import Path

import pytest

from stoker import LLM, SamplingParams
from stoker.base.config import Limits, Mapping, RuntimeConfig
from stoker.base.errors import ConfigError, EngineError
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.cli.main import main
from stoker.cli.prepare_server import engine_info, prepare_server, read_deployment
from stoker.deploy.deployment import EngineInfo, EngineSource
from stoker.deploy.lmi.model_settings import find_prebuilt_engine
from stoker.deploy.lmi.package import package
from stoker.deploy.prepare import prepare_engine
from stoker.deploy.prepare import read_deployment as read_location
from stoker.engine.reader import Engine
from stoker.server.settings import ServerSettings

RUNTIME = {"device": "cpu", "kv_cache_tokens": 512}
LIMITS = Limits(max_batch_size=2, max_input_len=64, max_output_len=64, max_num_tokens=64, tokens_per_block=16)


@pytest.fixture(scope="module")
def engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("engines") / "tiny"
    build(checkpoint, out, BuildConfig(dtype="float32", limits=LIMITS), verify="files")
    return out


def files_of(folder: Path) -> list[Path]:
    """What is in the folder of a test besides its STOKER_CACHE."""
    return [path for path in folder.iterdir() if path.name != "cache"]


def names(archive: Path) -> list[str]:
    with tarfile.open(archive) as tar:
        return tar.getnames()


def text(archive: Path, name: str) -> str:
    with tarfile.open(archive) as tar:
        member = tar.extractfile(name)
        assert member is not None
        return member.read().decode()


def test_the_documented_layout(engine: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.tar.gz"
    digest = package(engine_info(engine), out, {})
    assert digest == hashlib.sha256(out.read_bytes()).hexdigest()
    found = names(out)
    assert {"serving.properties", "tensorrt_llm/config.pbtxt", "tensorrt_llm/tokenizer.json", "tensorrt_llm/1/config.json"} < set(found)
    assert "tensorrt_llm/1/trt_llm_model_float32_tp1_rank0.engine" in found
    assert not [name for name in found if name.endswith("rank0.safetensors")]
    assert text(out, "serving.properties") == "engine=Python\noption.rolling_batch=auto\noption.tensor_parallel_degree=1\n"
    assert files_of(tmp_path) == [out]


def test_equal_engines_produce_equal_bytes_and_options_are_written(engine: Path, tmp_path: Path) -> None:
    info, done = engine_info(engine), []
    first = package(info, tmp_path / "a.tar", {}, progress=lambda name, count, total: done.append((count, total)))
    assert package(info, tmp_path / "b.tar", {}) == first
    assert done[-1][0] == done[-1][1]
    package(info, tmp_path / "c.tar", {"option.tgi_compat": "true", "option.device_id": "grüß"})
    lines = text(tmp_path / "c.tar", "serving.properties").splitlines()
    assert lines[-2:] == ["option.tgi_compat=true", "option.device_id=gr\\u00fc\\u00df"]
    package(info, tmp_path / "d.tar", {"option.max_output_len": "5"})
    assert read_deployment(tmp_path / "d.tar", ServerSettings(), RuntimeConfig(), frozenset()).server.request_limits.max_output_len == 5, (
        "lower than that of the engine"
    )


def test_rank_files_have_the_names_of_lmi(tmp_path: Path) -> None:
    files = {f"rank{rank}.safetensors": {} for rank in range(12)}
    (tmp_path / "config.json").write_text(json.dumps({"format_version": 2, "files": files}))
    for name in files:
        (tmp_path / name).write_text(name)
    mapping = Mapping(tensor_parallel=6, pipeline_parallel=2)
    package(EngineInfo(path=str(tmp_path), architecture="x", vocab_size=9, dtype="float16", mapping=mapping), tmp_path / "m.tar", {})
    for rank in (1, 11):
        assert text(tmp_path / "m.tar", f"tensorrt_llm/1/trt_llm_model_float16_tp6_pp2_rank{rank}.engine") == f"rank{rank}.safetensors"
    assert "option.pipeline_parallel_degree=2" in text(tmp_path / "m.tar", "serving.properties")


@pytest.mark.parametrize("form", ["tar", "folder", "model_id", "nested"])
def test_packaged_engine_generates_the_same_tokens(form: str, engine: Path, tmp_path: Path) -> None:
    """As an archive, unpacked as in SageMaker, named by option.model_id of another folder, and inside another folder."""
    out = tmp_path / "mymodel.tar.gz"
    package(engine_info(engine), out, {"option.max_num_sequences": "1"})
    served = out
    if form != "tar":
        served = tmp_path / "data"
        with tarfile.open(out) as tar:
            tar.extractall(served / "inner" if form == "nested" else served)
    if form == "model_id":
        (served / "serving.properties").unlink()
        served = tmp_path / "lmi"
        served.mkdir()
        (served / "serving.properties").write_text(f"option.model_id={tmp_path / 'data'}\n")
    found = prepare_server(read_deployment(served, ServerSettings(), RuntimeConfig(), frozenset()))
    assert (found.deployment.format, isinstance(found.deployment.source, EngineSource)) == ("lmi", True)
    assert found.settings.model_name == {"tar": "mymodel", "folder": "data", "model_id": "lmi", "nested": "data"}[form]
    assert found.tokenizer == found.engine.parent, "the tokenizer files of the layout are used"
    Engine.open(found.engine, verify=True)
    outputs = []
    for path in (engine, found.engine):
        with LLM(path, **RUNTIME) as llm:
            outputs.append(llm.generate("hello", SamplingParams(max_tokens=8, temperature=0.0)).choices[0].token_ids)
    assert outputs[0] == outputs[1]


def test_unpacked_engine_is_packaged_to_the_same_bytes(engine: Path, tmp_path: Path) -> None:
    first = package(engine_info(engine), tmp_path / "a.tar", {})
    with tarfile.open(tmp_path / "a.tar") as tar:
        tar.extractall(tmp_path / "data")
    assert package(engine_info(tmp_path / "data" / "tensorrt_llm" / "1"), tmp_path / "b.tar", {}) == first


def test_the_repository_without_serving_properties(engine: Path, tmp_path: Path) -> None:
    """Without serving.properties, the folder is a Triton repository."""
    package(engine_info(engine), tmp_path / "a.tar", {})
    with tarfile.open(tmp_path / "a.tar") as tar:
        tar.extractall(tmp_path / "data")
    (tmp_path / "data" / "serving.properties").unlink()
    inner = tmp_path / "data" / "tensorrt_llm"
    assert find_prebuilt_engine(inner) == find_prebuilt_engine(tmp_path / "data") == inner / "1"
    triton = prepare_engine(read_location(tmp_path / "data", {}), {})
    assert (triton.deployment.format, triton.engine) == ("triton", inner / "1")


def test_other_ranks_than_those_of_the_engine_are_refused(engine: Path, tmp_path: Path) -> None:
    package(engine_info(engine), tmp_path / "a.tar", {})
    with tarfile.open(tmp_path / "a.tar") as tar:
        tar.extractall(tmp_path / "data")
    file = tmp_path / "data" / "serving.properties"
    file.write_text(file.read_text().replace("degree=1", "degree=2"))
    with pytest.raises(ConfigError, match=r"requires tensor 2 × pipeline 1, and the engine .* was built for tensor 1"):
        prepare_engine(read_location(tmp_path / "data", {}), {})


BAD = {
    "option.max_input_len": ("70000", "above the engine's max_input_len="),
    "option.tokens_per_block": ("64", "the build decides it"),
    "option.quantize": ("fp8", "the build decides it"),
    "option.tensor_parallel_degree": ("2", "the build decides it"),
    "option.tgi_compatt": ("true", "unknown key option.tgi_compatt. Did you mean option.tgi_compat"),
    "option.tgi_compat": ("maybe", "it must be true or false"),
    "option.device_id": ("a # b", "would be a comment"),
}


@pytest.mark.parametrize("key", BAD)
def test_bad_options(key: str, engine: Path, tmp_path: Path) -> None:
    value, message = BAD[key]
    with pytest.raises(ConfigError, match="--set") as caught:
        package(engine_info(engine), tmp_path / "m.tar", {key: value})
    assert message in str(caught.value)
    assert not files_of(tmp_path)


def test_bad_outputs_and_damaged_engines(engine: Path, tmp_path: Path) -> None:
    info = engine_info(engine)
    with pytest.raises(ConfigError, match="not the name of a tar"):
        package(info, tmp_path / "model.zip", {})
    (tmp_path / "m.tar").write_text("existing")
    with pytest.raises(ConfigError, match="--force"):
        package(info, tmp_path / "m.tar", {})
    assert (tmp_path / "m.tar").read_text() == "existing"
    package(info, tmp_path / "m.tar", {}, force=True)
    broken = shutil.copytree(engine, tmp_path / "broken")
    (broken / "rank0.safetensors").unlink()
    with pytest.raises(EngineError, match=r"rank0\.safetensors is missing"):
        package(EngineInfo(path=str(broken), architecture="x", vocab_size=9), tmp_path / "n.tar", {})
    assert not (tmp_path / "n.tar").exists()


def test_the_command(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model.tar.gz"
    monkeypatch.setattr(sys, "argv", ["stoker", "package", "lmi", str(engine), "-o", str(out), "--set", "option.tgi_compat=true"])
    assert main() == 0
    assert hashlib.sha256(out.read_bytes()).hexdigest() in capsys.readouterr().out
