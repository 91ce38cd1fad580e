"""`stoker export hf`: transformers and the compressed-tensors package read the checkpoint, and compute the logits of the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stoker.base.errors import ConfigError, EngineError
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.builder.export import hugging_face
from stoker.builder.export.compressed import module_tensors, scheme_of
from stoker.builder.export.hugging_face import export_hugging_face
from stoker.engine.layerwise import LayerwiseModel, split_windows
from stoker.engine.reader import Engine
from stoker.quant.formats.int4 import Int4

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
    monkeypatch.setattr(hugging_face, "FILE_BYTES", 1 << 19)
    engine = engine_of(tmp_path, None)
    names = [file.name for file in export_hugging_face(engine.path, tmp_path / "exported")]
    assert "model.safetensors.index.json" in names and "model-00001-of-00004.safetensors" in names
    assert nll_of_transformers(tmp_path / "exported") == pytest.approx(nll_of(engine), rel=1e-5)


def test_engines_that_a_checkpoint_cannot_represent_are_rejected(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, None, rotary_base=5e5)
    with pytest.raises(EngineError, match=r"differs from the config\.json of its checkpoint"):
        export_hugging_face(engine.path, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
    (tmp_path / "exported").mkdir()
    with pytest.raises(ConfigError, match=r"exported exists\. Name a new directory"):
        export_hugging_face(engine.path, tmp_path / "exported")
    tiny.save(tiny.model("gpt2"), tmp_path / "gpt2")
    computed = build(tmp_path / "gpt2", tmp_path / "gpt2-engine", BuildConfig(device="cpu"), verify="none")
    with pytest.raises(EngineError, match=r"is computed from tensors of GPT2LMHeadModel, and cannot be exported"):
        export_hugging_face(computed.path, tmp_path / "other")
