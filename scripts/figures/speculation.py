"""The plot of speculative decoding: tokens per second with and without drafts."""

from __future__ import annotations

from axes import draw_bars
from plots import result
from svg import Drawing

FORMATS = {"bf16": "bfloat16", "fp8": "FP8", "awq": "AWQ"}
SIDES = {"one token per step": "none", "four drafts, three accepted": "ngram"}


def speculation() -> Drawing:
    """Tokens per second of one and of eight sequences, with and without drafts."""
    d = Drawing("Speed with drafts", "Llama-3.1-8B shapes, one H100: tokens per second with and without drafts.", 980, 330)
    d.heading("tokens/s, Llama-3.1-8B shapes, one H100, 1,000 tokens of context; acceptance is forced, because weights are random")
    measured = result("h100_speculation")["formats"]
    for x, rows, maximum in ((24, 1, 1500), (504, 8, 6500)):
        sides = {
            label: {
                FORMATS[found["format"]]: run["value"]
                for found in measured
                for run in found["tokens_per_s"]
                if (run["rows"], run["speculate"]) == (rows, speculate)
            }
            for label, speculate in SIDES.items()
        }
        draw_bars(d, x, "one sequence" if rows == 1 else f"{rows} sequences", sides, maximum)
    return d
