"""The log level that a deployment sets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stoker.base import logging
from stoker.cli.log_options import use_default_level


@pytest.fixture(autouse=True)
def restored_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    config = logging.current()
    monkeypatch.setenv("STOKER_LOG", "")  # restored after the test, also if the test sets it
    yield
    logging.apply(config)


def test_the_level_of_a_deployment_is_used() -> None:
    use_default_level("debug")
    assert logging.current().level == "DEBUG"


@pytest.mark.parametrize("variable", ["warning", "error"])
def test_the_level_of_the_command_line_or_environment_takes_precedence(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv("STOKER_LOG", variable)
    logging.configure()
    use_default_level("debug")
    assert logging.current().level == variable.upper()


def test_a_deployment_without_a_level_changes_nothing() -> None:
    config = logging.current()
    use_default_level(None)
    assert logging.current() == config
