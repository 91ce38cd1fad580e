"""The calibration text that Stoker contains: public-domain prose (text/README.txt)."""

from __future__ import annotations

from importlib import resources

HELD_OUT_BYTES = 24_000  # the end of the text, for the accuracy check


def default_text() -> str:
    """The text on which a build calibrates if its options name no data."""
    return _packaged_text()[:-HELD_OUT_BYTES]


def held_out_text() -> str:
    """The part of the packaged text that default calibration does not use, for measuring perplexity."""
    return _packaged_text()[-HELD_OUT_BYTES:]


def _packaged_text() -> str:
    """The whole packaged text."""
    return resources.files("stoker.quant.calibration").joinpath("text", "text.txt").read_text(encoding="utf-8")
