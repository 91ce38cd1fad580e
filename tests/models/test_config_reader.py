"""A config.json with wrong types, sizes out of range or unknown settings is refused with the name of the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stoker.base.errors import CheckpointError
from stoker.models import get_architecture, resolve_architecture
from stoker.models.config_reader import read_model_config

PUBLISHED = Path(__file__).parents[1] / "parity" / "published"


def published(name: str) -> dict[str, Any]:
    return json.loads((PUBLISHED / f"{name}.json").read_text())


def read(hf: dict[str, Any]) -> None:
    read_model_config(resolve_architecture(hf), hf)


def test_published_files_are_accepted() -> None:
    for file in PUBLISHED.glob("*.json"):
        read(json.loads(file.read_text()))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("Llama-2-7b-hf", {"vocab_size": "32000"}, "vocab_size='32000' is refused: it must be a whole number from 1 to 16777216"),
        ("Llama-2-7b-hf", {"vocab_size": -1}, r"vocab_size=-1 is refused: it must be a whole number from 1 to 16777216"),
        ("Llama-2-7b-hf", {"hidden_size": 10**12}, "is refused: it must be a whole number from 1 to 262144"),
        ("Llama-2-7b-hf", {"num_hidden_layers": 10**9}, "=1000000000 is refused: it must be a whole number of layers from 1 to 4096"),
        ("Llama-2-7b-hf", {"num_hidden_layers": 0}, "num_hidden_layers=0 is refused"),
        ("Llama-2-7b-hf", {"num_key_value_heads": 5}, "num_kv_heads=5 is refused: it must divide the 32 heads"),
        ("Llama-2-7b-hf", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan is refused: it must be a number from 0 to 1"),
        ("Llama-2-7b-hf", {"rope_theta": 0}, "rope_theta=0 is refused: it must be a finite number above 0"),
        ("Llama-2-7b-hf", {"head_dim": 0}, "head_dim=0 is refused"),
        ("Llama-2-7b-hf", {"num_key_value_heads": 0}, "num_key_value_heads=0 is refused"),
        ("Llama-2-7b-hf", {"rope_scaling": []}, r"rope_scaling=\[\] is refused: it must be an object"),
        ("Llama-2-7b-hf", {"rope_theta": -1.0}, "theta=-1.0 is refused: it must be a finite number above 0"),
        ("Llama-2-7b-hf", {"head_dim": 33}, "rotary dimensions=33 is refused: features are rotated in pairs"),
        ("Llama-2-7b-hf", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported. Only partial_rotary_factor=1.0 is"),
        ("GLM-4-9B-0414", {"partial_rotary_factor": 2.0}, "partial_rotary_factor=2.0 is refused: it must be a number from 0.01 to 1"),
        ("Llama-2-7b-hf", {"rope_scaling": {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}}, "needs 64 numbers above 0"),
        ("Llama-2-7b-hf", {"rope_scaling": "yarn"}, "rope_scaling='yarn' is refused: it must be an object"),
        ("mpt-7b", {"attn_config": "x"}, "attn_config='x' is refused: it must be an object"),
        ("mpt-7b", {"attn_config": {"alibi": True, "rope": True}}, "rope=True is not supported"),
        ("mpt-7b", {"norm_type": "rmsnorm"}, "norm_type='rmsnorm' is not supported"),
        ("gemma-2-27b", {"final_logit_softcapping": 0.0}, "softcapping=0.0 is refused: it must be a finite number above 0, or null"),
        ("gemma-2-27b", {"layer_types": ["full_attention"]}, "layer_types has 1 values. It must have one for each of the 46 layers"),
        ("DeepSeek-V2-Lite", {"num_experts_per_tok": 65}, "top_k=65 is refused: at most 64 can be chosen"),
        ("DeepSeek-V2-Lite", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid' is not supported"),
        ("DeepSeek-V2-Lite", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not supported"),
        ("DeepSeek-R1", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        ("DeepSeek-R1", {"topk_group": 9}, "top_groups=9 is refused: at most 8"),
        ("DeepSeek-R1", {"n_group": 7}, "num_groups=7 is refused: it must divide the 256 experts"),
        ("deepseek-moe-16b-base", {"scoring_func": "tanh"}, "scoring_func='tanh' is refused: it must be one of softmax, sigmoid"),
        ("gpt2", {"n_embd": 1}, "values that do not fit together in GPT2LMHeadModel: '0.0 cannot be raised to a negative power'"),
        ("Qwen2.5-7B-Instruct", {"hidden_size": None}, "hidden_size=None is refused: it must be a whole number"),
        ("gemma-2-27b", {"layer_types": ["linear_attention"] * 46}, "layer_types has 'linear_attention'. Supported: sliding_attention"),
        ("gemma-2-27b", {"layer_types": [""] * 46}, "layer_types has ''. Supported: sliding_attention"),
        ("Falcon-H1-0.5B-Instruct", {"mamba_n_groups": 5}, "num_groups=5 is refused: it must divide the 24 heads of the state"),
    ],
)  # fmt: skip
def test_messages_name_the_field_the_value_and_the_limit(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(published(name) | change)


def test_keys_of_other_files_without_an_effect() -> None:
    """Keys of published files of Qwen3-Next, Nemotron-H, Nemotron Nano 2 and Granite 4 that transformers does not read."""
    for hf in (
        {"architectures": ["Qwen3NextForCausalLM"], "use_sliding_window": False},
        {"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M-*-", "rms_norm_eps": 1e-5, "attention_head_dim": 128},
        {"architectures": ["GraniteMoeHybridForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "vocab_size": 99, "layer_types": ["attention"] * 2, "init_method": "mup"},
    ):  # fmt: skip
        read(hf)
    with pytest.raises(CheckpointError, match="use_sliding_window=True is not supported"):
        read({"architectures": ["Qwen3NextForCausalLM"], "use_sliding_window": True})


@pytest.mark.parametrize("names", [3, True, {"x": 1}, "LlamaForCausalLM", [3, None], [[]]])
def test_architectures_must_be_a_list_of_names(names: Any) -> None:
    with pytest.raises(CheckpointError, match="is not supported"):
        resolve_architecture(published("Llama-2-7b-hf") | {"architectures": names, "model_type": None})


@pytest.mark.parametrize("name", ["Gemma3nForConditionalGeneration", "Llama4ForConditionalGeneration", "Qwen3_5ForCausalLM"])
def test_the_layers_of_a_multimodal_model_are_counted_first(name: str) -> None:
    """A reader would make a list of them, which fills the memory."""
    with pytest.raises(CheckpointError, match=r"text_config\.num_hidden_layers=1000000000 is refused: it must be a whole number of layers"):
        read_model_config(get_architecture(name), {"text_config": {"num_hidden_layers": 10**9}})


@pytest.mark.parametrize("count", [2, 60])
def test_gemma3n_has_a_type_for_each_layer(count: int) -> None:
    """Fewer would be a model with fewer layers."""
    with pytest.raises(CheckpointError, match=f"layer_types has {count} values. It must have one for each of the 35 layers"):
        read_model_config(get_architecture("Gemma3nForCausalLM"), {"layer_types": ["sliding_attention", "full_attention"] * (count // 2)})
