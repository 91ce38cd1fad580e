"""The report of a simulation: throughput, latencies and cost."""

from __future__ import annotations

from array import array

import msgspec

from stoker.simulation.latencies import Latencies
from stoker.simulation.simulator import Results

PERCENTILES = (50, 90, 99)


class Report(msgspec.Struct, kw_only=True):
    """The result of a simulation. Latencies are percentiles in milliseconds."""

    requests: int
    rejected: int
    simulated_s: float
    requests_per_s: float
    output_tokens_per_s: float
    reuse_rate: float  # prompt tokens that came from the cache
    time_to_first_token_ms: dict[str, float]
    inter_token_latency_ms: dict[str, float]
    time_per_output_token_ms: dict[str, float]  # mean of a request, without its first token
    request_duration_ms: dict[str, float]
    transfers: int  # prompts that one replica computed for another one
    transfer_ms: dict[str, float]  # from the end of the prompt to the arrival of its last block
    gpus: int
    gpu_hours: float
    cost: float | None  # of the GPUs during the simulated time
    cost_per_million_output_tokens: float | None


def make_report(results: Results, num_gpus: int, gpu_hour_cost: float | None) -> Report:
    """The report about these results. `gpu_hour_cost`: the price of one GPU for one hour, in any currency."""
    seconds = max(results.end_s, 1e-9)
    hours = num_gpus * results.end_s / 3600
    cost = hours * gpu_hour_cost if gpu_hour_cost is not None else None
    per_million = cost * 1e6 / results.num_output_tokens if cost is not None and results.num_output_tokens else None
    return Report(
        requests=len(results.duration_s),
        rejected=results.num_rejected,
        simulated_s=results.end_s,
        requests_per_s=len(results.duration_s) / seconds,
        output_tokens_per_s=results.num_output_tokens / seconds,
        reuse_rate=results.num_reused_tokens / results.num_prompt_tokens if results.num_prompt_tokens else 0.0,
        time_to_first_token_ms=_percentiles(results.first_token_s),
        inter_token_latency_ms=_step_percentiles(results.between_tokens_s),
        time_per_output_token_ms=_percentiles(array("d", filter(None, results.token_s))),
        request_duration_ms=_percentiles(results.duration_s),
        transfers=len(results.transfer_s),
        transfer_ms=_percentiles(results.transfer_s),
        gpus=num_gpus,
        gpu_hours=hours,
        cost=cost,
        cost_per_million_output_tokens=per_million,
    )


def _percentiles(values: array[float]) -> dict[str, float]:
    """Percentiles in milliseconds, by the nearest rank; empty without values."""
    ordered = sorted(values)
    return {f"p{p}": 1000 * ordered[max(0, -(-len(ordered) * p // 100) - 1)] for p in PERCENTILES} if ordered else {}


def _step_percentiles(latencies: Latencies) -> dict[str, float]:
    """Percentiles in milliseconds; empty without values."""
    return {f"p{p}": 1000 * latencies.percentile(p) for p in PERCENTILES} if latencies.count else {}
