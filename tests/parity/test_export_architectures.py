"""`stoker export hf` gives each architecture the tensors of the checkpoint that its engine was built from."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from cases import CASES, FIRST

from stoker.base.config import Limits
from stoker.builder.build import build
from stoker.builder.checkpoint.weight_files import open_weights
from stoker.builder.config import BuildConfig
from stoker.builder.conversion.canonical_names import CanonicalWeights
from stoker.builder.export.hugging_face import export_hugging_face
from stoker.core.model_config import ModelConfig
from stoker.models import get_architecture, resolve_architecture
from stoker.models.config_reader import read_model_config

QWEN_VL = ("Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration")


def read_config(path: Path) -> ModelConfig:
    data = json.loads((path / "config.json").read_text())
    return read_model_config(resolve_architecture(data), data)


@pytest.mark.parametrize("name", [name for name in FIRST if name not in QWEN_VL])
def test_the_tensors_of_the_checkpoint_are_exported(name: str, tmp_path: Path, tokenizer: Path) -> None:
    CASES[FIRST[name]]().save(tmp_path / "hf")
    limits = Limits(max_input_len=32, max_output_len=32, max_num_tokens=64, max_batch_size=1, tokens_per_block=16)
    config = BuildConfig(tokenizer=str(tokenizer), device="cpu", dtype="float32", limits=limits)
    engine = build(tmp_path / "hf", tmp_path / "engine", config, verify="none")
    export_hugging_face(engine.path, tmp_path / "exported")
    row = get_architecture(engine.config.model.architecture)
    expected, found = (CanonicalWeights(open_weights(tmp_path / folder), row) for folder in ("hf", "exported"))
    missing = set(expected.tensors) - set(found.tensors)
    assert [key for key in missing if not any(fnmatch.fnmatchcase(key, pattern) for pattern in row.ignored_tensors)] == []
    assert set(found.tensors) <= set(expected.tensors)
    again = read_config(tmp_path / "exported")
    assert msgspec.structs.replace(again, architecture=row.name) == engine.config.model
    for key in found.tensors:
        tensor = expected.read(key).float()
        if (row.name, key) == ("BaichuanForCausalLM", "lm_head.weight"):  # the model scales its rows to length 1
            tensor = torch.nn.functional.normalize(tensor)
        torch.testing.assert_close(found.read(key), tensor, rtol=1e-6, atol=1e-6, msg=lambda message, key=key: f"{key}: {message}")


@pytest.mark.parametrize("name", QWEN_VL)
def test_transformers_loads_the_language_model_of_qwen_vl_as_a_text_model(name: str, tmp_path: Path, tokenizer: Path) -> None:
    CASES[FIRST[name]]().save(tmp_path / "hf")
    limits = Limits(max_input_len=32, max_output_len=32, max_num_tokens=64, max_batch_size=1, tokens_per_block=16)
    config = BuildConfig(tokenizer=str(tokenizer), device="cpu", dtype="float32", limits=limits)
    engine = build(tmp_path / "hf", tmp_path / "engine", config, verify="none")
    export_hugging_face(engine.path, tmp_path / "exported")
    whole = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    text, loading = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]
    tokens = torch.arange(3, 23)[None]
    with torch.inference_mode():
        torch.testing.assert_close(text(tokens).logits, whole(tokens).logits, rtol=1e-4, atol=1e-5)
