"""What a build verified, in sentences."""

from __future__ import annotations

from typing import Any


def sentences(checks: dict[str, Any]) -> dict[str, str]:
    """The findings of an engine's config.json, by the check's name, without a full stop."""
    tell = {"greedy": _greedy, "accuracy": _accuracy}
    return {name: tell.get(name, str)(found) for name, found in checks.items()}


def _greedy(found: dict[str, Any]) -> str:
    if found.get("skipped"):
        return f"Greedy tokens were not compared: {found['skipped']}"
    return f"Greedy tokens equal to the checkpoint's: {found['equal']} of {found['tokens']}"


def _accuracy(found: dict[str, Any]) -> str:
    if found["skipped"]:
        return f"Perplexity was not measured: {found['skipped']}"
    before, after, increase = found["perplexity_before"], found["perplexity_after"], found["increase"]
    agreement = f"{found['greedy_agreement']:.1%} of the likeliest tokens are the same"
    return f"Perplexity on {found['tokens']} tokens: {before:.3f} before, {after:.3f} after quantization ({increase:+.2%}); {agreement}"
