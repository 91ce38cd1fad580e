"""Compares `stoker simulate` with runs on an H200, simulates conversations behind the router, and measures the simulator.

    PYTHONPATH=src python benchmarks/simulate.py [agreement] [goodput] [conversations] [speed] [ten_minutes] [--json FILE]

The results are those in benchmarks/results/simulate.json.

agreement: the throughput runs of benchmarks/results/h200_llama8b_fp8.json, all requests of which arrive at once. The step times are of
the same file (steps of 1, 8 and 64 rows); the time of a prompt token is calibrated with the run of 2048/128 only.
Then the complete throughput runs of the 70B model on one and two H200s in h200x4_engines.json, with the step times of their files.
goodput: the runs of h200_goodput.json with the server's default settings (`simulated_goodput.py`).
conversations: 200 conversations of 8 turns (a system prompt of 200 tokens that all share, 300 tokens per turn, 100 generated) on four
replicas of an 8B and of a 70B model, with the policies prefix and round_robin, and on one replica with four times the KV cache and a
quarter of the step times. For the 70B model, once with the times of conversations_host_times.json: what the executor, the HTTP servers, the
router and the client of `conversations.py` take in addition to the steps of the model.
speed: 10,000 requests/s (500 prompt and 120 new tokens on average) on 200 replicas with 20 routers, for 20 s of simulated time: once
without common prompts (the format burstgpt) and once with common prefixes (the format mooncake).
ten_minutes: the same for 600 s with common prefixes, which take longer.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from stoker.base.cpus import num_cpus
from stoker.cli.benchmark.results import provenance
from stoker.router.core.settings import RoutingSettings
from stoker.runtime.request import Sequence
from stoker.simulation.fleet import FleetSettings, TraceSettings, simulate_fleet
from stoker.simulation.frontend import FrontendTimes
from stoker.simulation.replica import ReplicaSettings
from stoker.simulation.simulator import Results, Simulator
from stoker.simulation.step_times import StepTimes, read_step_times
from stoker.simulation.traces import Arrival

RESULTS = Path(__file__).parent / "results"
STEP_TIMES = RESULTS / "h200_llama8b_fp8_step_times.json"
MEASURED = RESULTS / "h200_llama8b_fp8.json"
ENGINES = RESULTS / "h200x4_engines.json"
HOST_TIMES = RESULTS / "conversations_host_times.json"
RATE = 10_000.0  # requests per second, of the measurement of the speed
NUM_CONVERSATIONS, NUM_TURNS, SYSTEM_TOKENS, USER_TOKENS, ANSWER_TOKENS = 200, 8, 200, 300, 100


def agreement() -> list[dict[str, Any]]:
    engines = json.loads(ENGINES.read_text())["rows"]
    complete = [run for run in engines if run["what"] in ("70b fp8 tp1", "70b fp8 tp1 load", "70b fp8 tp2") and "total_s" in run]
    rows = _agree("8b fp8 tp1", STEP_TIMES, json.loads(MEASURED.read_text())["throughput"], 1_700_000)
    # On one H200, 215 sequences of 2,000 tokens fit, and the last of 216 waited; the cache of two ranks held all sequences of its runs.
    for ranks, folder, kv_cache_tokens in ((1, "h200", 441_000), (2, "h200x2", 1_100_000)):
        runs = [run for run in complete if f"tp{ranks}" in run["what"]]
        rows += _agree(f"70b fp8 tp{ranks}", RESULTS / f"{folder}_llama70b_fp8_step_times.json", runs, kv_cache_tokens)
    return rows


def _agree(engine: str, step_times: Path, runs: list[dict[str, Any]], kv_cache_tokens: int) -> list[dict[str, Any]]:
    """Simulate the measured runs of an engine."""
    rows = []
    for run in runs:
        dice = random.Random(0)
        replica = ReplicaSettings(max_batch_size=1024, max_num_tokens=8192, kv_cache_tokens=kv_cache_tokens)
        arrivals = [Arrival(0.0, [dice.randrange(100_000) for _ in range(run["isl"])], run["osl"]) for _ in range(run["requests"])]
        started = time.process_time()
        results = Simulator(1, replica, read_step_times(step_times)).run(arrivals)
        cpu_s = time.process_time() - started
        error = results.end_s / run["total_s"] - 1
        rows.append({"engine": engine, **{key: run[key] for key in ("isl", "osl", "requests")}, "measured_s": run["total_s"],
                     "simulated_s": results.end_s, "error_percent": 100 * error, "steps": results.num_steps, "cpu_s": cpu_s})  # fmt: skip
        print("  ".join(f"{key} {value:.4g}" if key != "engine" else value for key, value in rows[-1].items()))
    return rows


def goodput() -> dict[str, Any]:
    import simulated_goodput  # imports torch, which each process of `speed` would import, too

    return simulated_goodput.compare()


def conversations() -> dict[str, Any]:
    rows = {model: _compare(read_step_times(RESULTS / f"h200_llama{model}_fp8_step_times.json")) for model in ("8b", "70b")}
    host = json.loads(HOST_TIMES.read_text())
    step_times, frontend = read_step_times(RESULTS / "h200_llama70b_fp8_step_times.json"), FrontendTimes(**host["frontend"])
    rows["70b over http"] = _compare(step_times, host["step"], frontend)
    return rows


def _compare(step_times: StepTimes, host: dict[str, float] | None = None, frontend: FrontendTimes = FrontendTimes()) -> dict[str, Any]:
    """`host`: seconds by which steps take longer than on the device, by the field of StepTimes."""
    replica = ReplicaSettings(max_batch_size=64, max_num_tokens=2048, kv_cache_tokens=256_000, overlap=False)  # as `conversations.py`
    whole = msgspec.structs.replace(replica, max_batch_size=256, max_num_tokens=8192, kv_cache_tokens=4 * replica.kv_cache_tokens)
    device = {name: value for name, value in msgspec.structs.asdict(step_times).items() if isinstance(value, float)}

    def run(num_replicas: int, replica: ReplicaSettings, factor: int, policy: str) -> dict[str, float]:
        times = StepTimes(**{name: value / factor + (host or {}).get(name, 0.0) for name, value in device.items()})
        return _summary(_converse(num_replicas, replica, times, RoutingSettings(policy=policy), frontend))

    rows: dict[str, Any] = {policy: run(4, replica, 1, policy) for policy in ("prefix", "round_robin")}
    rows["single"] = run(1, whole, 4, "prefix")
    rows["reuse_rate_of_single"] = rows["prefix"]["reuse_rate"] / rows["single"]["reuse_rate"]
    rows["first_token_of_round_robin"] = rows["prefix"]["first_token_median_ms"] / rows["round_robin"]["first_token_median_ms"]
    print(json.dumps(rows, indent=1))
    return rows


def _converse(
    num_replicas: int, replica: ReplicaSettings, step_times: StepTimes, routing: RoutingSettings, frontend: FrontendTimes
) -> Results:
    """All conversations begin within eight seconds; a user answers after one to four seconds. Both as in `conversations.py`."""
    common = random.Random(1)
    system = [common.randrange(50, 300) for _ in range(SYSTEM_TOKENS)]
    turns = dict.fromkeys(map(str, range(NUM_CONVERSATIONS)), 1)
    dice = {session: random.Random(int(session)) for session in turns}

    def words(session: str) -> list[int]:
        return [dice[session].randrange(50, 300) for _ in range(USER_TOKENS)]

    def begin() -> Iterator[Arrival]:
        for i in range(NUM_CONVERSATIONS):
            yield Arrival(i * 8 / NUM_CONVERSATIONS, system + words(str(i)), ANSWER_TOKENS, str(i))

    def follow(arrival: Arrival, seq: Sequence, now_s: float) -> Arrival | None:
        if turns[arrival.session] == NUM_TURNS:
            return None
        turns[arrival.session] += 1
        at_s = now_s + dice[arrival.session].uniform(1, 4)
        return Arrival(at_s, [*seq.tokens, *words(arrival.session)], ANSWER_TOKENS, arrival.session)

    return Simulator(num_replicas, replica, step_times, routing, frontend=frontend).run(begin(), follow)


def _summary(results: Results) -> dict[str, float]:
    return {
        "requests": len(results.duration_s),
        "reuse_rate": results.num_reused_tokens / results.num_prompt_tokens,
        "first_token_median_ms": 1000 * statistics.median(results.first_token_s),
        "first_token_p90_ms": 1000 * statistics.quantiles(results.first_token_s, n=10)[8],
        "simulated_s": results.end_s,
    }


def speed(seconds: float, formats: tuple[str, ...]) -> dict[str, Any]:
    replica = ReplicaSettings(max_batch_size=256, max_num_tokens=8192, kv_cache_tokens=400_000)
    fleet = FleetSettings(num_replicas=200, num_routers=20, replica=replica, step_times=read_step_times(STEP_TIMES))
    rows: dict[str, Any] = {"seconds": seconds, "replicas": 200, "routers": 20, "workers": num_cpus()}
    with tempfile.TemporaryDirectory() as folder:
        for trace_format in formats:
            file = Path(folder, trace_format)
            _write_trace(file, trace_format, round(seconds * RATE))
            before, started = _cpu_s(), time.perf_counter()
            results = simulate_fleet(fleet, TraceSettings(file=file, format=trace_format))
            wall_s, cpu_s, count = time.perf_counter() - started, _cpu_s() - before, len(results.duration_s)
            rows[trace_format] = {
                "requests": count, "wall_s": wall_s, "cpu_s": cpu_s, "requests_per_s": count / wall_s, "requests_per_cpu_s": count / cpu_s,
                "steps": results.num_steps, "output_tokens": results.num_output_tokens,
                "reuse_rate": results.num_reused_tokens / results.num_prompt_tokens,
                "first_token_median_ms": 1000 * statistics.median(results.first_token_s),
            }  # fmt: skip
            print(trace_format, json.dumps(rows[trace_format], indent=1))
    return rows


def _write_trace(file: Path, trace_format: str, count: int) -> None:
    """Poisson arrivals. In the format mooncake, half of the prompts begin with one of 50 prefixes of 512 tokens."""
    dice, now = random.Random(0), 0.0
    with file.open("w") as lines:
        if trace_format == "burstgpt":
            lines.write("Timestamp,Request tokens,Response tokens\n")
        for i in range(count):
            now += dice.expovariate(RATE)
            prompt, output = max(1, int(dice.gauss(500, 150))), max(1, int(dice.gauss(120, 40)))
            if trace_format == "burstgpt":
                lines.write(f"{now:.6f},{prompt},{output}\n")
            else:
                ids = [i % 100 if i % 100 < 50 else 1000 + i, *range(10**7 + 2 * i, 10**7 + 2 * i + (prompt - 1) // 512)]
                row = {"timestamp": 1000 * now, "input_length": prompt, "output_length": output, "hash_ids": ids}
                lines.write(json.dumps(row) + "\n")


def _cpu_s() -> float:
    """Processor seconds of this process and of those that it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = {
        "agreement": agreement,
        "goodput": goodput,
        "conversations": conversations,
        "speed": lambda: speed(20.0, ("burstgpt", "mooncake")),
        "ten_minutes": lambda: speed(600.0, ("mooncake",)),
    }
    parser.add_argument("kinds", nargs="*", default=list(kinds))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = json.loads(args.json.read_text()) if args.json is not None and args.json.exists() else {}
    for kind in args.kinds:
        found[kind] = kinds[kind]()
        found.setdefault("provenance", {})[kind] = provenance()
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
