"""The results of a build's checks, as sentences."""

from __future__ import annotations

from typing import Any

from stoker.base.errors import shorten


def describe_checks(checks: dict[str, Any]) -> dict[str, str]:
    """A sentence without a full stop for each entry of `checks` in an engine's config.json. Keys are the names of checks."""
    return {name: _describe(name, result) for name, result in checks.items()}


def _describe(name: str, result: Any) -> str:
    """The result of a check: a sentence, or the data if this version does not know it."""
    try:
        return {"greedy": _describe_greedy, "accuracy": _describe_accuracy}.get(name, str)(result)
    except (LookupError, TypeError, ValueError, AttributeError):
        return shorten(result)


def _describe_greedy(result: dict[str, Any]) -> str:
    """The result of the comparison of greedy tokens."""
    if result.get("skipped"):
        return f"Greedy tokens were not compared: {result['skipped']}"
    return f"Greedy tokens equal to the checkpoint's: {result['equal']} of {result['tokens']}"


def _describe_accuracy(result: dict[str, Any]) -> str:
    """The result of the accuracy check."""
    if result["skipped"]:
        return f"Perplexity was not measured: {result['skipped']}"
    before, after, increase = result["perplexity_before"], result["perplexity_after"], result["increase"]
    agreement = f"{result['greedy_agreement']:.1%} of the most likely tokens are the same"
    return f"Perplexity on {result['tokens']} tokens: {before:.3f} before, {after:.3f} after quantization ({increase:+.2%}); {agreement}"
