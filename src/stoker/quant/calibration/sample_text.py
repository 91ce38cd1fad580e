"""The text of default calibration: public-domain prose (text/README.txt)."""

from __future__ import annotations

from importlib import resources

HELD_OUT_BYTES = 24_000  # the end of the text, for the accuracy check


def default_text() -> str:
    """The calibration text when the build names no data."""
    return _packaged_text()[:-HELD_OUT_BYTES]


def held_out_text() -> str:
    """Text that default calibration does not use."""
    return _packaged_text()[-HELD_OUT_BYTES:]


def _packaged_text() -> str:
    return resources.files("stoker.quant.calibration").joinpath("text", "text.txt").read_text(encoding="utf-8")
