"""Model names that are derived from locations."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.deploy.model_name import model_name_of

NAMES = {
    "s3://bucket/models/Llama-3-8B.tar.gz": "Llama-3-8B",
    "s3://bucket/models/gpt2/": "gpt2",
    "https://host/a/model.tgz#sha256=00": "model",
    "https://host/model.tar?x=/y": "model",
    "hf://org/name@main": "name",
    "org/name-v1.5": "name-v1.5",
    "org/name-GGUF:Q4_K_M": "name-GGUF:Q4_K_M",
    "nowhere/model.Q4_1.gguf": "model.Q4_1",
}


@pytest.mark.parametrize("location, name", NAMES.items())
def test_addresses(location: str, name: str) -> None:
    assert model_name_of(location) == name


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "lmi"
    folder.mkdir()
    (folder / "serving.properties").touch()
    monkeypatch.chdir(folder)
    assert model_name_of(".") == model_name_of(folder) == model_name_of("serving.properties") == "lmi"


def test_a_link_has_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "b179c952").touch()
    (tmp_path / "small.Q4_1.gguf").symlink_to(tmp_path / "b179c952")
    assert model_name_of(tmp_path / "small.Q4_1.gguf") == "small.Q4_1"
