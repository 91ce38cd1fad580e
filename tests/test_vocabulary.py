"""The terminology of docs/glossary.md, checked in identifiers, comments, docstrings and documentation pages."""

from __future__ import annotations

import ast
import io
import keyword
import re
import tokenize
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "stoker"

# Words of identifiers, after splitting at underscores and capital letters, and the term to use instead.
IDENTIFIER_WORDS = {
    "tail": "fused_layer", "tails": "fused_layers", "ring": "pipeline", "brick": "core_matrix", "bricks": "core_matrices",
    "meeting": "grid_barrier, combine", "chained": "pdl", "lets": "pdl", "band": "skinny", "roster": "running_set",
    "rehearse": "trace", "rehearsal": "trace", "rehearsals": "traces", "blank": "dummy", "told": "reported", "heard": "measured",
    "asked": "requested, call", "ask": "request, prefetch", "kept": "retained, cached, prequantized", "distrust": "poison",
    "distrusted": "poisoned", "spoilt": "poisoned", "door": "endpoint", "doors": "endpoints", "exchange": "request_context",
    "guard": "authentication", "tally": "counter", "tallies": "counters", "few": "the range of rows", "some": "the range of rows",
    "nobody": "no thread", "multiprocessor": "sm", "multiprocessors": "sms",
}  # fmt: skip

# Patterns of prose (comments, docstrings, messages, pages) and the term to use instead.
PROSE = {
    r"\bnobody\b": "no thread, no caller",
    r"\bmanyth\b": "every n-th",
    r"\b(is|are|was|were) (told|heard)\b|\btold of\b|\bheard\b": "reported, measured",
    r"\bask(s|ed|ing)?\b": "request, requested, target",
    r"\bso many\b": "the count",
    r"\bdoors?\b": "endpoint",
    r"\bbricks?\b": "core matrix",
    r"\broster\b": "running set",
    r"\brehears\w*": "ahead-of-time trace",
    r"\bdistrust\w*|\bspoilt\b": "poisoned",
    r"\bmultiprocessors?\b": "SM",
    r"\btwo[- ]way\b": "prefix LM",
    r"\bwhat (it|they) (has|have) not\b": "absent values",
    r"\bbeats? its heart\b": "heartbeat",
    r"\btall(y|ies)\b": "counter",
    r"\bby eights\b": "in groups of 8",
    r"\bwhoever\b": "the caller",
    r"\bwherefore\b|\bthereupon\b": "because, then",
}

ANY_PROSE = re.compile("|".join(PROSE), re.IGNORECASE)
FORBIDDEN_FUNCTIONS = {"read", "load", "takes", "take", "make"}  # at module level: a name must say what is read or loaded


ROOTS = ("src/stoker", "tests", "benchmarks", "scripts", "docs")
EXEMPT = {"docs/glossary.md", "tests/test_vocabulary.py"}  # they name the rejected words


def checked_files() -> list[Path]:
    """Source files, tests and pages."""
    found = [path for root in ROOTS for ending in ("py", "c", "h", "md") for path in (ROOT / root).rglob(f"*.{ending}")]
    names = {str(path.relative_to(ROOT)): path for path in [*found, *ROOT.glob("*.md")] if "__pycache__" not in path.parts}
    return [path for name, path in sorted(names.items()) if name not in EXEMPT]


FILES = checked_files()


@cache
def words_of(identifier: str) -> set[str]:
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", identifier)
    return {word.lower() for word in spaced.split("_")}


@cache
def tokens(path: Path) -> list[tuple[int, int, str]]:
    """(type, line, text) of the names, comments and strings of a Python file."""
    kinds = {tokenize.NAME, tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    found = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return [(token.type, token.start[0], token.string) for token in found if token.type in kinds]


@cache
def identifiers(path: Path) -> frozenset[str]:
    """Every name that the file defines or uses, and its own name."""
    found = {path.stem}
    if path.suffix == ".py":
        found.update(text for kind, _, text in tokens(path) if kind == tokenize.NAME and not keyword.iskeyword(text))
    return frozenset(found)


@cache
def prose(path: Path) -> tuple[tuple[int, str], ...]:
    """(line, text) of the comments and strings of a source file, or the lines of a page outside its code blocks."""
    if path.suffix == ".py":
        return tuple((line, text) for kind, line, text in tokens(path) if kind != tokenize.NAME)
    text = path.read_text()
    if path.suffix == ".md":
        return tuple(_outside_fences(text))
    return tuple((text[: m.start()].count("\n") + 1, m.group()) for m in re.finditer(r"/\*.*?\*/|//[^\n]*", text, re.DOTALL))


@cache
def definitions(path: Path) -> list[tuple[bool, str]]:
    """(whether it is a class, name) of the classes and functions at the top level of a Python file."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [(isinstance(node, ast.ClassDef), node.name) for node in ast.parse(path.read_text()).body if isinstance(node, kinds)]


def _outside_fences(text: str) -> list[tuple[int, str]]:
    lines, fenced = [], False
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("    "):
            lines.append((number, line))
    return lines


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_identifiers_use_the_glossary() -> None:
    wrong = [
        f"{shown(path)}: {name} ({word}: use {IDENTIFIER_WORDS[word]})"
        for path in FILES
        for name in sorted(identifiers(path))
        for word in sorted(words_of(name) & set(IDENTIFIER_WORDS))
    ]
    assert wrong == []


def test_prose_uses_the_glossary() -> None:
    wrong = [
        f"{shown(path)}:{line}: {match.group()!r} (use {use})"
        for path in FILES
        for line, text in prose(path)
        if ANY_PROSE.search(text)
        for pattern, use in PROSE.items()
        for match in re.finditer(pattern, text, re.IGNORECASE)
    ]
    assert wrong == []


def test_public_class_names_are_unique_within_a_package() -> None:
    where: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path in FILES:
        if SOURCE in path.parents and path.suffix == ".py":
            package = path.relative_to(SOURCE).parts[0]
            for is_class, name in definitions(path):
                if is_class and not name.startswith("_"):
                    where[package, name].append(shown(path))
    assert {key: files for key, files in where.items() if len(files) > 1} == {}


def test_module_level_functions_say_what_they_act_on() -> None:
    wrong = [
        f"{shown(path)}: {name}"
        for path in FILES
        if SOURCE in path.parents and path.suffix == ".py"
        for is_class, name in definitions(path)
        if not is_class and name in FORBIDDEN_FUNCTIONS
    ]
    assert wrong == []
