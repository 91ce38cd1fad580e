"""Plans a fleet for 10,000 requests/s with the simulator (docs/scaling.md), without a device.

    PYTHONPATH=src python benchmarks/scaling.py [KIND ...] [--json benchmarks/results/scaling.json]
    PYTHONPATH=src python benchmarks/scaling.py trace --file trace.csv --rate 40 --seconds 60

The traces are synthetic: Poisson arrivals, prompts of 1,000 ± 300 tokens and answers of 200 ± 60 tokens (normal distributions), without
common prefixes (format burstgpt) or with them (format mooncake). The kinds, for Llama-3.1-8B in FP8 unless another model is named:

load: one replica at rising request rates. memory: one replica at 40 requests/s with less and less KV cache.
reuse: one replica at rising rates, where a part of each prompt is one of 10 common prefixes.
split: 1,000 requests/s on 25 GPUs, of which some compute prompts for the others.
fleet: 10,000 requests/s on 225 to 275 replicas behind 25 routers. routers: on 250 replicas behind 1 and 50 routers.
tensor_parallel: Llama-3.1-70B on eight GPUs, as eight replicas or as one of eight ranks.
agreement: a measured run of eight ranks, simulated.
trace: write a trace in the format burstgpt to `--file`.

The times of the HTTP server are those of conversations_host_times.json, which were measured on another machine; the router's are not
counted.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from stoker.cli.benchmark.results import provenance
from stoker.router.core.settings import RoutingSettings
from stoker.simulation.fleet import FleetSettings, TraceSettings, simulate_fleet
from stoker.simulation.frontend import FrontendTimes
from stoker.simulation.replica import ReplicaSettings
from stoker.simulation.report import make_report
from stoker.simulation.simulator import Simulator
from stoker.simulation.step_times import read_step_times
from stoker.simulation.traces import Arrival
from stoker.simulation.transfers import TransferSettings

RESULTS = Path(__file__).parent / "results"
LLAMA_8B = RESULTS / "h200_llama8b_fp8kv_step_times.json"
LLAMA_70B = {1: RESULTS / "h200_llama70b_fp8_step_times.json", 8: RESULTS / "h200x8_llama70b_fp8_tp8_step_times.json"}
KV_TOKENS_70B = {1: 200_000, 8: 4_000_000}  # of a replica
KV_BYTES_8B = 65_536  # per token, in FP8
MAX_PREFILL_LOAD = 8192  # prompt tokens that wait for a prefill replica
RATE = 10_000.0
PROMPT, ANSWER = 1000, 200  # mean tokens
SHARED_BLOCK = 512  # tokens of a hash id of the format mooncake

Row = dict[str, Any]


def write_trace(file: Path, rate: float, seconds: float, shared_blocks: int | None = None) -> None:
    """Requests of `seconds`. `shared_blocks`: the number of 512-token blocks that a prompt has in common with a tenth of the others."""
    dice, now, number = random.Random(0), 0.0, 0
    with file.open("w") as lines:
        if shared_blocks is None:
            lines.write("Timestamp,Request tokens,Response tokens\n")
        while (now := now + dice.expovariate(rate)) < seconds:
            prompt, answer = max(1, int(dice.gauss(PROMPT, 0.3 * PROMPT))), max(1, int(dice.gauss(ANSWER, 0.3 * ANSWER)))
            if shared_blocks is None:
                lines.write(f"{now:.6f},{prompt},{answer}\n")
            else:
                num_blocks, prefix = -(-prompt // SHARED_BLOCK), number % 10
                ids = [100 * prefix + i if i < shared_blocks else 10**6 + 100 * number + i for i in range(num_blocks)]
                row = {"timestamp": 1000 * now, "input_length": prompt, "output_length": answer, "hash_ids": ids}
                lines.write(json.dumps(row) + "\n")
            number += 1


def simulate(
    rate: float, seconds: float, shared_blocks: int | None = None, step_times: Path = LLAMA_8B, num_frontends: int = 1, **fleet: Any
) -> Row:
    """Simulate one fleet. `num_frontends`: processes of the HTTP server of each replica; `fleet`: fields of FleetSettings."""
    host = json.loads((RESULTS / "conversations_host_times.json").read_text())["frontend_without_router"]
    frontend = FrontendTimes(**{name: value / num_frontends for name, value in host.items()})
    replica = ReplicaSettings(max_num_tokens=2048)
    settings = FleetSettings(**{"replica": replica, **fleet}, step_times=read_step_times(step_times), frontend=frontend)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace")
        write_trace(file, rate, seconds, shared_blocks)
        started = time.perf_counter()
        results = simulate_fleet(settings, TraceSettings(file=file, format="burstgpt" if shared_blocks is None else "mooncake"))
    gpus = (settings.num_replicas + settings.num_prefill) * settings.replica.num_gpus
    report = msgspec.to_builtins(make_report(results, gpus, None))
    names = ("requests", "rejected", "simulated_s", "requests_per_s", "reuse_rate", "transfers", "gpus")
    row = {"offered_per_s": rate, "seconds": seconds} | {name: report[name] for name in names}
    for short, name in (("ttft_ms", "time_to_first_token_ms"), ("itl_ms", "inter_token_latency_ms"), ("transfer_ms", "transfer_ms")):
        row[short] = report[name]
    return row | {"wall_s": time.perf_counter() - started}


def load() -> list[Row]:
    return [simulate(rate, 120) for rate in (10, 20, 30, 35, 40, 45, 50, 60)]


def memory() -> list[Row]:
    tokens = (25_600, 51_200, 76_800, 102_400, 204_800, 409_600)
    replicas = [ReplicaSettings(max_num_tokens=2048, kv_cache_tokens=count) for count in tokens]
    return [{"kv_cache_tokens": each.kv_cache_tokens} | simulate(40, 60, replica=each) for each in replicas]


def reuse() -> list[Row]:
    return [{"shared_blocks": blocks} | simulate(rate, 60, blocks) for blocks in (0, 1) for rate in (30, 40, 50, 60, 70)]


def split() -> list[Row]:
    rows, replica = [], ReplicaSettings(max_num_tokens=2048, max_batch_size=512)  # few decode replicas need more than 256 rows
    for num_prefill in (0, 6, 10, 14, 16):
        fleet: Row = {"num_replicas": 25 - num_prefill, "num_prefill": num_prefill, "replica": replica}
        transfers = TransferSettings(kv_bytes_per_token=KV_BYTES_8B)
        routing = RoutingSettings(disaggregate_tokens=256, max_prefill_load=MAX_PREFILL_LOAD)
        fleet["num_frontends"] = 3  # one sends at most 78 answers per second, and a decode replica of the last row has 111
        rows.append({"prefill": num_prefill} | simulate(RATE / 10, 15, transfers=transfers, routing=routing, **fleet))
    return rows


def fleet() -> list[Row]:
    return [simulate(RATE, 10, num_replicas=count, num_routers=25) for count in (225, 250, 275)]


def routers() -> list[Row]:
    measured = json.loads((RESULTS / "router.json").read_text())
    cpu_s = measured["latency"]["router_cpu_ms_per_request"] / 1000 + ANSWER * measured["streams"]["router_cpu_us_per_event"] / 1e6
    return [{"routers": count, "cores": RATE * cpu_s} | simulate(RATE, 10, num_replicas=250, num_routers=count) for count in (1, 50)]


def tensor_parallel() -> list[Row]:
    rows = []
    for ranks, num_replicas in ((1, 8), (8, 1)):
        replica = ReplicaSettings(max_num_tokens=2048, kv_cache_tokens=KV_TOKENS_70B[ranks], num_gpus=ranks)
        for rate in (5, 10, 15, 20, 30, 40, 50):
            found = simulate(rate, 60, step_times=LLAMA_70B[ranks], num_replicas=num_replicas, replica=replica)
            rows.append({"tensor_parallel": ranks} | found)
    return rows


def agreement() -> Row:
    """The run of eight GPUs from which their prefill_token_s was derived: all requests at once."""
    rows = json.loads((RESULTS / "h200x8_engines.json").read_text())["rows"]
    run = next(row for row in rows if "total_s" in row)
    arrivals = [Arrival(0.0, [number] + [0] * (run["isl"] - 1), run["osl"]) for number in range(run["requests"])]
    replica = ReplicaSettings(max_batch_size=768, kv_cache_tokens=KV_TOKENS_70B[8])
    simulated_s = Simulator(1, replica, read_step_times(LLAMA_70B[8]), prefix_reuse=False).run(arrivals).end_s
    return {"measured_s": run["total_s"], "simulated_s": simulated_s, "error_percent": 100 * (simulated_s / run["total_s"] - 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    kinds: dict[str, Callable[[], Any]] = {
        each.__name__: each for each in (load, memory, reuse, split, fleet, routers, tensor_parallel, agreement)
    }
    parser.add_argument("kinds", nargs="*", default=list(kinds), metavar="KIND", help=f"{', '.join(kinds)} or trace")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--file", type=Path, default=Path("trace.csv"), help="Of the kind trace.")
    parser.add_argument("--rate", type=float, default=40.0, help="Requests per second, of the kind trace.")
    parser.add_argument("--seconds", type=float, default=60.0, help="Of the kind trace.")
    args = parser.parse_args()
    found = json.loads(args.json.read_text()) if args.json is not None and args.json.exists() else {}
    for kind in args.kinds:
        if kind == "trace":
            write_trace(args.file, args.rate, args.seconds)
            continue
        found[kind] = kinds[kind]()
        found.setdefault("provenance", {})[kind] = provenance()
        for row in found[kind] if isinstance(found[kind], list) else [found[kind]]:
            print(kind, json.dumps(row), flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
