"""Every architecture on several ranks gives the tokens of one rank: in chunks, in batches, preempted, with reused blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES
from oracles import Reference
from rank_processes import LIMIT_S, Job, run_jobs

from stoker.base.config import Limits, Mapping
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.core.model_config import MoEConfig
from stoker.engine.reader import Engine

pytestmark = pytest.mark.timeout(LIMIT_S + 100)  # the first test of a group runs all jobs of the group

NUM_NEW = 4
TOLERANCE = 2e-4  # of a logit, because sums over ranks have another order
ONE = Mapping()
# (name, mapping, process of rank 0). Two stages of two ranks cover the sharding of both, which test_rank_executors.py runs too.
WORLDS = (
    ("one", ONE, 0),
    ("tp4", Mapping(tensor_parallel=4), 0),
    ("tp2pp2", Mapping(tensor_parallel=2, pipeline_parallel=2), 0),
)
EXPERTS = ("ep4", Mapping(tensor_parallel=4, expert_parallel=True), 0)


def first_of_each_row() -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for case in CASES:
        found.setdefault(case[0], case)
    return found


# Special cases of sharding: norms per head, one KV head, tied or narrow embeddings.
SPECIAL = (
    ("LlamaForCausalLM", "tied, biased, no architectures"),
    ("CohereForCausalLM", "q/k norms"),
    ("OPTForCausalLM", "350m"),
    ("FalconForCausalLM", "40b, 180b"),
    ("BloomForCausalLM", "as first published, six heads"),
)
CHOSEN = {f"{row}-{variant}": (row, variant) for row, variant in (*first_of_each_row().values(), *SPECIAL)}


NUM_GROUPS = 4  # of architectures that run in the same four processes, so that no set-up takes a minute
GROUP_OF = {name: number * NUM_GROUPS // len(CHOSEN) for number, name in enumerate(CHOSEN)}


@pytest.fixture(scope="module")
def results_of(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Callable[[int], dict[str, Any]]:
    """Returns the results of a group of architectures by "name/world". Each group runs once."""

    @cache
    def results(group: int) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("rows")
        jobs = []
        for number, name in enumerate(name for name in CHOSEN if GROUP_OF[name] == group):
            jobs += jobs_of(name, CASES[CHOSEN[name]](), folder / str(number), tokenizer)
        return run_jobs(jobs, 4, folder)

    return results


def jobs_of(name: str, reference: Reference, folder: Path, tokenizer: Path) -> list[Job]:
    reference.save(folder / "hf")
    limits = Limits(max_input_len=reference.positions // 2, max_output_len=reference.positions // 2, max_num_tokens=512, max_batch_size=8)
    jobs = []
    worlds = list(WORLDS)
    for world, mapping, first in worlds:
        config = BuildConfig(tokenizer=str(tokenizer), device="cpu", dtype="float32", limits=limits, mapping=mapping)
        engine = build(folder / "hf", folder / world, config, verify="none")
        if world == "one" and any(isinstance(layer.mlp, MoEConfig) for layer in engine.config.model.layers):
            worlds.append(EXPERTS)
        prompt, *strangers = prompts(reference, engine)
        jobs.append(Job(f"{name}/{world}", str(folder / world), mapping, first, reference.positions, prompt, strangers, NUM_NEW))
    return jobs


def prompts(reference: Reference, engine: Engine) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    random = [torch.randint(3, min(reference.vocab, 90), (n,), generator=generator).tolist() for n in (21, 5, 38)]
    prefix = engine.config.model.prefix
    return random if prefix is None else [[*ids[:-2], prefix.mask_ids[0], prefix.start_id] for ids in random]


@pytest.mark.parametrize("name", CHOSEN)
def test_ranks_give_the_tokens_of_one_rank(results_of: Callable[[int], dict[str, Any]], name: str) -> None:
    results = results_of(GROUP_OF[name])
    found = {world: result for world, result in results.items() if world.startswith(f"{name}/")}
    errors = [result["error"] for result in found.values() if "error" in result]
    assert not errors, errors[0]
    assert len(found) >= len(WORLDS)
    one = found.pop(f"{name}/one")
    for world, result in found.items():
        assert result["tokens"] == one["tokens"] and result["again"] == one["again"], world
        assert (result["logits"] - one["logits"]).abs().max() < TOLERANCE, world
