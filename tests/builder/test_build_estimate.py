"""Estimates agree with the files that a build writes, and with the memory of the cache and of a step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import typer
from typer.testing import CliRunner

from stoker.base.config import Limits, Mapping
from stoker.base.errors import ConfigError
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.builder.estimate import estimate
from stoker.builder.prepare import prepare
from stoker.cli.commands.build import build as build_command
from stoker.cli.commands.inspect import inspect as inspect_command
from stoker.quant.formats.fp4 import Fp4

APP = typer.Typer()
APP.command("build")(build_command)
APP.command("inspect")(inspect_command)


def test_estimated_sizes_equal_the_written_files(tmp_path: Path, llama: Path) -> None:
    settings = BuildConfig(dtype="bfloat16", limits=Limits(max_batch_size=8, max_input_len=100, max_output_len=29, tokens_per_block=16))
    found = estimate(prepare(llama, settings).config, memory=1 << 30)
    engine = build(llama, tmp_path / "engine", settings, verify="files")
    size = (engine.path / "rank0.safetensors").stat().st_size
    assert found.weights == sum(p.numel() * 2 for p in tiny.model().parameters()) == found.files["rank0.safetensors"]
    assert 0 < size - found.weights < 4096
    assert found.parameters * 2 == found.weights
    assert found.kv_token == 3 * 2 * 2 * 8 * 2  # layers × (keys and values) × heads × head size × bytes
    assert found.kv_sequence == found.kv_token * 144  # 129 tokens in blocks of 16
    assert found.kv_limits == 8 * found.kv_sequence
    assert found.largest_batch == 8


@pytest.mark.parametrize("num_sequences", [0, 1, 5])
def test_the_largest_batch_fits_the_remaining_memory(llama: Path, num_sequences: int) -> None:
    config = prepare(llama, BuildConfig(device="cuda", limits=Limits(max_input_len=200, max_output_len=50))).config
    found = estimate(config, memory=1 << 40)
    memory = found.weights + found.activations + int(num_sequences * found.kv_sequence / 0.9) + 1
    left = estimate(config, memory=memory)
    assert left.largest_batch == num_sequences and left.fits == (num_sequences > 0)
    assert estimate(config).largest_batch is None


def test_a_large_model_is_estimated_from_its_config(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = estimate(prepare(tmp_path, BuildConfig(dummy_weights=True, device="cuda")).config, memory=80 << 30)
    assert found.parameters == 8_030_261_248  # Llama 3.1 8B as published
    assert found.kv_token == 131072
    assert found.largest_batch == int(((80 << 30) - found.weights - found.activations) * 0.9) // (5120 * 131072)


def test_a_config_alone_describes_block_scaled_fp8(tmp_path: Path) -> None:
    """DeepSeek R1 on 16 devices: 42.05 GiB of weights each, and not the 81.7 GiB of bfloat16."""
    shutil.copy(Path(__file__).parents[1] / "parity" / "published" / "DeepSeek-R1.json", tmp_path / "config.json")
    settings = BuildConfig(dummy_weights=True, device="cuda", dtype="bfloat16", mapping=Mapping(tensor_parallel=16))
    config = prepare(tmp_path, settings).config
    assert config.recipe.name == "AS_STORED"
    assert round(estimate(config, memory=80 << 30).weights / 2**30, 2) == 42.05


def test_attention_and_states_of_a_hybrid_model(tmp_path: Path) -> None:
    """Qwen3-Next on 4 devices: 12 of 48 layers have 2 KV heads of 256 features, the others states of 32 heads of 128 × 128."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3NextForCausalLM"], "dtype": "bfloat16"}))
    settings = BuildConfig(
        dummy_weights=True, device="cuda", mapping=Mapping(tensor_parallel=4), limits=Limits(max_input_len=4096, max_output_len=1024)
    )
    found = estimate(prepare(tmp_path, settings).config)
    state, convolution = 8 * 128 * 128 * 4, (2 * 2048 + 4096) // 4 * 3 * 2  # a device's heads in float32, and 3 tokens of its channels
    assert found.kv_token == 12 * 256 * 2 * 2
    assert found.kv_sequence == 5120 * found.kv_token + 36 * (state + convolution)


@pytest.mark.parametrize(("quantized", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_the_dtype_of_a_config_that_names_none(quantized: bool, dtype: str, tmp_path: Path) -> None:
    """gpt-oss and MiniMax-M2 name no dtype."""
    config: dict[str, Any] = {"architectures": ["GptOssForCausalLM"], "num_hidden_layers": 2}
    if quantized:
        config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = prepare(tmp_path, BuildConfig(dummy_weights=True, device="cuda")).config
    assert found.dtype == dtype
    assert (found.recipe.default == Fp4()) == quantized


def test_methods_that_need_the_weights_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 96,
        "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert prepare(tmp_path, BuildConfig(dummy_weights=True, device="cuda")).config.recipe.name == "NO_QUANT"
    assert "quantization_config (awq) is not used without weights" in caplog.text


def run(*arguments: str) -> str:
    result = CliRunner().invoke(APP, list(arguments), env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output + f"\nexit {result.exit_code}"


def test_build_and_inspect_commands(tmp_path: Path, llama: Path) -> None:
    engine = str(tmp_path / "engine")
    dry = run("build", str(llama), "--dry-run", "--device", "cpu", "--max-batch-size", "4")
    assert "largest batch of full sequences that fits" in dry and "4 of 4" in dry and "exit 0" in dry
    assert not Path(engine).exists()
    with pytest.raises(ConfigError, match=r"the engine does not fit: weights .* per device, which has .*Use more devices"):
        run("build", str(llama), "--dry-run", "--device", "cuda", "--memory-gib", "0.0001")
    assert "name the engine directory" in run("build", str(llama))
    built = run("build", str(llama), "-o", engine, "--dtype", "float32", "--max-input-len", "64")
    assert "Greedy tokens equal to the checkpoint's: 32 of 32" in built and "exit 0" in built
    shown = run("inspect", engine, "--verify", "--tensors")
    assert "max_input_len 64" in shown and "layers.2.mlp.down.weight" in shown and "Every file has the digest" in shown
    assert json.loads(run("inspect", engine, "--json").rpartition("\nexit")[0])["limits"]["max_input_len"] == 64
    again = run("build", str(llama), "-o", engine, "--force", "--no-verify")
    assert "exit 0" in again and "Greedy" not in again


def test_checkpoints_that_are_not_found_are_refused() -> None:
    from stoker.base.errors import CheckpointError

    with pytest.raises(CheckpointError, match=r"\./nowhere/at/all does not exist"):
        prepare("./nowhere/at/all", BuildConfig())


def test_a_quantization_is_checked_before_the_checkpoint_is_read() -> None:
    with pytest.raises(ConfigError, match="unknown quantization 'int9'"):
        prepare("./nowhere/at/all", BuildConfig(quantization="int9"))
