"""Imports within the builder run in one direction: checkpoint, prequantized, conversion, plan, calibration, verification, build."""

from __future__ import annotations

import ast
from pathlib import Path

BUILDER = Path(__file__).parents[2] / "src" / "stoker" / "builder"
LEVELS = (
    ("checkpoint", "config"),
    ("prequantized", "tokenizers", "generation_config"),
    ("conversion",),
    ("recipe", "build_plan", "estimate"),
    ("prepare", "background_compile"),
    ("calibration",),
    ("verification", "write", "export"),
    ("build",),
)
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}


def imported_names(file: Path) -> set[str]:
    """The packages and modules of the builder that a file imports."""
    modules = {node.module or "" for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)}
    return {module.split(".")[2] for module in modules if module.startswith("stoker.builder.")}


def test_every_module_has_a_level() -> None:
    found = {path.stem for path in BUILDER.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert found - {"__init__"} == set(LEVEL)


def test_imports_run_downward() -> None:
    wrong = [
        f"{file.relative_to(BUILDER)} imports {name}"
        for file in sorted(BUILDER.rglob("*.py"))
        for own in [file.relative_to(BUILDER).parts[0].removesuffix(".py")]
        for name in sorted(imported_names(file) - {own})
        if LEVEL[name] >= LEVEL[own]
    ]
    assert wrong == []
