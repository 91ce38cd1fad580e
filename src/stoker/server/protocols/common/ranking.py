"""Ranking of the choices of best_of."""

from __future__ import annotations

from stoker.frontend.service import Choice


def mean_logprob(choice: Choice) -> float:
    """The mean log-probability per token. OpenAI's API ranks choices by it, highest first."""
    return sum(entry.logprob for entry in choice.logprobs) / max(1, len(choice.logprobs))
