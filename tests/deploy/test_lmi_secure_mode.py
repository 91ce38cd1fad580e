"""SAGEMAKER_SECURE_MODE: the security controls of the platform, as LMI checks them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.base.errors import ConfigError
from stoker.deploy.deployment import Deployment
from stoker.deploy.lmi.load import load_lmi

CONTROLS = "DISALLOW_REQUIREMENTS_TXT,DISALLOW_PICKLE_FILES, DISALLOW_TRUST_REMOTE_CODE,DISALLOW_CUSTOM_ENTRYPOINT,DISALLOW_CHAT_TEMPLATE"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.deploy.lmi.load.visible_gpus", lambda environment: 0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "trusted").mkdir()
    (folder := tmp_path / "model" / "inner").mkdir(parents=True)
    (folder / "model.safetensors").touch()
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 8}')
    (folder.parent / "serving.properties").write_text("option.model_id=inner\n")
    return folder


def load(model: Path, controls: str = CONTROLS, **environment: str) -> Deployment:
    channels = {"SAGEMAKER_TRUSTED_CHANNELS": str(model.parents[1] / "trusted"), "SAGEMAKER_UNTRUSTED_CHANNELS": str(model.parent)}
    secure = {"SAGEMAKER_SECURE_MODE": "true", "SAGEMAKER_SECURITY_CONTROLS": controls, **channels}
    return load_lmi(model.parent, secure | environment)


def test_a_plain_model_is_served(model: Path) -> None:
    assert load(model).source.checkpoint == str(model)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "name, text, control",
    [
        ("requirements.txt", "requests", "DISALLOW_REQUIREMENTS_TXT"),
        ("pytorch_model.bin", "", "DISALLOW_PICKLE_FILES"),
        ("model.PT", "", "DISALLOW_PICKLE_FILES"),
        ("tokenizer_config.json", json.dumps({"chat_template": "{{ messages }}"}), "DISALLOW_CHAT_TEMPLATE"),
        ("tokenizer_config.json", "{damaged", "DISALLOW_CHAT_TEMPLATE"),
        ("chat_template.jinja", "{{ messages }}", "DISALLOW_CHAT_TEMPLATE"),
    ],
)
def test_files_that_a_control_forbids(model: Path, name: str, text: str, control: str) -> None:
    (model / name).write_text(text)
    with pytest.raises(ConfigError, match=f"inner/{name} is refused: SAGEMAKER_SECURITY_CONTROLS has {control}"):
        load(model)
    load(model, controls="DISALLOW_CUSTOM_ENTRYPOINT")
    load(model, SAGEMAKER_SECURE_MODE="false")


def test_remote_code_only_from_a_trusted_channel(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"OPTION_TRUST_REMOTE_CODE=True is refused: .*DISALLOW_TRUST_REMOTE_CODE"):
        load(model, OPTION_TRUST_REMOTE_CODE="true")
    (model.parent / "serving.properties").write_text("option.model_id=inner\noption.trust_remote_code=true\n")
    with pytest.raises(ConfigError, match=r"serving\.properties:2: option\.trust_remote_code"):
        load(model)
    assert load(model, SAGEMAKER_TRUSTED_CHANNELS=str(model.parent)).source.trust_remote_code  # type: ignore[union-attr]


def test_incomplete_or_unknown_settings_are_errors(model: Path) -> None:
    with pytest.raises(ConfigError, match="SAGEMAKER_TRUSTED_CHANNELS is not set"):
        load_lmi(model.parent, {"SAGEMAKER_SECURE_MODE": "true"})
    with pytest.raises(ConfigError, match="the control DISALLOW_ALL is unknown"):
        load(model, controls="DISALLOW_ALL")
    with pytest.raises(ConfigError, match="is not a directory"):
        load(model, SAGEMAKER_UNTRUSTED_CHANNELS=str(model / "none"))


def test_a_linked_folder_cannot_hide_files(model: Path, tmp_path: Path) -> None:
    (hidden := tmp_path / "elsewhere").mkdir()
    (hidden / "weights.pt").touch()
    (model / "linked").symlink_to(hidden, target_is_directory=True)
    with pytest.raises(ConfigError, match="inner/linked is a linked folder"):
        load(model)
