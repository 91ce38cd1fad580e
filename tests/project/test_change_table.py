"""The table of docs/structure.md: the files that mention an example are the files that such a change touches."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "stoker"

# Kind of change: what only its example's code contains.
EXAMPLES = {
    "architecture": r"Olmo2ForCausalLM",
    "quantization format": r"\bSmoothQuant\b|\bsmoothquant\.py",
    "scheduling policy": r'class MaxUtilization\b|(?m:^POLICIES = \("guaranteed_no_evict", "max_utilization",)',
    "draft proposer": r"\bNoDrafts\b",
    "sampling feature": r"\blogit_bias\b|\bLogitBias\b",
    "setting": r"\battention_window\b",
    "key of a deployment format": r'"option\.enable_kv_cache_reuse"',
    "deployment format": r'\bimport checkpoint\b|FORMATS\.add\("checkpoint"',
    "protocol": r"\bHealth\b",
    "kernel": r"def gated\(",
    "device": r"NVIDIA H100\b",
    "command": r"\bdef tune\(|\.tune:tune\b",
}
# Most files below src/stoker of a change, without rows in the tables of further protocols, deployment formats and tools.
ROWS_OF_OTHERS = ("server/protocols/kserve", "deploy/", "builder/prequantized/", "builder/export/", "tests/")
LIMITS = {"architecture": 1, "quantization format": 2, "scheduling policy": 2, "draft proposer": 2, "sampling feature": 4, "setting": 3}


def documented() -> dict[str, list[str]]:
    """Kind of change → files of its row."""
    table = (ROOT / "docs" / "structure.md").read_text().split("\n## What each kind of change touches\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| ")]
    return {kind: re.findall(r"`([\w/]+\.\w+|[\w/-]+\.json)`", files) for kind, _, files, _ in rows[1:]}


ROWS = documented()


def test_every_row_has_an_example() -> None:
    assert set(ROWS) == set(EXAMPLES)


@pytest.mark.parametrize("kind", ROWS)
def test_the_files_of_a_change(kind: str) -> None:
    pattern = re.compile(EXAMPLES[kind])
    sources = [path for ending in ("py", "json", "html") for path in SOURCE.rglob(f"*.{ending}")]
    found = {str(path.relative_to(SOURCE)) for path in sources if pattern.search(path.read_text())}
    assert found == {name for name in ROWS[kind] if not name.startswith("tests/")}


@pytest.mark.parametrize("kind", LIMITS)
def test_the_number_of_files(kind: str) -> None:
    rows_of_others = [name for name in ROWS[kind] if name.startswith(ROWS_OF_OTHERS)]
    assert len(ROWS[kind]) - len(rows_of_others) <= LIMITS[kind]


@pytest.mark.parametrize("kind", ROWS)
def test_the_files_exist(kind: str) -> None:
    assert [name for name in ROWS[kind] if not (SOURCE / name).exists() and not (ROOT / name).exists()] == []
