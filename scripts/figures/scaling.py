"""The plot of capacity planning: latencies of one replica by request rate, and requests served by the size of its KV cache."""

from __future__ import annotations

from axes import Axes
from plots import result
from svg import Drawing

HIGHEST_MS = 350  # of the axis; above it, the replica is overloaded


def scaling() -> Drawing:
    """Simulated latencies by request rate, and the request rate that is served by the size of the KV cache."""
    d = Drawing("Load of one replica", "Simulated: Llama-3.1-8B in FP8 on one H200.", 980, 424)
    d.heading("Llama-3.1-8B in FP8, one H200, simulated; prompts of 1,000 ± 300 tokens, answers of 200 ± 60")
    found = result("scaling")
    left = Axes(d, 66, 84, 400, 270, (10, 20, 30, 35, 40), (0, HIGHEST_MS), 50)
    left.heading("ms by requests/s")
    for label, latency, percentile, colour in (
        ("first token, p99", "ttft_ms", "p99", "strong-rose"),
        ("first token, p50", "ttft_ms", "p50", "strong-blue"),
        ("between tokens, p99", "itl_ms", "p99", "strong-green"),
    ):
        points = [(row["offered_per_s"], row[latency][percentile]) for row in found["load"] if row["ttft_ms"]["p99"] <= HIGHEST_MS]
        left.curve(label, points, colour)
    sizes = [(row["kv_cache_tokens"] / 1024, row) for row in found["memory"]]
    right = Axes(d, 546, 84, 400, 270, [size for size, _ in sizes], (0, 45), 5)
    right.heading("requests/s served of 40, by 1,024 tokens of KV cache")
    right.curve("served", [(size, row["requests_per_s"]) for size, row in sizes], "strong-blue")
    d.text(24, 411, "benchmarks/scaling.py load memory, in benchmarks/results/scaling.json.", "small soft")
    return d
