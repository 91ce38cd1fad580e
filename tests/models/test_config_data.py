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


def test_hostile_names_of_keys_are_shortened() -> None:
    keys = dict.fromkeys(["a\x1b[31m", "b" * 1000, *map(str, range(100))], 1)
    with pytest.raises(CheckpointError) as refused:
        check_all_keys_used(ConfigData(keys), "LlamaForCausalLM", ())
    assert "'a\\x1b[31m', <str of length 1000>, 0, 1," in str(refused.value) and "17 and 82 more are not supported" in str(refused.value)


def test_a_replaced_value_is_checked() -> None:
    """A reader replaces the value of a key that has no effect in its family."""
    with pytest.raises(CheckpointError, match="hidden_size='big' is refused"):
        ConfigData({"hidden_size": "big"}) | {"hidden_size": 64}
    assert (ConfigData({"hidden_size": None}) | {"hidden_size": 64})["hidden_size"] == 64


def test_deeply_nested_objects_are_refused() -> None:
    nested: dict = {}
    for _ in range(100_000):
        nested = {"x": nested}
    with pytest.raises(CheckpointError, match="nested too deeply"):
        read_model_config(resolve_architecture(LLAMA), LLAMA | {"x": nested})
    while nested:
        nested = nested["x"]  # from the outside, because Python frees such an object recursively
