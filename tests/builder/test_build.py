"""Builds of tiny checkpoints: layouts, dtypes, refusals, publishing, and agreement with transformers."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from stoker.base.config import Limits, Mapping
from stoker.base.errors import CheckpointError, ConfigError, EngineError
from stoker.builder.build import build, build_cached
from stoker.builder.config import BuildConfig, fit_limits
from stoker.builder.prepare import prepare
from stoker.engine.config import decode_engine_config, encode_engine_config
from stoker.engine.reader import Engine


def agrees(engine: Engine) -> bool:
    """Whether the build compared all greedy tokens with those of transformers, and found them equal."""
    greedy = engine.config.checks["greedy"]
    assert not greedy["skipped"], greedy
    return greedy["tokens"] == 32 and greedy["equal"] == 32 and greedy["max_error"] < 1e-3


@pytest.mark.parametrize("layout", ["safetensors", "safetensors-sharded", "bin", "bin-sharded"])
def test_every_checkpoint_layout_makes_the_same_engine(tmp_path: Path, llama: Path, layout: str) -> None:
    source = tiny.save(tiny.model(), tmp_path / "checkpoint", layout)
    engine = build(source, tmp_path / "engine")
    assert agrees(engine)
    reference = build(llama, tmp_path / "reference", verify="files")
    stored, expected = (load_file(built.path / "rank0.safetensors") for built in (engine, reference))
    assert list(stored) == list(expected) and all(torch.equal(stored[name], expected[name]) for name in stored)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {"sliding_window": 6}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
def test_architectures_agree_with_transformers(tmp_path: Path, model_type: str, changes: dict) -> None:
    source = tiny.save(tiny.model(model_type, **changes), tmp_path / "checkpoint")
    assert agrees(build(source, tmp_path / "engine", verify="full"))


def test_tensors_are_fused_by_rows(tmp_path: Path, llama: Path) -> None:
    engine = build(llama, tmp_path / "engine", verify="none")
    found, given = load_file(engine.path / "rank0.safetensors"), load_file(llama / "model.safetensors")
    attention = "model.layers.1.self_attn"
    assert torch.equal(found["layers.1.attention.qkv.weight"], torch.cat([given[f"{attention}.{p}_proj.weight"] for p in "qkv"]))
    assert torch.equal(found["layers.1.mlp.up.weight"], torch.cat([given[f"model.layers.1.mlp.{p}_proj.weight"] for p in ("gate", "up")]))
    assert engine.config.checks == {}
    assert sum(t.numel() for t in found.values()) == sum(t.numel() for t in given.values())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_are_stored_in_the_requested_dtype(tmp_path: Path, llama: Path, dtype: str) -> None:
    engine = build(llama, tmp_path / "engine", BuildConfig(dtype=dtype), verify="full")
    assert agrees(engine)
    assert {t.dtype for t in load_file(engine.path / "rank0.safetensors").values()} == {getattr(torch, dtype)}


def test_the_default_dtype_is_the_checkpoints_on_a_gpu_and_float32_on_a_cpu(tmp_path: Path) -> None:
    source = tiny.save(tiny.model().to(torch.bfloat16), tmp_path / "checkpoint")
    on_gpu = build(source, tmp_path / "gpu", BuildConfig(device="cuda", compute_capability="9.0"), verify="files")
    on_cpu = build(source, tmp_path / "cpu", BuildConfig(device="cpu"), verify="files")
    assert (on_gpu.config.dtype, on_cpu.config.dtype) == ("bfloat16", "float32")
    assert on_gpu.config.target.compute_capability == "9.0"


def test_values_that_overflow_float16_are_refused(tmp_path: Path) -> None:
    model = tiny.model()
    model.model.layers[1].mlp.down_proj.weight.data[3, 5] = 1e6
    source = tiny.save(model, tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: model\.layers\.1\.mlp\.down_proj\.weight .*float16.*bfloat16"):
        build(source, tmp_path / "engine", BuildConfig(dtype="float16"))
    assert not (tmp_path / "engine").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def edited(llama: Path, out: Path, change: object) -> Path:
    """A copy of the checkpoint whose tensors `change` edits in place."""
    out.mkdir()
    for file in llama.glob("*.json"):
        (out / file.name).write_bytes(file.read_bytes())
    tensors = load_file(llama / "model.safetensors")
    change(tensors)  # type: ignore[operator]
    save_file(tensors, out / "model.safetensors")
    return out


K = "model.layers.2.self_attn.k_proj.weight"
Q = "model.layers.2.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(K), rf"{K} is missing; layers\.2\.attention\.qkv\.weight is made of it \(2 of its 3 parts were found\)"),
        (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight is missing"),
        (lambda t: t.update(extra=torch.zeros(3)), r"extra would not be used: LlamaForCausalLM has no such tensor"),
        (lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.zeros(3)}), r"layers\.3\.mlp\.up_proj\.weight would not be used"),
        (lambda t: t.update({K: torch.zeros(16, 47)}), rf"{K} \[16, 47\].*qkv"),
        (lambda t: t.update({K: t[Q], Q: t[K]}), r"q_proj\.weight \[16, 48\].*with parts of \[48, 16, 16\] rows"),
        (lambda t: t.update({K: torch.zeros(16, 48, dtype=torch.int8)}), r"k_proj.*torch\.int8 are not floating-point numbers"),
        (lambda t: t[K].fill_(float("nan")), rf"model\.safetensors: {K} holds NaN or infinity\. Download the checkpoint again"),
    ],
)  # fmt: skip
def test_incomplete_checkpoints_are_refused(tmp_path: Path, llama: Path, change: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        build(edited(llama, tmp_path / "bad", change), tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


def test_ignored_tensors_and_a_copy_of_a_tied_head_are_accepted(tmp_path: Path) -> None:
    source = tiny.save(tiny.model(tie_word_embeddings=True), tmp_path / "tied")

    def add(tensors: dict) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    engine = build(edited(source, tmp_path / "more", add), tmp_path / "engine")
    assert agrees(engine)
    assert "head.weight" not in load_file(engine.path / "rank0.safetensors")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCasualLM"]}, "'LlamaForCasualLM' is not supported.*write LlamaForCausalLM"),
        ({"architectures": [], "model_type": None}, "has neither architectures nor model_type"),
        ({"hidden_size": None}, "config.json"),
        ({"hidden_act": "tanhshrink"}, "hidden_act='tanhshrink'"),
        ({"quantization_config": {"quant_method": "vptq"}}, r"quant_method: vptq"),
    ],
)
def test_unsupported_configs_are_refused(tmp_path: Path, llama: Path, changes: dict, message: str) -> None:
    source = edited(llama, tmp_path / "bad", lambda tensors: None)
    config = json.loads((source / "config.json").read_text()) | changes
    (source / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    with pytest.raises((CheckpointError, ConfigError), match=message):
        build(source, tmp_path / "engine")


def test_generation_config_lists_every_end_id(tmp_path: Path, llama: Path) -> None:
    source = edited(llama, tmp_path / "c", lambda tensors: None)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7, 2], "temperature": 0.6, "transformers_version": "4"}))
    engine = build(source, tmp_path / "engine", verify="files")
    written = json.loads((engine.path / "generation_config.json").read_text())
    assert written == {"eos_token_id": [2, 7], "temperature": 0.6, "bos_token_id": 1}
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 999]}))
    with pytest.raises(CheckpointError, match="eos_token_id 999 is outside the vocabulary of 320"):
        build(source, tmp_path / "other")
    for name, wrong in (("eos_token_id", "</s>"), ("eos_token_id", [2, None]), ("bos_token_id", True), ("pad_token_id", {"id": 1})):
        (source / "generation_config.json").write_text(json.dumps({name: wrong}))
        with pytest.raises(CheckpointError, match=rf"generation_config\.json has {name}=.*, which is not a token id"):
            build(source, tmp_path / "other")
    (source / "generation_config.json").write_text(json.dumps({"bos_token_id": 999, "pad_token_id": -1}))
    engine = build(source, tmp_path / "other", verify="files")
    assert json.loads((engine.path / "generation_config.json").read_text()) == {"eos_token_id": [2]}


def test_an_engine_is_replaced_only_with_force_and_by_a_complete_one(tmp_path: Path, llama: Path) -> None:
    out = tmp_path / "engine"
    first = build(llama, out, verify="files")
    with pytest.raises(EngineError, match=r"holds an engine already.*--force"):
        build(llama, out)
    with pytest.raises(CheckpointError):
        build(edited(llama, tmp_path / "bad", lambda t: t.pop(K)), out, force=True)
    assert Engine.open(out, verify=True).config == first.config
    again = build(llama, out, BuildConfig(dtype="bfloat16"), force=True, verify="files")
    assert again.config.dtype == "bfloat16"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(EngineError, match="is not an engine"):
        build(llama, tmp_path / "mine", force=True)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"


def test_of_two_concurrent_builds_the_later_one_replaces_nothing(tmp_path: Path, llama: Path) -> None:
    """The other build finishes while this one verifies."""
    out, config = tmp_path / "engine", BuildConfig(device="cpu")

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "verify" and not out.exists():
            build(llama, tmp_path / "other", config, verify="none").path.rename(out)
            (out / "other").touch()

    with pytest.raises(EngineError, match="holds an engine already"):
        build(llama, out, config, verify="files", progress=progress)
    assert (out / "other").exists() and sorted(path.name for path in tmp_path.iterdir()) == ["engine"]
    build(llama, out, config, verify="files", force=True)
    assert not (out / "other").exists()


@pytest.mark.parametrize("stage", ["weights", "verify"])
@pytest.mark.parametrize("problem", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_build_leaves_no_files(tmp_path: Path, llama: Path, stage: str, problem: BaseException) -> None:
    def progress(name: str, done: int, total: int) -> None:
        if name == stage:
            raise problem

    with pytest.raises((KeyboardInterrupt, OSError)):
        build(llama, tmp_path / "engine", BuildConfig(device="cpu"), verify="files", progress=progress)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_perplexity_increase": float("nan")}, "max_perplexity_increase=nan is refused"),
        ({"max_perplexity_increase": float("inf")}, "max_perplexity_increase=inf is refused"),
        ({"max_perplexity_increase": 0.1}, "nothing is quantized"),
        ({"compute_capability": "9.0"}, "compute_capability='9.0' is refused: device=cpu has none"),
        ({"quantization": "GPTQ", "quantization_settings": {"damp": "nan"}}, "damp=nan is not above 0"),
        ({"quantization": "GPTQ", "quantization_settings": {"damp": -1}}, "damp=-1.0 is not above 0"),
    ],
)
def test_settings_without_effect_or_out_of_range_are_refused(llama: Path, given: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(llama, BuildConfig(device="cpu", **given))


def test_the_engine_config_survives_encoding(tmp_path: Path, llama: Path) -> None:
    engine = build(llama, tmp_path / "engine")
    assert decode_engine_config(json.loads(encode_engine_config(engine.config)), "here") == engine.config


def test_dummy_weights_need_only_a_config(tmp_path: Path, llama: Path) -> None:
    source = tmp_path / "config only"
    source.mkdir()
    (source / "config.json").write_bytes((llama / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"has no weights.*--dummy-weights"):
        build(source, tmp_path / "engine")
    engine = build(source, tmp_path / "engine", BuildConfig(dummy_weights=True))
    assert engine.config.weights == "dummy" and "rank0.safetensors" not in engine.config.files
    weight = engine.source().get("layers.0.attention.qkv.weight", (80, 48), torch.float32)
    assert 0.01 < float(weight.std()) < 0.03


def test_the_architecture_is_checked_before_weights_are_required(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["RwkvForCausalLM"]}')
    with pytest.raises(CheckpointError, match="'RwkvForCausalLM' is not supported"):
        build(tmp_path, tmp_path / "engine")


def test_settings_that_cannot_be_built_are_refused(tmp_path: Path, llama: Path) -> None:
    for config, message in (
        (BuildConfig(quantization="NO_QUANTS"), "unknown quantization 'NO_QUANTS'.*NO_QUANT"),
        (BuildConfig(mapping=Mapping(pipeline_parallel=9)), "pipeline_parallel=9: the model has . layers"),
        (BuildConfig(mapping=Mapping(tensor_parallel=2, expert_parallel=True)), "no experts"),
        (BuildConfig(mapping=Mapping(expert_parallel=True)), "one rank has all experts"),
        (BuildConfig(mapping=Mapping(data_parallel=2, expert_parallel=True)), "no experts"),
        (BuildConfig(mapping=Mapping(data_parallel=2)), "data_parallel=2 is refused: .*Add expert_parallel"),
        (BuildConfig(mapping=Mapping(data_parallel=2, tensor_parallel=4, expert_parallel=True)), "combined with tensor_parallel=4"),
        (BuildConfig(mapping=Mapping(data_parallel=2, pipeline_parallel=2, expert_parallel=True)), "combined with pipeline_parallel=2"),
        (BuildConfig(limits=Limits(max_input_len=300)), "max_input_len=300.*256 positions"),
    ):
        with pytest.raises(ConfigError, match=message):
            build(llama, tmp_path / "engine", config)
    with pytest.raises(ConfigError, match="dtype='int3'"):
        BuildConfig(dtype="int3")
    with pytest.raises(ConfigError, match="verify='maybe'"):
        build(llama, tmp_path / "engine", verify="maybe")


def test_default_limits_are_reduced_to_the_positions_and_others_are_refused() -> None:
    assert fit_limits(Limits(), 8192) == Limits()
    small = fit_limits(Limits(), 1024)
    assert (small.max_input_len, small.max_output_len, small.max_seq_len) == (1023, 1023, 1024)
    half = fit_limits(Limits(max_input_len=500), 512)
    assert (half.max_input_len, half.max_output_len, half.max_seq_len) == (500, 511, 512)
    for chosen in ({"max_input_len": 512}, {"max_input_len": 400, "max_output_len": 113}, {"max_total_len": 600}):
        with pytest.raises(ConfigError, match="512 positions"):
            fit_limits(Limits(**chosen), 512)


def test_the_cache_builds_once_and_rebuilds_a_damaged_engine(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build_cached(llama, verify="files")
    stamp = (first.path / "config.json").stat().st_mtime_ns
    assert build_cached(llama, verify="files").path == first.path
    assert (first.path / "config.json").stat().st_mtime_ns == stamp
    assert build_cached(llama, BuildConfig(dtype="bfloat16"), verify="files").path != first.path
    changed = edited(llama, tmp_path / "changed", lambda t: t[K][0, 0].add_(1e-3))
    assert build_cached(changed, verify="files").path != first.path
    with (first.path / "rank0.safetensors").open("r+b") as file:
        file.truncate(1000)
    repaired = build_cached(llama, verify="files")
    assert repaired.path == first.path
    repaired.verify()
    assert msgspec.structs.replace(repaired.config, files={}) == msgspec.structs.replace(first.config, files={})
