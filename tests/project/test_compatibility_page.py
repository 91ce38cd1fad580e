"""docs/compatibility.md has the rows of the tests' markers, and a test run becomes its results."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
Script = Callable[[str], ModuleType]

EXAMPLE = """
import pytest

pytestmark = pytest.mark.compatibility(protocol="OpenAI", client="openai", feature="everything")

@pytest.mark.parametrize("value", [1, 2])
def test_both(value): assert value

@pytest.mark.compatibility(protocol="Truss", client="a config", version="0.9", feature="a key")
def test_config(): assert False

def test_skipped(): pytest.skip("no network")
"""


def test_the_page_has_the_rows_of_the_markers(script: Script) -> None:
    compatibility = script("compatibility")
    expected = compatibility.page(compatibility.marked_rows(), compatibility.committed())
    assert compatibility.PAGE.read_text() == expected, "run: python scripts/compatibility.py TESTS"


def test_every_row_was_run_and_passed(script: Script) -> None:
    compatibility = script("compatibility")
    results = compatibility.committed()
    assert len(results) > 10
    assert {key: text for key, text in results.items() if "passed" not in text or "failed" in text} == {}


def test_a_run_becomes_results(script: Script, tmp_path: Path) -> None:
    compatibility = script("compatibility")
    (tmp_path / "test_example.py").write_text(EXAMPLE)
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    junit = tmp_path / "junit.xml"
    options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-n", "0", f"--junitxml={junit}", "-p", "no:cacheprovider"]
    ran = subprocess.run([sys.executable, "-m", "pytest", *options, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    openai, config = compatibility.marked_rows(tmp_path)
    found = compatibility.results(junit)
    assert found[openai, compatibility.pinned_versions()["openai"]] == {"passed": 2, "failed": 1, "skipped": 1}
    assert found[config, "0.9"] == {"failed": 1}


@pytest.mark.parametrize(
    "arguments",
    [
        'protocol="OpenAI", client="openai"',
        'protocol="SOAP", client="a", feature="b"',
        'protocol="OpenAI", client=NAME, feature="b"',
        '"x"',
    ],
)
def test_markers_that_cannot_be_read_are_refused(script: Script, tmp_path: Path, arguments: str) -> None:
    (tmp_path / "test_example.py").write_text(f"import pytest\npytestmark = pytest.mark.compatibility({arguments})\n")
    with pytest.raises(ValueError, match=r"test_example\.py:2: "):
        script("compatibility").marked_rows(tmp_path)
