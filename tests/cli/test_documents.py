"""The documents: their tables are the code's, their commands are the command line's."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stoker.cli.main import COMMANDS, SUMMARY, group, options

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "scripts" / "tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["sagemaker.md", "openai.md", "truss.md"])
def test_tables_are_the_codes(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == tables().page(name), "run: python scripts/tables.py"


@pytest.mark.parametrize("name", ["sagemaker.md", "openai.md"])
def test_a_walkthrough_begins_with_a_command_for_a_laptop(name: str) -> None:
    first = re.match(r"# [^\n]*\n\n```sh\n(.*?)```", (ROOT / "docs" / name).read_text(), re.DOTALL)
    assert first is not None
    targets = re.findall(r"^(\w+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    command, target, *_ = first[1].split()
    assert command == "make" and target in targets


def commands(page: Path) -> list[str]:
    """Each `stoker …` of the page's shell blocks, continued lines joined, comments and redirections left out."""
    text = "\n".join(re.findall(r"```(?:sh|bash)?\n(.*?)```", page.read_text(), re.DOTALL)).replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if re.match(r"\s*stoker [a-z]", line)]


def check(line: str) -> None:
    """Raises click's own error for a command or an option that does not exist."""
    words = shlex.split(line, comments=True)[1:]
    command: Any = group("stoker", COMMANDS, SUMMARY, options)
    context = command.make_context("stoker", [words[0]], resilient_parsing=True)
    while hasattr(command, "get_command"):
        found = command.get_command(context, words[0])
        assert found is not None, f"there is no command {words[0]}"
        command, words = found, words[1:]
        context = command.make_context(words[0] if words else "", [], resilient_parsing=True)
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    used = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    assert used <= known, f"{sorted(used - known)} are no options of: {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_exist(page: Path) -> None:
    for line in commands(page):
        check(line)


def test_the_check_finds_what_is_wrong() -> None:
    for line in ("stoker serve x --prot 1", "stoker srve x", "stoker package zip x"):
        with pytest.raises(AssertionError):
            check(line)
