"""The record of the keys of a config.json that a reader used, and the rejection of the others."""

from __future__ import annotations

import pytest

from stoker.base.errors import CheckpointError
from stoker.models import resolve_architecture
from stoker.models.config_data import ConfigData, check_all_keys_used
from stoker.models.config_reader import read_model_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
}


def test_reads_are_recorded_through_copies_and_nested_objects() -> None:
    data = ConfigData({"a": 1, "b": None, "c": {"d": 2, "e": {"f": 3}}, "g": 4, "h": 5})
    merged = {"a": 0, "z": 9} | data | {"h": 6}
    assert (merged["a"], merged["h"], merged["z"]) == (1, 6, 9)
    assert merged.get("missing", 7) == 7 and "g" in merged
    assert merged["c"]["e"]["f"] == 3
    assert list(data.unused()) == ["c.d"]  # b is null


def test_an_object_that_nothing_reads_is_named_once() -> None:
    assert list(ConfigData({"rope": {"x": 1, "y": 2}}).unused()) == ["rope"]


def test_unknown_keys_are_rejected_by_name_unless_listed() -> None:
    hf = LLAMA | {"router_scale": 2.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0, "bend": 1}}
    row = resolve_architecture(hf)
    with pytest.raises(
        CheckpointError, match=r"router_scale, rope_scaling\.bend are not supported for LlamaForCausalLM.*--ignore-config-key"
    ):
        read_model_config(row, hf)
    config = read_model_config(row, hf, ("router_scale", "rope_scaling.bend"))
    assert config.layers[0].attention.rope is not None and config.layers[0].attention.rope.factor == 2.0


@pytest.mark.parametrize("key", ["transformers_version", "attention_dropout", "use_cache", "unsloth_version", "id2label", "torch_dtype"])
def test_keys_known_to_have_no_effect_are_accepted(key: str) -> None:
    check_all_keys_used(ConfigData({key: 1}), "LlamaForCausalLM", ())


@pytest.mark.parametrize("key", ["is_encoder_decoder", "add_cross_attention", "rope_interleaved"])
def test_keys_that_select_another_model_are_rejected(key: str) -> None:
    with pytest.raises(CheckpointError, match=f"{key}=True is not supported"):
        read_model_config(resolve_architecture(LLAMA), LLAMA | {key: True})
    read_model_config(resolve_architecture(LLAMA), LLAMA | {key: False})
