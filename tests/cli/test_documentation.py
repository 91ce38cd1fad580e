"""README and docs/: generated tables are up to date, and the shell commands they show exist."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stoker.cli.command_table import command_group
from stoker.cli.commands import COMMANDS
from stoker.cli.main import SUMMARY, global_options

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def tables_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "scripts" / "tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["sagemaker.md", "openai.md", "truss.md"])
def test_generated_tables_are_up_to_date(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == tables_script().page(name), "run: python scripts/tables.py"


@pytest.mark.parametrize("name", ["sagemaker.md", "openai.md"])
def test_a_walkthrough_begins_with_a_make_target(name: str) -> None:
    first = re.match(r"# [^\n]*\n\n```sh\n(.*?)```", (ROOT / "docs" / name).read_text(), re.DOTALL)
    assert first is not None
    targets = re.findall(r"^(\w+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    command, target, *_ = first[1].split()
    assert command == "make" and target in targets


def shown_commands(page: Path) -> list[str]:
    """Each `stoker …` line of the page's shell blocks, with continued lines joined."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    text = "\n".join(block for language, block in blocks if language in ("", "sh", "bash")).replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if re.match(r"\s*stoker [a-z]", line)]


def check_command(line: str) -> None:
    """Raises AssertionError for a command or an option that does not exist."""
    words = shlex.split(line, comments=True)[1:]
    command: Any = command_group("stoker", COMMANDS, SUMMARY, global_options)
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
def test_shown_commands_and_options_exist(page: Path) -> None:
    for line in shown_commands(page):
        check_command(line)


@pytest.mark.parametrize("line", ["stoker serve x --prot 1", "stoker srve x", "stoker package zip x"])
def test_the_check_of_commands_finds_errors(line: str) -> None:
    with pytest.raises(AssertionError):
        check_command(line)
