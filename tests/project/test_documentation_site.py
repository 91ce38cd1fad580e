"""Figures are what the script draws, links of pages have targets, and the navigation has every page. `make docs` builds the site."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
DRAW = "import json, runpy; print(json.dumps(runpy.run_path('scripts/figures')['generated_files']()))"


def test_figures_are_what_the_script_draws() -> None:
    """Plots come from benchmarks/results: a changed result without `python scripts/figures` fails here."""
    done = subprocess.run([sys.executable, "-c", DRAW], cwd=ROOT, capture_output=True, text=True, check=True)
    drawn = json.loads(done.stdout)
    assert len(drawn) > 5
    assert [name for name, content in drawn.items() if (DOCS / name).read_text() != content] == [], "run: python scripts/figures"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page: Path) -> None:
    wrong = []
    for target, _, anchor in (link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", _without_code(page.read_text()))):
        if re.match(r"[a-z]+:", target):
            continue
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            wrong.append(f"{target}#{anchor}")
    assert wrong == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs name them."""
    headings = re.findall(r"^#+ (.+)$", _without_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


# Where a path of a page may begin, besides the root of the repository: pages about one package leave its prefix out.
FOLDERS = ("", "docs", "benchmarks/results", "src/stoker", *(f"src/stoker/{name}" for name in ("runtime", "runtime/transport", "builder")))
FOLDERS += tuple(
    f"src/stoker/{name}" for name in ("cli", "models", "server", "server/protocols", "kernels/triton", "kernels/triton/fused_layer")
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_exist(page: Path) -> None:
    """`folder/file.py` and the like. Names in capitals are placeholders."""
    named = re.findall(r"`((?:[\w.-]+/)+[\w-][\w.-]*/?)`", _without_code(page.read_text()))
    paths = [path for path in named if path.endswith(("/", ".py", ".c", ".md", ".json")) and not re.search(r"[A-Z]{4}|^engine/", path)]
    assert [path for path in paths if not any((ROOT / folder / path).exists() for folder in FOLDERS)] == []


def test_the_navigation_has_every_page() -> None:
    config = (ROOT / "mkdocs.yml").read_text()
    listed = set(re.findall(r"[\w/-]+\.md", config.split("\nnav:\n")[1]))
    from_root = {"index.md", "changelog.md", "contributing.md", "security-policy.md"}
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert {name for name in listed if name[0].islower()} == from_root | pages
