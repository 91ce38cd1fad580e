"""Every weight format on several ranks: stored values are slices of those of one rank, and answers are the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import GROUPED, MOE
from oracles import hf_model
from rank_processes import LIMIT_S, Job, run_jobs

from stoker.base.config import Limits, Mapping
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.engine.reader import Engine
from stoker.quant.named_recipes import RECIPES

pytestmark = pytest.mark.timeout(LIMIT_S + 100)  # the first test of a group runs all jobs of the group

# Heads of 16 features in groups of three: shards end at multiples of 16 or 32 columns.
DENSE = GROUPED | {"hidden_size": 96, "head_dim": 16, "intermediate_size": 160}
EXPERTS = MOE | {"hidden_size": 96, "head_dim": 16, "moe_intermediate_size": 64, "num_experts": 6, "norm_topk_prob": True}
WORLDS = (
    ("one", Mapping(), 0),
    ("tp4", Mapping(tensor_parallel=4), 0),
    ("tp2pp2", Mapping(tensor_parallel=2, pipeline_parallel=2), 0),
)
GROUPS = {"WEIGHTS_ONLY_INT4": 16, "WEIGHTS_KV_INT4": 16, "AWQ": 16, "GPTQ": 16}
CHOSEN = {**{name: ("Llama", DENSE, name) for name in RECIPES if name != "NO_QUANT"}}
CHOSEN |= {f"experts {name}": ("Qwen3Moe", EXPERTS, name) for name in ("WEIGHTS_ONLY_INT4", "FP8")}
# Tolerances of logits, root mean square in standard deviations, for formats that round activations by the largest magnitude of a token. A
# rank has only its slice of the token, so its quantization steps are smaller than those of one rank. On a CPU, int8 weights round
# activations to 16 bits. A block of FP8_BLOCK is on one rank, but a sum in another order may round to the next quantized value.
ROUNDED = {"WEIGHTS_ONLY_INT8": 1e-3, "WEIGHTS_KV_INT8": 1e-2, "SMOOTH_QUANT": 0.08, "FP8": 0.15, "FP8_KV": 0.15, "experts FP8": 0.2,
           "FP8_BLOCK": 0.02}  # fmt: skip
EXACT = 3e-5  # because of the order of sums
# Tolerances in a batch with other tokens: with another order of sums, rounded activations or keys may become the next quantized value. On a
# CPU, the number of rows also determines whether int8 weights are multiplied by float32 or 16-bit activations.
BATCHED = {name: min(bound, 0.02) for name, bound in ROUNDED.items()} | {"WEIGHTS_KV_INT4": 0.02}


def settings(name: str, recipe: str, mapping: Mapping) -> dict[str, Any]:
    chosen: dict[str, Any] = {"group_size": GROUPS[recipe]} if recipe in GROUPS else {}
    if recipe == "FP8_BLOCK":
        chosen = {"rows": 16, "columns": 16}
    return {"quantization": recipe, "quantization_settings": chosen, "calibration_size": 4, "calibration_seq_len": 64, "mapping": mapping}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, letters: Path) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("formats")
    limits = Limits(max_input_len=128, max_output_len=128, max_num_tokens=512, max_batch_size=8)
    generator = torch.Generator().manual_seed(1)
    prompt, *strangers = (torch.randint(3, 90, (n,), generator=generator).tolist() for n in (21, 5, 38))
    jobs = []
    for number, (name, (family, sizes, recipe)) in enumerate(CHOSEN.items()):
        source = folder / family
        if not source.exists():
            hf_model(family, **sizes).save_pretrained(source)
        for world, mapping, first in WORLDS:
            out = folder / f"{number}{world}"
            config = BuildConfig(tokenizer=str(letters), device="cpu", dtype="float32", limits=limits, **settings(name, recipe, mapping))
            build(source, out, config, verify="none")
            jobs.append(Job(f"{name}/{world}", str(out), mapping, first, 256, prompt, strangers, 6))
    yield run_jobs(jobs, 4, folder)


@pytest.mark.parametrize("name", CHOSEN)
def test_ranks_give_the_tokens_and_logits_of_one_rank(results: dict[str, Any], name: str) -> None:
    found = {world: result for world, result in results.items() if world.startswith(f"{name}/")}
    errors = [result["error"] for result in found.values() if "error" in result]
    assert not errors, errors[0]
    assert len(found) == len(WORLDS)
    one = found.pop(f"{name}/one")
    for world, result in found.items():
        agree(one, result, ROUNDED.get(name, EXACT), world)


@pytest.mark.parametrize("name", CHOSEN)
def test_batches_chunks_and_reused_blocks_do_not_change_logits(results: dict[str, Any], name: str) -> None:
    one = results[f"{name}/one"]
    for name_of_batched, whole in (("logits", "alone"), ("again logits", "again alone")):
        assert one[name_of_batched].shape == one[whole].shape
        error = float((one[name_of_batched] - one[whole]).square().mean().sqrt() / one[whole].std())
        assert error < BATCHED.get(name, EXACT), (name_of_batched, error)


def agree(one: dict[str, Any], other: dict[str, Any], tolerance: float, world: str) -> None:
    """Equal tokens and close logits. With large tolerances, tokens may differ after a choice between close logits."""
    pairs = zip(one["tokens"], other["tokens"], strict=True)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(one["tokens"]))
    expected, actual = (result["logits"][:same] for result in (one, other))
    error = float((expected - actual).square().mean().sqrt() / expected.std())
    assert error < tolerance, world
    if same < len(one["tokens"]):
        best = one["logits"][same - 1].topk(2).values / expected.std()
        assert tolerance > 0.05 and float(best[0] - best[1]) < 4 * tolerance, world


@pytest.mark.parametrize("recipe", ["WEIGHTS_ONLY_INT4", "AWQ", "FP8_BLOCK"])
def test_group_sizes_are_reduced_to_divide_the_shards(recipe: str, tmp_path: Path, letters: Path) -> None:
    """The heads of SmolLM2 (9 × 64 features, in groups of three) do not fill groups of 128 columns on two ranks."""
    sizes = DENSE | {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "num_hidden_layers": 1, "hidden_size": 144}
    hf_model("Llama", **sizes).save_pretrained(tmp_path / "hf")
    settings = {"FP8_BLOCK": {"rows": 32, "columns": 128}}.get(recipe, {"group_size": 128})
    config = BuildConfig(
        tokenizer=str(letters), device="cpu", dtype="float32", quantization=recipe, quantization_settings=settings,
        calibration_size=2, calibration_seq_len=32, mapping=Mapping(tensor_parallel=2),
    )  # fmt: skip
    build(tmp_path / "hf", tmp_path / "engine", config, verify="files")
    out = Engine.open(tmp_path / "engine").config.recipe.overrides["layers.*.attention.out"]
    assert getattr(out, "group_size", getattr(out, "columns", None)) == 64
