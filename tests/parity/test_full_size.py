"""Published models at full size: shapes are declared, counted and split over ranks without reading or allocating weights."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import pytest
from full_size import PUBLISHED
from published_files import CHECKPOINTS, WITHOUT_FILE

from stoker.base.config import Mapping
from stoker.base.errors import CheckpointError
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.builder.estimate import estimate
from stoker.builder.prepare import prepare
from stoker.core.model_config import ModelConfig
from stoker.core.specs import LinearSpec
from stoker.layers.decoder import declare
from stoker.layers.shard import Sharding, local_spec
from stoker.models import all_architectures, resolve_architecture
from stoker.models.config_reader import read_model_config
from stoker.quant.formats.fp4 import Fp4

FILES = Path(__file__).parent / "published"


def read_published(name: str) -> ModelConfig:
    hf = PUBLISHED[name][0]
    return resolve_architecture(hf).read_config(hf)


def count_parameters(config: ModelConfig) -> int:
    total = 0
    for spec in declare(config).values():
        shapes = [spec.weight_shape, *([spec.bias_shape] if spec.bias else [])] if isinstance(spec, LinearSpec) else [spec.shape]
        total += sum(math.prod(shape) for shape in shapes)
    return total


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_number_of_parameters_is_the_published_one(name: str) -> None:
    assert count_parameters(read_published(name)) == PUBLISHED[name][1]


@pytest.mark.parametrize(("name", "size"), [("Llama-3.1-405B", 8), ("DeepSeek-V3", 16), ("Mixtral-8x7B", 4), ("Falcon-180B", 8)])
def test_ranks_hold_equal_shards(name: str, size: int) -> None:
    """The shards of a rank are at most 10 % more than its part of all weights."""
    specs = declare(read_published(name)).values()
    linears = [spec for spec in specs if isinstance(spec, LinearSpec)]
    whole = sum(math.prod(spec.weight_shape) for spec in linears)
    sharded = sum(math.prod(local_spec(spec, Sharding(size=size)).weight_shape) for spec in linears if spec.split != "vocab")
    assert sharded < 1.1 * whole / size


MIB = 1 << 20


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_dummy_engine_is_built_from_the_published_file(name: str, tmp_path: Path) -> None:
    """The reader accepts every key of the file, the estimate counts every parameter, and no memory is allocated for weights."""
    (tmp_path / "config.json").write_text((FILES / f"{name}.json").read_text())
    settings = BuildConfig(dummy_weights=True, device="cuda", compute_capability="9.0")
    before = getrusage(RUSAGE_SELF).ru_maxrss
    engine = build(tmp_path, tmp_path / "engine", settings)
    found = estimate(engine.config, memory=1 << 50)
    assert getrusage(RUSAGE_SELF).ru_maxrss - before < 100 * MIB / 1024, "kibibytes"
    assert found.parameters == CHECKPOINTS[name]
    as_stored = 0.5 if isinstance(engine.config.recipe.default, Fp4) else 1
    bytes_per_weight = as_stored if engine.config.recipe.name == "AS_STORED" else 2 if engine.config.dtype != "float32" else 4
    assert found.weights >= found.parameters * bytes_per_weight and found.fits
    assert sum(file.stat().st_size for file in engine.path.iterdir()) < MIB


def test_every_published_file_is_built() -> None:
    assert {file.stem for file in FILES.glob("*.json")} == set(CHECKPOINTS)


def test_every_row_has_a_published_file_or_a_reason() -> None:
    with_file = {resolve_architecture(json.loads((FILES / f"{name}.json").read_text())).name for name in CHECKPOINTS}
    with_size = {resolve_architecture(hf).name for hf, _ in PUBLISHED.values()}
    rows = {row.name for row in all_architectures()}
    assert rows - with_file == WITHOUT_FILE.keys()
    assert rows == with_file | with_size


def test_the_source_of_every_new_file_is_named() -> None:
    """Files of before 2026-11-28 have none."""
    named = re.findall(r"^\| `([^`]+)` \| .+ \|$", (FILES / "README.md").read_text(), re.MULTILINE)
    assert len(named) == len(set(named)) and set(named) <= set(CHECKPOINTS)
    assert len(CHECKPOINTS) - len(named) == 48


# (file, changes, what the message names): keys that have no effect with the published value, and would have with another.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Ministral-8B-Instruct-2410", {"sliding_window": 4096}, "layer_types with sliding_window=4096 < max_position_embeddings=32768"),
    ("Nemotron-4-Mini-Hindi-4B-Instruct", {"kv_channels": 64}, "kv_channels=64"),
    ("Qwen3.5-27B", {"text_config": {"mlp_only_layers": [1]}}, r"mlp_only_layers=\[1\]"),
    ("Kimi-K2.5", {"text_config": {"is_encoder_decoder": True}}, "is_encoder_decoder=True"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_a_key_without_effect_is_refused_with_another_value(name: str, changes: dict[str, Any], message: str) -> None:
    hf = json.loads((FILES / f"{name}.json").read_text())
    row = resolve_architecture(hf)
    read_model_config(row, hf)
    changed = {key: hf[key] | value if isinstance(value, dict) else value for key, value in changes.items()}
    with pytest.raises(CheckpointError, match=message):
        read_model_config(row, hf | changed)


@pytest.mark.parametrize(("name", "tensor", "pipeline"), [("DeepSeek-V2-Lite", 4, 1), ("falcon-180B", 8, 1), ("gpt-oss-120b", 4, 1)])
def test_ranks_of_a_dummy_engine_hold_their_shard(name: str, tensor: int, pipeline: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((FILES / f"{name}.json").read_text())

    def weights(**ranks: int) -> int:
        settings = BuildConfig(dummy_weights=True, device="cuda", mapping=Mapping(**ranks))
        return estimate(prepare(tmp_path, settings).config, memory=1 << 50).weights

    assert weights(tensor_parallel=tensor, pipeline_parallel=pipeline) < 1.2 * weights() / (tensor * pipeline)


@pytest.mark.parametrize("quantization", ["AWQ", "FP8_KV"])
def test_published_shapes_fit_the_formats(quantization: str, tmp_path: Path) -> None:
    """Groups of 128 columns, scales per row and a quantized KV cache are possible for every published model."""
    settings = BuildConfig(dummy_weights=True, device="cuda", compute_capability="9.0", quantization=quantization)
    for name in CHECKPOINTS:
        (tmp_path / "config.json").write_text((FILES / f"{name}.json").read_text())
        assert prepare(tmp_path, settings).config.recipe.name == quantization, name
