"""The page of formats by architecture is made from the tables, and its claims about quantizations are those of the build."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from stoker.base.errors import ConfigError
from stoker.builder.config import BuildConfig
from stoker.builder.prepare import prepare
from stoker.models import all_architectures
from stoker.quant.named_recipes import RECIPES

ROOT = Path(__file__).parents[2]
MATRIX = runpy.run_path(str(ROOT / "scripts" / "matrix.py"))


def test_the_page_matches_the_tables() -> None:
    text = MATRIX["markdown"]()
    assert (ROOT / "docs" / "matrix.md").read_text() == text, "run: python scripts/matrix.py > docs/matrix.md"
    assert all(text.count(f"\n| {row.name} |") == 2 for row in all_architectures())


@pytest.mark.parametrize("name", ["falcon-7b", "gpt-oss-120b", "Llama-3.1-70B-Instruct", "gemma-3-4b-it"])
def test_the_build_refuses_what_the_page_refuses(name: str, tmp_path: Path) -> None:
    file = ROOT / "tests" / "parity" / "published" / f"{name}.json"
    (tmp_path / "config.json").write_text(file.read_text())
    settings = BuildConfig(dummy_weights=True, device="cuda", compute_capability="9.0")
    model = prepare(tmp_path, settings).config.model
    assert json.loads(file.read_text())["architectures"]
    for quantization in RECIPES:
        reason = MATRIX["refusal"](model, quantization)
        with_quantization = BuildConfig(dummy_weights=True, device="cuda", compute_capability="9.0", quantization=quantization)
        if reason is None:
            assert prepare(tmp_path, with_quantization).config.recipe.name == quantization
        else:
            with pytest.raises(ConfigError):
                prepare(tmp_path, with_quantization)
