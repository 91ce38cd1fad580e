"""Published models at their full size: shapes are declared, counted and split over ranks without a byte of weights."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from full_size import PUBLISHED

from stoker.builder.config import BuildConfig
from stoker.builder.prepare import prepare
from stoker.layers.config import ModelConfig
from stoker.layers.decoder import declare
from stoker.layers.shard import Sharding, local_spec
from stoker.layers.specs import LinearSpec
from stoker.models import resolve


def read(name: str) -> ModelConfig:
    hf = PUBLISHED[name][0]
    return resolve(hf).config(hf)


def count(config: ModelConfig) -> int:
    total = 0
    for spec in declare(config).values():
        shapes = [spec.weight_shape, *([spec.bias_shape] if spec.bias else [])] if isinstance(spec, LinearSpec) else [spec.shape]
        total += sum(math.prod(shape) for shape in shapes)
    return total


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name: str) -> None:
    assert count(read(name)) == PUBLISHED[name][1]


@pytest.mark.parametrize(("name", "size"), [("Llama-3.1-405B", 8), ("DeepSeek-V3", 16), ("Mixtral-8x7B", 4), ("Falcon-180B", 8)])
def test_ranks_share_the_weights_evenly(name: str, size: int) -> None:
    """What is split is split without a rest, and the split parts are nearly everything."""
    specs = declare(read(name)).values()
    linears = [spec for spec in specs if isinstance(spec, LinearSpec)]
    whole = sum(math.prod(spec.weight_shape) for spec in linears)
    shares = sum(math.prod(local_spec(spec, Sharding(size=size)).weight_shape) for spec in linears if spec.split != "vocab")
    assert shares < 1.1 * whole / size


def test_a_dummy_engine_of_the_largest_needs_no_memory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["DeepSeek-V3"][0] | {"torch_dtype": "bfloat16"}))
    prepared = prepare(tmp_path, BuildConfig(dummy_weights=True, device="cpu", dtype="bfloat16"))
    assert prepared.config.model.num_layers == 61
    assert prepared.makings == {}
