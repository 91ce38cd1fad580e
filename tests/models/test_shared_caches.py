"""Layers that read the keys and values of earlier layers (Gemma 3n): they have no cache, and no weights of keys and values."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

from stoker.base.config import Limits, Mapping
from stoker.base.errors import CheckpointError, ConfigError
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.builder.prepare import prepare
from stoker.engine.layerwise import LayerwiseModel
from stoker.engine.reader import Engine
from stoker.layers.decoder import kv_width, layer_specs
from stoker.models import get_architecture
from stoker.models.config_reader import read_model_config
from stoker.runtime.heads.source import check_heads
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
        ({"activation_sparsity_pattern": [1.0] * 35}, "activation_sparsity_pattern=[1.0, 1.0"),
        ({"layer_types": ["chunked_attention"] * 35}, "layer_types has 'chunked_attention'"),
    ],
)
def test_settings_of_gemma_3n_without_a_meaning_are_refused(keys: dict, reason: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(reason)):
        read_model_config(get_architecture("Gemma3nForCausalLM"), keys)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Gemma3nForCausalLM]:
    """A model whose last three layers read the keys and values of the first two."""
    config = Gemma3nTextConfig(
        vocab_size=101, hidden_size=48, intermediate_size=64, num_hidden_layers=5, num_attention_heads=6, num_key_value_heads=2, head_dim=8,
        sliding_window=9, layer_types=["sliding_attention", "full_attention"] * 2 + ["sliding_attention"], num_kv_shared_layers=3,
        hidden_size_per_layer_input=12, vocab_size_per_layer_input=101, laurel_rank=5, max_position_embeddings=256,
        activation_sparsity_pattern=[0.5, 0.0, 0.9, 0.0, 0.0], bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Gemma3nForCausalLM._from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3 if parameter.dim() > 1 else 1.0)
    folder = tmp_path_factory.mktemp("gemma3n")
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def engine(checkpoint: tuple[Path, Gemma3nForCausalLM], letters: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The engine of the checkpoint, whose greedy tokens the build has compared with those of transformers."""
    limits = Limits(max_input_len=64, max_output_len=64, max_num_tokens=128, max_batch_size=4, tokens_per_block=16)
    settings = BuildConfig(tokenizer=str(letters), device="cpu", dtype="float32", limits=limits)
    return build(checkpoint[0], tmp_path_factory.mktemp("engine") / "e", settings, verify="full")


def test_draft_heads_are_refused_for_several_residual_streams(engine: Engine, tmp_path: Path) -> None:
    """Heads read one hidden state. Drafts of n-grams and draft engines do not need it."""
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 1, "medusa_num_layers": 1, "base_model_name_or_path": "x"}))
    save_file({"0.0.linear.weight": torch.zeros(48, 48), "0.1.weight": torch.zeros(101, 48)}, tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(ConfigError, match="Gemma3nForCausalLM has several residual streams"):
        check_heads(tmp_path, engine)


def test_layers_that_run_one_after_the_other_read_the_cache_of_an_earlier_one(
    checkpoint: tuple[Path, Gemma3nForCausalLM], engine: Engine
) -> None:
    greedy = engine.config.checks["greedy"]
    assert greedy["equal"] == greedy["tokens"] == 32, greedy
    tokens = [torch.randint(3, 96, (n,), generator=torch.Generator().manual_seed(n), dtype=torch.int32) for n in (40, 23)]
    scores = LayerwiseModel(engine.config.model, tokens).run(engine.loader(0, torch.device("cpu")))
    with torch.inference_mode():
        logits = [checkpoint[1](input_ids=window[None].long(), use_cache=False).logits[0, :-1] for window in tokens]
    wanted = sum(float(torch.nn.functional.cross_entropy(x, w[1:].long(), reduction="sum")) for x, w in zip(logits, tokens, strict=True))
    assert scores.count == 61 and scores.nll == pytest.approx(wanted, rel=1e-5)
    assert [best.tolist() for best in scores.best] == [x.argmax(-1).tolist() for x in logits]
