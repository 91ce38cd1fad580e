"""The texts of errors: what they quote is escaped and of limited length."""

from __future__ import annotations

from stoker.base.errors import CheckpointError, shorten


def test_control_characters_are_escaped() -> None:
    error = CheckpointError("config.json: x=\x1b[31mred\u202e\nis refused.", cure="Rename \x07 – größer.")
    assert str(error) == "config.json: x=\\x1b[31mred\\u202e\nis refused. Rename \\x07 – größer."
    assert error.message == "config.json: x=\\x1b[31mred\\u202e\nis refused."


def test_long_messages_are_cut() -> None:
    error = CheckpointError("x" * 10**6, cure="Correct it.")
    assert len(str(error)) < 4100 and " … " in str(error) and str(error).endswith("x Correct it.")


def test_values_are_shortened() -> None:
    assert shorten("a\x1b") == "'a\\x1b'"
    assert shorten("a" * 100) == "<str of length 100>"
    assert len(shorten(10**4000)) == len(shorten({"a" * 1000: 1})) == 80
