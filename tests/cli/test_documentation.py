"""README and docs/: generated tables are up to date, and shell commands exist; the first ones of a page run when they are copied."""

from __future__ import annotations

import importlib.util
import itertools
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stoker.cli import default_model
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


def shell_blocks(page: Path) -> list[list[str]]:
    """The lines of the page's shell blocks: fenced, or indented by four spaces after an empty line. Continued lines are joined."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$|(?<=\n\n)((?:    [^\n]*\n)+)", page.read_text(), re.MULTILINE | re.DOTALL)
    shells = [fenced or indented for language, fenced, indented in blocks if language in ("", "sh", "bash")]
    return [[line.strip() for line in text.replace("\\\n", " ").splitlines()] for text in shells]


def shown_commands(lines: list[str]) -> list[str]:
    """What runs `stoker` in the lines of a shell block: at the begin of a line, or in `$(…)`."""
    return [
        found
        for line in lines
        for found in (*re.findall(r"\$\((stoker [a-z][^)]*)\)", line), *re.findall(r"^(?:[A-Z_]+=\S* )*(stoker [a-z].*)", line))
    ]


def find_command(line: str) -> tuple[Any, list[str]]:
    """The command that `stoker …` runs, and its arguments. Raises AssertionError if it does not exist."""
    words = shlex.split(line[line.index("stoker ") :], comments=True)[1:]
    words = list(itertools.takewhile(lambda word: word not in ("&", "|", ">"), words))
    command: Any = command_group("stoker", COMMANDS, SUMMARY, global_options)
    context = command.make_context("stoker", [words[0]], resilient_parsing=True)
    while hasattr(command, "get_command"):
        found = command.get_command(context, words[0])
        assert found is not None, f"there is no command {words[0]}"
        command, words = found, words[1:]
        context = command.make_context(words[0] if words else "", [], resilient_parsing=True)
    return command, words


def check_command(line: str) -> None:
    """Raises AssertionError for a command or an option that does not exist."""
    command, words = find_command(line)
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    used = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    assert used <= known, f"{sorted(used - known)} are no options of: {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_shown_commands_and_options_exist(page: Path) -> None:
    for line in (line for block in shell_blocks(page) for line in shown_commands(block)):
        check_command(line)


# Pages of reference, which no command introduces.
WITHOUT_COMMAND = ("architectures", "compatibility", "environment", "log", "matrix", "metrics", "observability", "operations", "python")
READ = ("checkpoint", "model", "models", "trace", "tokenizer", "step_times", "api_keys")  # parameters that name something that exists
WRITTEN = ("output", "folder", "repository")  # parameters that name what the command writes
CHECKPOINT = f"~/.cache/stoker/checkpoints/{Path(default_model.MEMBER).name}"


def check_first_commands(lines: list[str]) -> None:
    """Raises AssertionError or UsageError for commands that do not run when they are copied, after the checkout's root was entered."""
    existing = {"HuggingFaceTB/SmolLM2-135M-Instruct", "$(stoker demo --engine)"}
    for line in lines:
        if " demo --engine" in line:
            existing |= {CHECKPOINT}
        existing |= {f"${name}" for name in re.findall(r"^(\w+)=\$\(", line)}
        existing |= set(re.findall(r" > (\S+)", line))
        for shown in shown_commands([line]):
            command, words = find_command(shown)
            values = command.make_context("stoker", list(words)).params
            used = [name for key in READ for name in _names(values.get(key))]
            missing = [name for name in used if name not in existing and not (ROOT / name).exists()]
            assert not missing, f"{missing} of {line!r} does not exist yet"
            existing |= {name for key in WRITTEN for name in _names(values.get(key))}
        if python := re.match(r"(?:PYTHONPATH=src )?python (?:-m pytest )?(.*?)(?:  |$)", line):
            paths = [word for word in shlex.split(python[1], comments=True) if "/" in word]
            assert paths and all((ROOT / path).exists() for path in paths if path.endswith(".py")), line
        if target := re.match(r"make ([\w-]+)", line):
            assert re.search(f"^{target[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line


def _names(value: Any) -> list[str]:
    """The paths or names in the value of a parameter."""
    return [] if value is None else [str(each) for each in value] if isinstance(value, (list, tuple)) else [str(value)]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent != ROOT and page.stem not in WITHOUT_COMMAND], ids=lambda page: page.name
)
def test_a_page_begins_with_commands_that_run(page: Path) -> None:
    start = page.read_text().split("\n## ")[0]
    blocks = shell_blocks(page)
    assert blocks and blocks[0][0] in start, "the page does not begin with a command"
    check_first_commands(blocks[0])


@pytest.mark.parametrize(
    "lines",
    [
        ["stoker serve engine"],
        ["stoker build MODEL -o engine", "stoker serve engine"],
        [f"stoker build {CHECKPOINT} -o engine"],
        ["engine=$(stoker demo --engine)", "stoker serve $engin &"],
        ["stoker route http://127.0.0.1:8001 --tokenizer engine"],
        ["echo > other.csv", "stoker simulate trace.csv --format azure --step-times other.csv"],
        ["python benchmarks/no_such_file.py"],
        ["make no-such-target"],
    ],
)
def test_the_check_of_first_commands_finds_errors(lines: list[str]) -> None:
    with pytest.raises(AssertionError):
        check_first_commands(lines)


@pytest.mark.parametrize("line", ["stoker serve x --prot 1", "stoker srve x", "stoker package zip x"])
def test_the_check_of_commands_finds_errors(line: str) -> None:
    with pytest.raises(AssertionError):
        check_command(line)
