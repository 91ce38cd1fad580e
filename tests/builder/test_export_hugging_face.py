"""`stoker export hf`: transformers and the compressed-tensors package read the checkpoint, and compute the logits of the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from stoker.base.config import Mapping
from stoker.base.errors import ConfigError, EngineError
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.builder.export import weight_files
from stoker.builder.export.compressed import module_tensors, scheme_of
from stoker.builder.export.hugging_face import export_hugging_face
from stoker.builder.prequantized.dequantize import dequantize
from stoker.engine.layerwise import LayerwiseModel, split_windows
from stoker.engine.reader import Engine
from stoker.quant.formats.fp4 import Fp4
from stoker.quant.formats.int4 import Int4
from stoker.quant.formats.int8_grouped import GroupedInt8

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
IDS = torch.randint(3, 320, (48,), generator=torch.Generator().manual_seed(4))


def engine_of(path: Path, quantization: str | None, settings: dict[str, Any] | None = None, tied: bool = False, **config: Any) -> Engine:
    source = path / "checkpoint"
    if not source.exists():
        tiny.save(tiny.model("qwen2", tie_word_embeddings=tied, **SIZES), source)
    values = BuildConfig(
        device="cpu", dtype="float32", quantization=quantization, quantization_settings=settings or {}, calibration_size=2,
        calibration_seq_len=32, **config,
    )  # fmt: skip
    return build(source, path / "engine", values, verify="none", force=True)


def nll_of(engine: Engine) -> float:
    return LayerwiseModel(engine.config.model, split_windows(IDS.tolist(), len(IDS))).run(engine.loader()).nll


def nll_of_transformers(path: Path) -> float:
    pytest.importorskip("compressed_tensors")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(IDS[None]).logits[0, :-1].float()
    return float(torch.nn.functional.cross_entropy(logits, IDS[1:], reduction="sum"))


@pytest.mark.parametrize(
    ("quantization", "settings", "form", "tolerance", "tied"),
    [
        ("NO_QUANT", {}, None, 1e-5, False),
        ("FP8", {"activations": "none", "compensate": False}, "mixed-precision", 1e-4, False),
        ("FP8", {"compensate": False}, "mixed-precision", 2e-3, False),
        ("WEIGHTS_ONLY_INT8", {}, "int-quantized", 1e-4, False),
        ("WEIGHTS_ONLY_INT8", {}, "int-quantized", 1e-4, True),
        ("SMOOTH_QUANT", {}, "int-quantized", 2e-3, False),
        ("AWQ", {"group_size": 32}, "mixed-precision", 1e-3, False),
        ("GPTQ", {"group_size": 32, "zero": "none"}, "mixed-precision", 1e-3, False),
    ],
)
def test_transformers_computes_the_same_logits(
    quantization: str, settings: dict[str, Any], form: str | None, tolerance: float, tied: bool, tmp_path: Path
) -> None:
    engine = engine_of(tmp_path, quantization, settings, tied)
    files = export_hugging_face(engine.path, tmp_path / "exported")
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert config.get("quantization_config", {}).get("format") == form
    assert {"tokenizer.json", "generation_config.json", "model.safetensors"} <= {file.name for file in files}
    assert nll_of_transformers(tmp_path / "exported") == pytest.approx(nll_of(engine), rel=tolerance)


LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4,
    "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "num_key_value_heads": 4, "moe_intermediate_size": 32,
    "first_k_dense_replace": 4,
}  # fmt: skip
STATES = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 16,
    "full_attention_interval": 2, "layer_types": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("deepseek_v3", LATENT),
        ("qwen3_5_text", STATES),
        (
            "qwen3_next",
            STATES | {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "mlp_only_layers": [0, 1, 2]},
        ),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
        ("falcon_h1", {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_state": 16, "ssm_out_multiplier": 0.5, "rms_norm_eps": 0.05}),
        ("falcon_mamba", {"hidden_size": 64, "tie_word_embeddings": False, "mixer_rms_eps": 0.05, "layer_norm_epsilon": 0.05}),
    ],
)
def test_quantized_models_with_other_layers_are_exported(model_type: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    tiny.save(tiny.model(model_type, **sizes), tmp_path / "checkpoint")
    engine = engine_of(tmp_path, "WEIGHTS_ONLY_INT8")
    export_hugging_face(engine.path, tmp_path / "exported")
    assert nll_of_transformers(tmp_path / "exported") == pytest.approx(nll_of(engine), rel=1e-4)


def test_an_exported_checkpoint_is_built_into_the_same_engine(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, "WEIGHTS_ONLY_INT8")
    export_hugging_face(engine.path, tmp_path / "exported")
    again = build(tmp_path / "exported", tmp_path / "again", BuildConfig(device="cpu", dtype="float32"), verify="none")
    old, new = (load_file(one.path / "rank0.safetensors") for one in (engine, again))
    assert all(torch.equal(old[name], new[name]) for name in old if "layers" in name or name.startswith("head"))


def test_zero_points_of_more_than_four_bits_are_exported_as_plain_numbers() -> None:
    chosen = Int4(group_size=32, clip=False)
    packed = torch.full((8, 16), 0x53, dtype=torch.uint8)  # values 3 and 5
    stored = {"weight": packed, "scale": torch.ones(8, 1), "zero": torch.full((8, 1), 15, dtype=torch.uint8)}
    assert scheme_of(chosen, stored) is not None and "weight_packed" in module_tensors(chosen, stored, torch.float32)
    stored["zero"][4] = 16  # the largest zero point of the first version of GPTQ
    assert scheme_of(chosen, stored) is None
    weight = module_tensors(chosen, stored, torch.float32)["weight"]
    assert weight[:, 0].tolist() == [-12] * 4 + [-13] + [-12] * 3


def test_large_checkpoints_have_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "FILE_BYTES", 1 << 19)
    engine = engine_of(tmp_path, None)
    names = [file.name for file in export_hugging_face(engine.path, tmp_path / "exported")]
    assert "model.safetensors.index.json" in names and "model-00001-of-00005.safetensors" in names
    assert nll_of_transformers(tmp_path / "exported") == pytest.approx(nll_of(engine), rel=1e-5)


def test_engines_that_a_checkpoint_cannot_represent_are_rejected(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, None, rotary_base=5e5)
    with pytest.raises(EngineError, match=r"differs from the config\.json of its checkpoint"):
        export_hugging_face(engine.path, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
    (tmp_path / "exported").mkdir()
    with pytest.raises(ConfigError, match=r"exported exists\. Name a new directory"):
        export_hugging_face(engine.path, tmp_path / "exported")


def exported_tensors(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def check_equal(found: Path, expected: Path) -> None:
    """Both checkpoints have the same tensors and settings."""
    ours, theirs = exported_tensors(found), exported_tensors(expected)
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name].view(torch.uint8), theirs[name].view(torch.uint8)) for name in theirs)
    assert (found / "config.json").read_text() == (expected / "config.json").read_text()


@pytest.mark.parametrize(
    ("quantization", "settings", "mapping"),
    [
        (None, {}, Mapping(tensor_parallel=2, pipeline_parallel=2)),
        ("WEIGHTS_ONLY_INT8", {}, Mapping(tensor_parallel=3)),  # two key-value heads: each rank has a copy or zeros
        ("WEIGHTS_ONLY_INT4", {"group_size": 16, "zero": "none"}, Mapping(tensor_parallel=2)),
        ("FP8_BLOCK", {"rows": 16, "columns": 16}, Mapping(tensor_parallel=2)),
    ],
)
def test_ranks_are_merged(quantization: str | None, settings: dict[str, Any], mapping: Mapping, tmp_path: Path) -> None:
    whole, shards = (
        engine_of(tmp_path / name, quantization, settings, tied=quantization is None, mapping=ranks)
        for name, ranks in (("whole", Mapping()), ("shards", mapping))
    )
    assert shards.world_size == mapping.world_size
    for engine, name in ((whole, "one"), (shards, "merged")):
        export_hugging_face(engine.path, tmp_path / name)
    check_equal(tmp_path / "merged", tmp_path / "one")


MOE = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("quantization", [None, "WEIGHTS_ONLY_INT8", "WEIGHTS_ONLY_INT4", "FP8_BLOCK", "FP8"])
def test_experts_are_built_into_the_same_engine(quantization: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = tiny.model("qwen3_moe", **SIZES | MOE)
    tiny.save(made, tmp_path / "checkpoint")
    made.save_pretrained(tmp_path / "checkpoint")  # with a tensor for each expert
    settings = {"FP8_BLOCK": {"rows": 32, "columns": 32}, "FP8": {"compensate": False}}.get(quantization or "", {})
    mapping = Mapping(data_parallel=2, expert_parallel=True) if quantization is None else Mapping(tensor_parallel=2, expert_parallel=True)
    engine = engine_of(tmp_path, quantization, settings, mapping=mapping)
    export_hugging_face(engine.path, tmp_path / "exported")
    assert ("linears of experts are exported as float32" in caplog.text) == (quantization == "FP8_BLOCK")
    again = build(tmp_path / "exported", tmp_path / "again", BuildConfig(device="cpu", dtype="float32"), verify="none")
    one_rank = engine_of(tmp_path, quantization, settings)
    # FP8 blocks round the inputs of experts, plain numbers do not; int4 with zero points become int8.
    assert nll_of(again) == pytest.approx(nll_of(one_rank), rel=1e-2 if quantization == "FP8_BLOCK" else 1e-5)
    if quantization in (None, "FP8"):
        old, new = (load_file(one.path / "rank0.safetensors") for one in (one_rank, again))
        assert all(torch.equal(old[name].view(torch.uint8), new[name].view(torch.uint8)) for name in old if "experts" in name)


EXPERTS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": MOE,
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 64},
    "deepseek_v3": LATENT | {"first_k_dense_replace": 1, "head_dim": 8, "num_key_value_heads": 8},
}


@pytest.mark.parametrize(
    ("model_type", "quantization", "settings", "tolerance"),
    [
        ("qwen3_moe", "FP8", {"activations": "none", "compensate": False}, 1e-4),
        ("qwen2_moe", "FP8", {"compensate": False}, 1e-2),
        ("mixtral", "WEIGHTS_ONLY_INT4", {"group_size": 32, "zero": "none"}, 1e-4),
        ("qwen3_moe", "WEIGHTS_ONLY_INT4", {"group_size": 32}, 1e-4),
        ("mixtral", "WEIGHTS_ONLY_INT8", {}, 1e-4),
        ("deepseek_v3", "WEIGHTS_ONLY_INT8", {}, 1e-4),
        ("qwen2_moe", "SMOOTH_QUANT", {}, 1e-2),
        ("qwen3_moe", "FP8_BLOCK", {"rows": 32, "columns": 32}, 1e-2),
    ],
)
def test_transformers_loads_quantized_experts(
    model_type: str, quantization: str, settings: dict[str, Any], tolerance: float, tmp_path: Path
) -> None:
    """`from_pretrained` raises an error for tensors that it cannot convert. Larger tolerances: it does not round inputs of experts."""
    made = tiny.model(model_type, **SIZES | EXPERTS[model_type])
    tiny.save(made, tmp_path / "checkpoint")
    made.save_pretrained(tmp_path / "checkpoint")
    engine = engine_of(tmp_path, quantization, settings)
    assert any("experts" in spec for spec in load_file(engine.path / "rank0.safetensors"))
    export_hugging_face(engine.path, tmp_path / "exported")
    assert nll_of_transformers(tmp_path / "exported") == pytest.approx(nll_of(engine), rel=tolerance)


def test_plain_experts_of_a_quantized_model_are_loaded(tmp_path: Path) -> None:
    made = tiny.model("qwen3_moe", **SIZES | MOE)
    tiny.save(made, tmp_path / "checkpoint")
    made.save_pretrained(tmp_path / "checkpoint")
    plain = load_file(tmp_path / "checkpoint" / "model.safetensors")
    export_hugging_face(engine_of(tmp_path, "WEIGHTS_ONLY_INT8").path, tmp_path / "quantized")
    file = tmp_path / "quantized" / "model.safetensors"
    quantized = {name: tensor for name, tensor in load_file(file).items() if ".experts." not in name}
    save_file(quantized | {name: tensor for name, tensor in plain.items() if ".experts." in name}, file)
    engine = build(tmp_path / "quantized", tmp_path / "mixed", BuildConfig(device="cpu", dtype="float32"), verify="none")
    export_hugging_face(engine.path, tmp_path / "exported")
    config = json.loads((tmp_path / "exported" / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["format"] == "int-quantized"
    assert nll_of_transformers(tmp_path / "exported") == pytest.approx(nll_of(engine), rel=1e-4)


def test_a_quantized_llama_4_is_exported_as_plain_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"num_local_experts": 4, "intermediate_size_mlp": 256, "interleave_moe_layer_step": 1, "attention_chunk_size": 64}
    tiny.save(tiny.model("llama4_text", **SIZES | sizes), tmp_path / "checkpoint")
    engine = engine_of(tmp_path, "WEIGHTS_ONLY_INT8", kv_cache_dtype="float8_e4m3fn")
    export_hugging_face(engine.path, tmp_path / "exported")
    assert "plain numbers only: transformers reads a quantized Llama4ForCausalLM" in caplog.text
    assert "quantization_config" not in json.loads((tmp_path / "exported" / "config.json").read_text())
    assert nll_of_transformers(tmp_path / "exported") == pytest.approx(nll_of(engine), rel=2e-2)
    again = build(tmp_path / "exported", tmp_path / "again", BuildConfig(device="cpu", dtype="float32"), verify="none")
    assert nll_of(again) == pytest.approx(nll_of_transformers(tmp_path / "exported"), rel=1e-5)


def test_the_scales_of_an_fp8_cache_are_exported(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, None, kv_cache_dtype="float8_e4m3fn")
    export_hugging_face(engine.path, tmp_path / "exported")
    tensors = exported_tensors(tmp_path / "exported")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32)
    with torch.inference_mode():
        cache = model(IDS[None], use_cache=True).past_key_values
    for index, layer in enumerate(cache.layers):
        for name, pages in (("k", layer.keys), ("v", layer.values)):
            scale = float(tensors[f"model.layers.{index}.self_attn.{name}_scale"])
            largest = float(pages.abs().max()) / 448
            assert largest / 4 < scale < 64 * largest  # other tokens than those of the calibration can be larger
    again = build(tmp_path / "exported", tmp_path / "again", BuildConfig(device="cpu", dtype="float32"), verify="none")
    assert (again.config.recipe.kv_cache, again.config.recipe.kv_scales) == ("float8_e4m3fn", "stored")
    export_hugging_face(again.path, tmp_path / "twice")
    third = build(tmp_path / "twice", tmp_path / "third", BuildConfig(device="cpu", dtype="float32"), verify="none")
    old, new = (load_file(one.path / "rank0.safetensors") for one in (again, third))
    assert all(torch.equal(old[name], new[name]) for name in old)
    assert nll_of_transformers(tmp_path / "exported") == pytest.approx(nll_of(engine_of(tmp_path, None)), rel=2e-2)


def test_stored_values_of_act_order_offsets_and_fp4_are_exported() -> None:
    """Act-order becomes `weight_g_idx`; offsets that are multiples of the scale become zero points; the package computes the weights."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    generator = torch.Generator().manual_seed(3)
    order = torch.randperm(64, generator=generator).int()
    scale = torch.rand(8, 2, generator=generator) + 0.1
    zero = torch.randint(0, 16, (8, 2), generator=generator)
    nibbles = torch.randint(0, 256, (8, 32), generator=generator, dtype=torch.uint8)
    values = torch.randint(-128, 128, (8, 64), generator=generator, dtype=torch.int8)
    int4 = Int4(group_size=32, clip=False, reorder=True, scale_dtype="float32")
    cases = [
        (int4, {"weight": nibbles, "scale": scale, "zero": zero.to(torch.uint8), "order": order}),
        (
            Int4(group_size=32, clip=False, zero="float", scale_dtype="float32"),
            {"weight": nibbles, "scale": scale, "offset": -zero * scale},
        ),
        (GroupedInt8(group_size=32, shifted=True), {"weight": values, "scale": scale, "offset": -zero * scale}),
        (GroupedInt8(group_size=32, reorder=True), {"weight": values, "scale": scale, "order": order}),
        (Fp4(), {"weight": nibbles, "scale": torch.randint(118, 122, (8, 2), generator=generator, dtype=torch.uint8)}),
        (
            Fp4(group_size=16, scale="e4m3"),
            {
                "weight": nibbles,
                "scale": (torch.rand(8, 4, generator=generator) + 0.1).to(torch.float8_e4m3fn),
                "row_scale": torch.full((8,), 0.3),
            },
        ),
    ]
    for chosen, stored in cases:
        settings = scheme_of(chosen, stored)
        assert settings is not None
        scheme = QuantizationScheme(targets=["Linear"], **settings)
        tensors = module_tensors(chosen, stored, torch.float32)
        found = BaseCompressor.get_value_from_registry(settings["format"]).decompress(tensors, scheme)["weight"]
        rounding = 4e-3 if isinstance(chosen, Fp4) else 1e-5  # the package computes NVFP4 in bfloat16
        assert torch.allclose(found.float(), dequantize(chosen, dict(stored)), rtol=rounding, atol=1e-6)
    offset = {"weight": values, "scale": scale, "offset": -zero * scale + 0.01}
    assert scheme_of(GroupedInt8(group_size=32, shifted=True), offset) is None


REARRANGED: list[tuple[str, str | None, dict[str, Any]]] = [
    ("gemma2", None, {}), ("gemma3_text", "WEIGHTS_ONLY_INT8", {}), ("gpt2", None, {"n_embd": 96, "n_head": 6}),
    ("gpt_neox", "WEIGHTS_ONLY_INT8", {}), ("bloom", None, {"n_head": 6}), ("stablelm", "WEIGHTS_ONLY_INT8", {"qk_layernorm": True}),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "quantization", "sizes"), REARRANGED)
def test_rearranged_tensors_are_exported(model_type: str, quantization: str | None, sizes: dict[str, Any], tmp_path: Path) -> None:
    """Norms of Gemma (1 + w), Conv1D of GPT-2, the fused QKV of GPT-NeoX and BLOOM, and the norms of heads of StableLM.

    Quantized ones become plain numbers.
    """
    made = tiny.model(model_type, **sizes)
    tiny.save(made, tmp_path / "checkpoint")
    made.save_pretrained(tmp_path / "checkpoint")  # with the names of files
    engine = engine_of(tmp_path, quantization)
    export_hugging_face(engine.path, tmp_path / "exported")
    assert nll_of_transformers(tmp_path / "exported") == pytest.approx(nll_of(engine), rel=1e-4)
    again = build(tmp_path / "exported", tmp_path / "again", BuildConfig(device="cpu", dtype="float32"), verify="none")
    assert nll_of(again) == pytest.approx(nll_of(engine), rel=1e-5)
