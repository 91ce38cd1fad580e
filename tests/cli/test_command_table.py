"""The command tables: every row has a file, help with working examples, and is imported only when it runs."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import stoker.cli.commands
from stoker.base.config import RuntimeConfig
from stoker.base.types import SamplingParams
from stoker.cli.command_table import Command, command_group, load_command, split_docstring
from stoker.cli.commands import COMMANDS
from stoker.cli.commands.route import ROUTER_HELP, ROUTING_HELP
from stoker.cli.commands.serve import SERVER_HELP
from stoker.cli.main import SUMMARY, global_options
from stoker.cli.options import BUILD_HELP, RUNTIME_HELP, SAMPLING_HELP
from stoker.deploy.build_settings import BuildSettings
from stoker.router.core.settings import RoutingSettings
from stoker.router.settings import RouterSettings
from stoker.server.settings import ServerSettings

# Fields that are not options, with the reason.
NOT_OPTIONS = {
    BuildSettings: {},
    RuntimeConfig: {"kv_cache_dtype": "chosen when the engine is built"},
    SamplingParams: dict.fromkeys(
        ("logit_bias", "allowed_token_ids", "stop_token_ids", "bad_words", "include_stop", "skip_special_tokens", "logprobs",
         "prompt_logprobs", "beam_width",
         "length_penalty", "early_stopping", "guide"), "available in the API",
    ),
    ServerSettings: {
        "api_keys": "collected from --api-key and STOKER_API_KEY",
        "api_keys_file": "the file of --api-keys",
        "admin_key": "the file of --admin-key-file, or STOKER_ADMIN_KEY",
        "options": "set by deployment formats",
        "request_limits": "set by deployment formats for engines that are built already",
    },
    RoutingSettings: {},
    RouterSettings: {
        "replicas": "arguments",
        "api_keys": "read from the file of --api-keys",
        "replica_api_key": "read from the file of --replica-key, or STOKER_API_KEY",
        "admin_key": "read from the file of --admin-key",
        "routing": "the options of RoutingSettings",
    },
}  # fmt: skip


def run_stoker(*args: str, **environment: str) -> str:
    command = [sys.executable, "-m", "stoker", *args]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=True).stdout


def leaves(rows: tuple[Command, ...]) -> list[Command]:
    """The rows that are functions, including those of sub-tables."""
    found: list[Command] = []
    for row in rows:
        target = load_target(row)
        found += leaves(target) if isinstance(target, tuple) else [row]
    return found


def load_target(row: Command) -> Any:
    module, _, name = row.target.partition(":")
    return getattr(importlib.import_module(module), name)


each_command = pytest.mark.parametrize("row", leaves(COMMANDS), ids=lambda row: row.target.partition(":")[0].removeprefix("stoker.cli."))


def test_every_file_of_the_folder_is_a_row_and_every_row_a_file() -> None:
    folder = Path(stoker.cli.commands.__file__).parent
    files = {str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.py") if path.name != "__init__.py"}
    rows = {row.target.partition(":")[0].removeprefix("stoker.cli.commands.").replace(".", "/") for row in leaves(COMMANDS)}
    assert files == rows


def test_help_lists_every_command_with_its_example() -> None:
    shown = run_stoker("--help")
    for row in COMMANDS:
        assert row.name in shown
        assert f"$ {row.example}" in shown


@each_command
def test_help_has_examples_and_a_text_for_every_option(row: Command) -> None:
    command = load_command(row)
    description, examples = split_docstring(load_target(row))
    assert description and command.help == description
    assert examples and all(example.startswith("stoker ") for example in examples)
    assert row.example in examples
    assert command.epilog.startswith("Examples:")
    assert all(option.help for option in command.params)


@each_command
def test_examples_are_accepted_by_the_command_line(row: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every example parses: the command exists, required arguments are given, and values have the type of their option."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server.yaml").write_text("port: 8000\n")
    for example in [row.example, *split_docstring(load_target(row))[1]]:
        words = shlex.split(example.partition(" > ")[0])[1:]
        command: Any = command_group("stoker", COMMANDS, SUMMARY, global_options)
        while hasattr(command, "get_command"):
            context = command.make_context("stoker", [words[0]], resilient_parsing=True)
            command, words = command.get_command(context, words[0]), words[1:]
        command.make_context("stoker", words)


@each_command
def test_examples_are_not_wrapped_in_a_narrow_terminal(row: Command) -> None:
    command = load_command(row)
    shown = command.get_help(command.make_context(row.name, [], resilient_parsing=True, terminal_width=40)).splitlines()
    assert set(split_docstring(load_target(row))[1]) <= {line.strip() for line in shown}


def test_examples_of_a_table_are_not_wrapped() -> None:
    shown = run_stoker("bench", "--help", COLUMNS="40")
    assert "$ stoker bench latency engine --batch 1 --batch 8 --context 128 --context 1024\n" in shown


@pytest.mark.parametrize("code", ["import stoker", "from stoker.cli.main import main; main()"])
def test_help_imports_no_command_and_nothing_heavy(code: str) -> None:
    heavy = ("torch", "transformers", "fastapi", "numpy", "tokenizers", "rich.table", "prometheus_client", "huggingface_hub", "yaml")
    report = (
        "import sys, atexit\n"
        f"atexit.register(lambda: print('LOADED', [m for m in {heavy} if m in sys.modules]\n"
        " + [m for m in sys.modules if m.startswith('stoker.cli.commands.')]))"
    )
    done = subprocess.run([sys.executable, "-c", f"{report}\n{code}", "--help"], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "LOADED []", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("struct", "helps"),
    [
        (RuntimeConfig, RUNTIME_HELP),
        (SamplingParams, SAMPLING_HELP),
        (ServerSettings, SERVER_HELP),
        (BuildSettings, BUILD_HELP),
        (RoutingSettings, ROUTING_HELP),
        (RouterSettings, ROUTER_HELP),
    ],
)
def test_every_setting_is_an_option_or_has_a_reason(struct: type[msgspec.Struct], helps: dict[str, str]) -> None:
    assert set(helps) | set(NOT_OPTIONS[struct]) == set(struct.__struct_fields__)
    assert not set(helps) & set(NOT_OPTIONS[struct])


def test_readme_lists_every_top_level_command() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    listed = set(re.findall(r"^\| `stoker (\w+)", text, re.MULTILINE))
    assert listed <= {row.name for row in COMMANDS}
    assert {"build", "serve", "generate", "chat", "inspect", "package", "bench", "eval", "doctor", "demo"} <= listed
