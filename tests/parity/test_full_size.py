"""Published models at full size: shapes are declared, counted and split over ranks without reading or allocating weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import pytest
from full_size import PUBLISHED

from stoker.base.config import Mapping
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.builder.estimate import estimate
from stoker.builder.prepare import prepare
from stoker.core.model_config import ModelConfig
from stoker.core.specs import LinearSpec
from stoker.layers.decoder import declare
from stoker.layers.shard import Sharding, local_spec
from stoker.models import all_architectures, resolve_architecture
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


# Complete config.json files in published/, and the number of parameters of their checkpoints.
CHECKPOINTS = {
    "Llama-2-7b-hf": 6_738_415_616,
    "Llama-2-13b-hf": 13_015_864_320,
    "Llama-3.1-70B-Instruct": 70_553_706_496,
    "Mistral-7B-v0.1": 7_241_732_096,
    "Mixtral-8x7B-v0.1": 46_702_792_704,
    "DeepSeek-V2": 235_741_434_880,
    "DeepSeek-V2-Lite": 15_706_484_224,
    "DeepSeek-R1": 671_026_419_200,
    "deepseek-moe-16b-base": 16_375_728_128,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "falcon-180B": 178_557_088_768,
    "Falcon-H1-0.5B-Instruct": 521_411_104,
    "Jamba-v0.1": 51_570_323_328,
    "internlm-chat-7b": 7_321_948_160,
    "internlm2-chat-20b": 19_861_149_696,
    "Baichuan-7B": 7_000_559_616,
    "Baichuan-13B-Chat": 13_264_901_120,
    "Baichuan2-7B-Chat": 7_505_973_248,
    "Baichuan2-13B-Chat": 13_896_668_160,
    "chatglm-6b": 6_707_929_088,
    "chatglm2-6b": 6_243_584_000,
    "chatglm2-6b-32k": 6_243_584_000,
    "chatglm3-6b-32k": 6_243_584_000,
    "glm-4-9b-chat": 9_399_951_360,
    "glm-4-9b-chat-hf": 9_399_951_360,
    "GLM-4-9B-0414": 9_400_279_040,
    "glm-10b": 9_880_682_496,
    "gpt-j-6b": 6_050_882_784,
    "Qwen-7B-Chat": 7_721_324_544,
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen3-235B-A22B": 235_093_634_560,
    "gpt2": 124_439_808,
    "santacoder": 1_124_886_528,
    "starcoder": 15_517_456_384,
    "starcoder2-15b": 15_957_889_024,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b-it": 999_885_952,
    "Phi-3-mini-4k-instruct": 3_821_079_552,
    "opt-6.7b": 6_658_473_984,
    "bloom": 176_247_271_424,
    "mpt-7b": 6_649_286_656,
    "gpt-neox-20b": 20_554_567_680,
    "OLMo-2-1124-7B": 7_298_617_344,
    "c4ai-command-r-v01": 34_980_831_232,
    "internlm3-8b-instruct": 8_804_241_408,
    "gemma-3-4b-it": 3_880_263_168,  # 4,300,079,472 with the vision tower
    "gpt-oss-120b": 116_829_156_672,
}
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


def test_every_row_has_a_published_size() -> None:
    read_rows = {resolve_architecture(hf).name for hf, _ in PUBLISHED.values()} | {
        resolve_architecture(json.loads((FILES / f"{name}.json").read_text())).name for name in CHECKPOINTS
    }
    assert {row.name for row in all_architectures()} == read_rows


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
