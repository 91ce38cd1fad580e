"""An engine is exported as a Truss and read back."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import yaml

from stoker.base.config import Mapping
from stoker.base.errors import ConfigError
from stoker.deploy.deployment import EngineInfo, EngineSource
from stoker.deploy.triton.load import load_repository
from stoker.deploy.truss.export import export_truss
from stoker.deploy.truss.load import is_truss, load_truss
from stoker.server.protocols.truss.options import TrussOptions

REPOSITORY = Path("packages") / "tensorrt_llm_model_repository"


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineInfo:
    monkeypatch.setattr("stoker.deploy.truss.load.visible_gpus", lambda environment: 0)
    (tmp_path / "engine" / "tokenizer").mkdir(parents=True)
    (tmp_path / "engine" / "config.json").write_text("{}")
    (tmp_path / "engine" / "rank0.safetensors").write_bytes(b"weights")
    (tmp_path / "engine" / "tokenizer" / "extra.txt").write_text("x")
    return EngineInfo(path=str(tmp_path / "engine"), architecture="LlamaForCausalLM", vocab_size=10, mapping=Mapping(tensor_parallel=2))


def test_it_is_read_back(engine: EngineInfo, tmp_path: Path) -> None:
    folder = tmp_path / "truss"
    options = {"model_name": "mine", "accelerator": "H100", "max_tokens_in_paged_kv_cache": "10000", "max_queue_size": "7"}
    written = export_truss(engine, folder, options)
    assert sorted(written) == sorted(file for file in folder.rglob("*") if file.is_file()), "each file once"
    assert is_truss(folder)
    deployment = load_truss(folder, {})
    inside = folder / REPOSITORY / "tensorrt_llm" / "1"
    assert deployment.source == EngineSource(location=str(inside), token_secret="hf_access_token", mapping=Mapping(tensor_parallel=2))
    assert (deployment.server.model_name, deployment.tokenizer) == ("mine", str(inside))
    assert deployment.server.options == TrussOptions()
    assert (deployment.runtime.kv_cache_tokens, deployment.runtime.policy) == (10000, "guaranteed_no_evict")
    assert (inside / "rank0.safetensors").read_bytes() == b"weights" and (inside / "tokenizer" / "extra.txt").is_file()
    assert yaml.safe_load((folder / "config.yaml").read_text())["resources"] == {"accelerator": "H100:2", "use_gpu": True}


def test_its_packages_are_a_repository(engine: EngineInfo, tmp_path: Path) -> None:
    """Paths in the repository are relative to it, so that it can be moved."""
    export_truss(engine, tmp_path / "truss", {})
    (tmp_path / "truss" / "packages").rename(tmp_path / "moved")
    repository = tmp_path / "moved" / REPOSITORY.name
    deployment = load_repository(repository, {})
    inside = str(repository / "tensorrt_llm" / "1")
    assert deployment.source == EngineSource(location=inside) and deployment.tokenizer == inside
    assert str(tmp_path) not in "".join(file.read_text() for file in repository.rglob("config.pbtxt"))


def test_without_a_gpu(engine: EngineInfo, tmp_path: Path) -> None:
    export_truss(engine, tmp_path / "truss", {"accelerator": "none"})
    assert load_truss(tmp_path / "truss", {}).runtime.device == "cpu"


def test_export_refuses(engine: EngineInfo, tmp_path: Path) -> None:
    export_truss(engine, tmp_path / "truss", {})
    with pytest.raises(ConfigError, match="is not an empty folder"):
        export_truss(engine, tmp_path / "truss", {})
    with pytest.raises(ConfigError, match="option 'speed' is unknown"):
        export_truss(engine, tmp_path / "new", {"speed": "high"})
    assert not (tmp_path / "new").exists()


def test_it_can_be_written_into_the_engine_directory(engine: EngineInfo) -> None:
    written = export_truss(engine, Path(engine.path) / "truss", {})
    assert sum(file.name == "rank0.safetensors" for file in written) == 1


def test_a_failed_export_leaves_no_files(engine: EngineInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    monkeypatch.setattr("os.link", full)
    monkeypatch.setattr("shutil.copy2", full)
    with pytest.raises(OSError, match="No space left"):
        export_truss(engine, tmp_path / "truss", {})
    assert not (tmp_path / "truss").exists()
