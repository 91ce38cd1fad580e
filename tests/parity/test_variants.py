"""Unusual settings of every row: the logits and greedy tokens of the engine in memory equal the reference."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from cases import CASES
from harness import Harness, PlannedEngine
from proof import check_generation
from variants import VARIANTS

from stoker.base.config import Limits
from stoker.builder.config import BuildConfig
from stoker.builder.prepare import prepare
from stoker.models import all_architectures

NUM_NEW = 16
LIMITS = Limits(max_input_len=64, max_output_len=64, max_num_tokens=128, max_batch_size=4, tokens_per_block=16)


@pytest.mark.parametrize("case", VARIANTS, ids=lambda case: f"{case[0]}-{case[1].replace(' ', '_')}")
def test_logits_and_tokens_of_a_variant_equal_the_reference(case: tuple[str, str], tmp_path: Path, tokenizer: Path) -> None:
    reference = VARIANTS[case]()
    reference.save(tmp_path)
    plan = prepare(tmp_path, BuildConfig(tokenizer=str(tokenizer), device="cpu", dtype="float32", limits=LIMITS))
    assert plan.config.model.architecture == case[0]
    check_generation(Harness(PlannedEngine(plan), reference.positions), reference, NUM_NEW)


def test_every_row_has_three_unusual_variants_beside_a_plain_model() -> None:
    assert not CASES.keys() & VARIANTS.keys()
    count = Counter(row for row, _ in (*CASES, *VARIANTS))
    assert {row.name: count[row.name] for row in all_architectures() if count[row.name] < 4} == {}
