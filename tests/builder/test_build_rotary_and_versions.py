"""Rotary settings and version names of a build, from the command line to the engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny

from stoker.base.errors import ConfigError
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.builder.prepare import prepare
from stoker.cli.main import main
from stoker.engine.reader import Engine


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs `stoker build` in this process. Returns the exit status and the output."""
    monkeypatch.setenv("COLUMNS", "300")

    def call(*args: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["stoker", "build", *args])
        return main(), " ".join("".join(capfd.readouterr()).split())

    return call


def test_the_command_line_reaches_the_engine(llama: Path, tmp_path: Path, run: Callable[..., tuple[int, str]]) -> None:
    settings = ("--rotary-base", "20000", "--rotary-dim", "8", "--rotary-scaling-type", "linear", "--rotary-scaling-factor", "2")
    code, output = run(str(llama), "-o", str(tmp_path / "engine"), "--device", "cpu", *settings)
    assert code == 0, output
    assert "the rotary settings differ from the checkpoint's" in output
    config = Engine.open(tmp_path / "engine").config
    rope = config.model.layers[0].attention.rope
    assert rope is not None and (rope.theta, rope.scaling, rope.factor) == (20000.0, "linear", 2.0)
    assert config.model.max_positions == 2 * tiny.SIZES["max_position_embeddings"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("--rotary-dim", "64"), "rotary_dim=64: the checkpoint has 8"),
        (("--rotary-scaling-factor", "2"), "belong together"),
        (("--rotary-scaling-type", "spiral", "--rotary-scaling-factor", "2"), "'spiral' is not supported"),
        (("--rotary-base", "-1"), "rotary_base=-1.0 is refused"),
        (("--model-version", "gpt_model_version=gpt2"), "LlamaForCausalLM does not have this option"),
        (("--model-version", "gpt2"), "is not NAME=VALUE"),
    ],
)
def test_invalid_settings_write_nothing(
    llama: Path, tmp_path: Path, run: Callable[..., tuple[int, str]], settings: tuple[str, ...], message: str
) -> None:
    code, output = run(str(llama), "-o", str(tmp_path / "engine"), *settings)
    assert code != 0 and message in output
    assert not (tmp_path / "engine").exists()


CHATGLM_32K = {"architectures": ["ChatGLMModel"], "model_type": "chatglm", "rope_ratio": 50, "seq_length": 32768, "num_layers": 2}


def test_a_version_decides_where_config_json_is_ambiguous(tmp_path: Path) -> None:
    """chatglm2_6b_32k divides positions by 50, and chatglm3_6b_32k multiplies the base by 50. Only their names differ."""
    (tmp_path / "config.json").write_text(json.dumps(CHATGLM_32K))

    def rope(**versions: str) -> object:
        found = prepare(tmp_path, BuildConfig(dummy_weights=True, device="cpu", versions=versions)).config.model.layers[0].attention.rope
        assert found is not None
        return found.scaling, found.theta, found.factor

    assert rope(chatglm_model_version="chatglm2_6b_32k") == ("linear", 10000.0, 50.0)
    assert rope(chatglm_model_version="chatglm3_6b_32k") == rope() == ("default", 500000.0, 1.0)
    with pytest.raises(ConfigError, match=r"chatglm_model_version='chatglm2_6b', but config.json describes chatglm3_6b_32k"):
        rope(chatglm_model_version="chatglm2_6b")
    (tmp_path / "config.json").write_text(json.dumps(CHATGLM_32K | {"_name_or_path": "THUDM/chatglm3-6b-32k"}))
    with pytest.raises(ConfigError, match=r"'chatglm2_6b_32k', but config.json describes chatglm3_6b_32k or chatglm3"):
        rope(chatglm_model_version="chatglm2_6b_32k")


def test_greedy_tokens_are_not_compared_with_changed_rotary_settings(llama: Path, tmp_path: Path) -> None:
    engine = build(llama, tmp_path / "engine", BuildConfig(device="cpu", rotary_base=300.0), verify="full")
    assert engine.config.checks["greedy"]["skipped"] == "the rotary settings differ from the checkpoint's"
