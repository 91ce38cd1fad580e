"""`stoker simulate`: simulates a fleet of replicas with a trace of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from stoker.base.errors import ConfigError
from stoker.cli.commands.route import ROUTING_HELP
from stoker.cli.options import struct_options
from stoker.router.core.settings import RoutingSettings
from stoker.simulation.fleet import FleetSettings, TraceSettings, simulate_fleet
from stoker.simulation.frontend import FrontendTimes
from stoker.simulation.replica import ReplicaSettings
from stoker.simulation.report import Report, make_report
from stoker.simulation.step_times import read_step_times
from stoker.simulation.traces import FORMATS
from stoker.simulation.transfers import TransferSettings

# Field of ReplicaSettings: help text of its option.
REPLICA_HELP = {
    "max_batch_size": "Sequences in one step of a replica.",
    "max_num_tokens": "Tokens in one step of a replica.",
    "kv_cache_tokens": "Token positions of the KV cache of a replica.",
    "tokens_per_block": "Token positions of a block: 16, 32, 64 or 128.",
    "overlap": "Schedule the next step while the current one runs, as a server with a GPU.",
    "target_itl_ms": "Target of the inter-token latency in milliseconds, as of `stoker serve`.",
    "target_ttft_ms": "Target of the time to the first token in milliseconds, as of `stoker serve`.",
    "num_gpus": "GPUs of one replica, for the cost. Their effect on the time of a step is in --step-times.",
}
# Field of TransferSettings: help text of its option.
TRANSFER_HELP = {
    "kv_bytes_per_token": "Bytes of keys and values of one token in all layers.",
    "transfer_gb_per_s": "Bandwidth with which the blocks of a prefill replica are read, in 10⁹ bytes per second.",
    "transfer_latency_ms": "Milliseconds of a transfer in addition to the time of its bytes.",
}
# Field of FrontendTimes: help text of its option.
FRONTEND_HELP = {
    "frontend_request_ms": "Milliseconds from a client through router and HTTP server to the executor, without other requests.",
    "frontend_first_token_ms": "Milliseconds from the end of a step to the client that receives its first token.",
    "frontend_token_us": "Microseconds of router and HTTP server per streamed token.",
}
SIMULATED = (
    "policy",
    "decode_cost",
    "session_bonus",
    "disaggregate_tokens",
    "max_prefill_load",
)  # settings of the router that have an effect


@struct_options(RoutingSettings, "routing", {name: ROUTING_HELP[name] for name in SIMULATED})
@struct_options(FrontendTimes, "frontend", FRONTEND_HELP)
@struct_options(TransferSettings, "transfers", TRANSFER_HELP)
@struct_options(ReplicaSettings, "replica", REPLICA_HELP)
def simulate(
    trace: Annotated[Path, typer.Argument(help="A file with the requests.")],
    step_times: Annotated[Path, typer.Option(help="A JSON file with the measured times of a step: fixed_s, row_s and others.")],
    trace_format: Annotated[
        str, typer.Option("--format", help=f"Format of the trace: {', '.join(FORMATS[:-1])} or {FORMATS[-1]}.")
    ] = "mooncake",
    replicas: Annotated[int, typer.Option(help="Number of replicas that generate answers.")] = 1,
    prefill_replicas: Annotated[int, typer.Option(help="Number of further replicas, which compute long prompts for the others.")] = 0,
    routers: Annotated[int, typer.Option(help="Number of routers. Each has its part of the replicas, and gets the requests in turn.")] = 1,
    rate: Annotated[float, typer.Option(help="Factor of the request rate: 2 halves the times between arrivals.")] = 1.0,
    max_requests: Annotated[int | None, typer.Option(help="Simulate only the first requests of the trace.")] = None,
    workers: Annotated[
        int | None, typer.Option(help="Number of processes that simulate, at most one per router. By default, one per CPU.")
    ] = None,
    gpu_hour_cost: Annotated[float | None, typer.Option(help="Price of one GPU for one hour, in any currency.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    *,
    replica: ReplicaSettings,
    transfers: TransferSettings,
    frontend: FrontendTimes,
    routing: RoutingSettings,
) -> None:
    """Predict throughput, latencies and cost of a fleet behind `stoker route`, without a device.

    The scheduler, the KV cache manager and the router are the real ones; a step takes the time that --step-times states.

    Examples:

      stoker simulate trace.jsonl --step-times step_times.json --replicas 4 --gpu-hour-cost 3

      stoker simulate trace.jsonl --step-times step_times.json --replicas 3 --prefill-replicas 1 --transfer-gb-per-s 200

      stoker simulate AzureLLMInferenceTrace_conv.csv --format azure --step-times step_times.json --rate 2 --json
    """
    if gpu_hour_cost is not None and not 0 <= gpu_hour_cost <= 1e6:
        raise ConfigError(f"gpu_hour_cost={gpu_hour_cost} is refused.", cure="Use a price from 0 to 1000000.")
    if not prefill_replicas:
        _refuse_transfers(transfers, routing)
    fleet = FleetSettings(
        num_replicas=replicas,
        num_prefill=prefill_replicas,
        num_routers=routers,
        replica=replica,
        step_times=read_step_times(step_times),
        routing=routing,
        transfers=transfers,
        frontend=frontend,
    )
    requests = TraceSettings(file=trace, format=trace_format, rate=rate, max_requests=max_requests)
    results = simulate_fleet(fleet, requests, workers)
    report = make_report(results, (replicas + prefill_replicas) * replica.num_gpus, gpu_hour_cost)
    if not report.requests + report.rejected:
        raise ConfigError(f"trace={trace} contains no request.", cure="Name a file with one request a line.")
    if not report.requests:
        raise ConfigError(
            f"kv_cache_tokens={replica.kv_cache_tokens} is refused: no request fits, and the longest one has {results.longest_rejected} "
            "tokens with its answer.",
            cure="Raise it.",
        )
    typer.echo(msgspec.json.encode(report).decode() if as_json else _table(report))


def _refuse_transfers(transfers: TransferSettings, routing: RoutingSettings) -> None:
    """Raise ConfigError for a setting of transfers, which has no effect without prefill replicas."""
    for name in (*TRANSFER_HELP, "disaggregate_tokens", "max_prefill_load"):
        settings, default = (transfers, TransferSettings()) if name in TRANSFER_HELP else (routing, RoutingSettings())
        if (value := getattr(settings, name)) != getattr(default, name):
            raise ConfigError(f"{name}={value} has no effect without prefill replicas.", cure="Add --prefill-replicas, or leave it out.")


def _table(report: Report) -> str:
    """The report as text."""
    from stoker.cli.output.tables import aligned_columns

    def shown(values: dict[str, float]) -> str:
        return "  ".join(f"{name} {value:,.1f}" for name, value in values.items()) + " ms" if values else "-"

    rows = [
        ("requests", f"{report.requests:,}" + (f", {report.rejected:,} rejected" if report.rejected else "")),
        ("simulated time", f"{report.simulated_s:,.1f} s"),
        ("throughput", f"{report.requests_per_s:,.2f} requests/s, {report.output_tokens_per_s:,.0f} output tokens/s"),
        ("prompt tokens reused", f"{100 * report.reuse_rate:.1f} %"),
        ("time to first token", shown(report.time_to_first_token_ms)),
        ("inter-token latency", shown(report.inter_token_latency_ms)),
        ("time per output token", shown(report.time_per_output_token_ms)),
        ("request duration", shown(report.request_duration_ms)),
        *([("transfers", f"{report.transfers:,}, {shown(report.transfer_ms)}")] if report.transfers else []),
        ("GPUs", f"{report.gpus:,}, {report.gpu_hours:,.2f} hours"),
    ]
    if report.cost is not None and report.cost_per_million_output_tokens is not None:
        rows.append(("cost", f"{report.cost:,.2f}, {report.cost_per_million_output_tokens:,.2f} per million output tokens"))
    return "\n".join(aligned_columns(("", ""), rows)).strip("\n")
