"""The wheel contains every file of the package, and its version is the one in the source."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import stoker

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), str(copy)]
    ran = subprocess.run(pip, capture_output=True, text=True, timeout=110, stdin=subprocess.DEVNULL)
    assert ran.returncode == 0, ran.stderr[-3000:]
    (built,) = folder.glob("*.whl")
    return built


def test_it_holds_all_files_of_the_package_and_nothing_else(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    expected = {
        str(path.relative_to(source))
        for path in (source / "stoker").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }  # fmt: skip
    assert packed == expected


def test_its_name_has_the_version_of_the_source(wheel: Path) -> None:
    assert wheel.name == f"stoker-{stoker.__version__}-py3-none-any.whl"


def test_no_other_file_states_the_version() -> None:
    pattern = re.compile(rf"""version["']?\s*[=:]\s*["']{re.escape(stoker.__version__)}["']""")
    places = [ROOT / "pyproject.toml", *(ROOT / "src").rglob("*.py")]
    found = [str(path.relative_to(ROOT)) for path in places if pattern.search(path.read_text().replace("__", ""))]
    assert found == ["src/stoker/__init__.py"]


def test_the_changelog_has_notes_for_this_version_or_for_the_next() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert "Unreleased" in headings or any(heading.startswith(stoker.__version__ + " ") for heading in headings)
