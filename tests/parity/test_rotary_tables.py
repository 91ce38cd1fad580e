"""Rotary tables equal those of transformers, at lengths where the scaling takes effect."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from oracles import hf_model
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from stoker.base.errors import CheckpointError, ConfigError
from stoker.core.model_config import RopeConfig
from stoker.layers.rope import rope_table
from stoker.models import get_architecture
from stoker.models.rotary_override import override_rotary

HEAD = 64
SIZES: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 4096}
LONG = {"short_factor": [1 + i / 50 for i in range(32)], "long_factor": [1 + i for i in range(32)]}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 512},
    "yarn, no rounding": {"factor": 32.0, "original_max_position_embeddings": 512, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, mscale": {"factor": 40.0, "original_max_position_embeddings": 512, "mscale": 0.707, "mscale_all_dim": 0.5},
    "yarn, attention factor": {"factor": 4.0, "original_max_position_embeddings": 512, "attention_factor": 1.3},
    "longrope": {"original_max_position_embeddings": 1024, **LONG},
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("length", [1024, 4096, 6000])
def test_tables_equal_those_of_transformers(name: str, length: int) -> None:
    kind = name.partition(",")[0]
    parameters = {"rope_type": kind, "rope_theta": 20000.0, **SCALINGS[name]}
    kwargs = {"original_max_position_embeddings": 1024} if kind == "longrope" else {}
    config = (Phi3Config if kind == "longrope" else LlamaConfig)(**SIZES, **kwargs, rope_parameters=dict(parameters))
    inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    row = get_architecture("Phi3ForCausalLM" if kind == "longrope" else "LlamaForCausalLM")
    rope = row.read_config(SIZES | kwargs | {"rope_parameters": parameters}).layers[0].attention.rope

    table = rope_table(rope, length, "cpu")
    angles = torch.arange(length)[:, None].double() * inv_freq.double()
    expected = torch.cat((angles.cos(), angles.sin()), -1) * factor
    # The frequencies of transformers are float32, so an angle at position p has an error of up to p × 6e-8.
    assert (table.double() - expected).abs().max() < length * 1.2e-7 * factor + 1e-6


def test_dynamic_scaling_has_no_effect_within_the_trained_length() -> None:
    plain = RopeConfig(dim=HEAD)
    dynamic = RopeConfig(dim=HEAD, scaling="dynamic", factor=2.0, original_max_positions=512)
    assert torch.equal(rope_table(dynamic, 512, "cpu"), rope_table(plain, 512, "cpu"))
    assert not torch.equal(rope_table(dynamic, 600, "cpu"), rope_table(plain, 600, "cpu"))


def test_alpha_of_qwen_depends_on_the_power_of_two_of_the_length() -> None:
    """get_ntk_alpha of the published code: 1 up to the trained length, 3 up to twice that, 7 up to four times."""
    for length, alpha in ((512, 1), (513, 3), (1024, 3), (1025, 7), (2048, 7)):
        table = rope_table(RopeConfig(dim=HEAD, scaling="qwen", original_max_positions=512), length, "cpu")
        slowest = (10000.0 * alpha ** (HEAD / (HEAD - 2))) ** -((HEAD - 2) / HEAD)
        assert math.isclose(math.acos(table[100, HEAD // 2 - 1].item()), 100 * slowest, rel_tol=0.02)


def test_angles_are_exact_at_large_positions() -> None:
    """At position 100,000, an angle computed in float32 would have an error of 0.004."""
    table = rope_table(RopeConfig(dim=HEAD), 100_001, "cpu")
    assert math.isclose(table[100_000, 1].item(), math.cos(100_000 * 10000.0 ** (-2 / HEAD)), abs_tol=1e-6)


def test_rotary_settings_of_the_build_replace_those_of_the_checkpoint() -> None:
    config = get_architecture("LlamaForCausalLM").read_config(SIZES)
    changed = override_rotary(config, base=5e5, scaling="linear", factor=4.0)
    rope = changed.layers[-1].attention.rope
    assert rope == RopeConfig(dim=HEAD, theta=5e5, scaling="linear", factor=4.0, original_max_positions=4096)
    assert changed.max_positions == 4 * 4096
    scaled = get_architecture("LlamaForCausalLM").read_config(SIZES | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert override_rotary(scaled, base=5e5).layers[0].attention.rope.factor == 2.0


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("LlamaForCausalLM", {"scaling": "yarn", "factor": 2.0}, "rotary_scaling_type='yarn' is not supported"),
        ("LlamaForCausalLM", {"scaling": "linear"}, "belong together"),
        ("LlamaForCausalLM", {"factor": 2.0}, "belong together"),
        ("LlamaForCausalLM", {"scaling": "linear", "factor": 1.0}, "rotary_scaling_factor=1.0 is refused"),
        ("LlamaForCausalLM", {"base": 0.0}, "rotary_base=0.0 is refused"),
        ("LlamaForCausalLM", {"base": math.nan}, "rotary_base=nan is refused"),
        ("GPT2LMHeadModel", {"base": 2.0}, "has no rotary positions"),
        ("GptOssForCausalLM", {"scaling": "linear", "factor": 2.0}, "already scales its positions .yarn"),
    ],
)
def test_wrong_rotary_settings_of_the_build_are_refused(name: str, settings: dict[str, Any], message: str) -> None:
    own = {"rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64}} if "Oss" in name else {}
    with pytest.raises(ConfigError, match=message):
        override_rotary(get_architecture(name).read_config(own), **settings)


def test_an_unknown_scaling_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"type='spiral' of the rotary scaling.*yarn"):
        get_architecture("LlamaForCausalLM").read_config(SIZES | {"rope_scaling": {"type": "spiral", "factor": 2.0}})


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_the_tables_of_a_model_beyond_the_trained_length(kind: str) -> None:
    """transformers chooses the table by the length of the sequence, here that of the engine's table."""
    scaling = {"rope_type": kind, "rope_theta": 1e4} | (
        {"factor": 2.0} if kind == "dynamic" else {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    )
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
    sizes |= (
        {"max_position_embeddings": 64} if kind == "dynamic" else {"max_position_embeddings": 96, "original_max_position_embeddings": 64}
    )
    model = hf_model("Llama" if kind == "dynamic" else "Phi3", **sizes, rope_parameters=scaling)
    rotary = model.model.rotary_emb
    cos, sin = rotary(torch.zeros(1), torch.arange(96)[None])
    row = get_architecture(type(model).__name__)
    table = rope_table(row.read_config(model.config.to_dict()).layers[0].attention.rope, 96, "cpu")
    assert torch.allclose(table, torch.cat((cos[0, :, :4], sin[0, :, :4]), -1), atol=2e-5)
