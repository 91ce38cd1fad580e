"""Layers that read the keys and values of earlier layers (Gemma 3n): they have no cache, and no weights of keys and values."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from stoker.base.config import Mapping
from stoker.base.errors import CheckpointError, ConfigError
from stoker.builder.config import BuildConfig
from stoker.builder.prepare import prepare
from stoker.layers.decoder import kv_width, layer_specs
from stoker.models import get_architecture
from stoker.runtime.worker.memory import block_bytes, make_caches

MODEL = get_architecture("Gemma3nForCausalLM").read_config({})


def test_the_last_layers_of_gemma_3n_have_the_caches_of_the_last_layers_before_them() -> None:
    assert [MODEL.kv_layer(i) for i in range(20)] == [*range(20)]
    assert {MODEL.kv_layer(i) for i in range(20, 35)} == {18, 19}
    assert MODEL.kv_layer(24) == 19, "the last layer with full attention before them"
    caches = make_caches(MODEL, 2, 16, torch.bfloat16, torch.device("meta"))
    assert len(caches) == 35 and len({id(cache) for cache in caches}) == 20
    assert caches[24] is caches[19] and caches[23] is caches[18]
    stored = 20 * 2 * 2 * 256 * 2  # 20 layers, keys and values of 2 heads, 2 bytes
    assert block_bytes(MODEL, 16, torch.bfloat16) == 16 * stored
    assert kv_width(MODEL, 24, 1) == 0
    assert "layers.24.attention.k_norm.weight" not in layer_specs(MODEL, 24)
    assert layer_specs(MODEL, 24)["layers.24.attention.qkv"].parts == (2048,)  # type: ignore[union-attr]


def test_a_stage_without_the_cache_that_it_reads_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Gemma3nForCausalLM"], "model_type": "gemma3n_text"}')

    def settings(stages: int) -> BuildConfig:
        return BuildConfig(dummy_weights=True, device="cuda", compute_capability="9.0", mapping=Mapping(pipeline_parallel=stages))

    assert prepare(tmp_path, settings(2)).config.mapping.pipeline_parallel == 2
    reason = "pipeline_parallel=3 is refused: layer 24 reads the keys and values of layer 19, which would be in another stage"
    with pytest.raises(ConfigError, match=re.escape(reason)):
        prepare(tmp_path, settings(3))


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"num_kv_shared_layers": 33}, "num_kv_shared_layers=33"),
        ({"altup_active_idx": 4}, "altup_active_idx=4 with altup_num_inputs=4"),
        ({"intermediate_size": [1, 2]}, "intermediate_size has 2 values"),
        ({"activation_sparsity_pattern": [1.0] * 35}, "activation_sparsity_pattern has 1.0"),
        ({"layer_types": ["chunked_attention"] * 35}, "layer_types has 'chunked_attention'"),
    ],
)
def test_settings_of_gemma_3n_without_a_meaning_are_refused(keys: dict, reason: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(reason)):
        get_architecture("Gemma3nForCausalLM").read_config(keys)
