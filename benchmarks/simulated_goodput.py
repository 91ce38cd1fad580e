"""Compares the simulator with the runs of `goodput.py` on one H200. `benchmarks/simulate.py goodput` runs this, and stores the results.

    PYTHONPATH=src python benchmarks/simulated_goodput.py --record runs.json --step-times h200.json    # requests recorded by goodput.py

The committed runs (h200_goodput.json) have percentiles only; their arrivals are drawn again. The step times are those of
h200_mixed_steps.json, before (a line) and after (with padding, points and launches) a change of the attention in captured steps. Each run
is simulated once without the time of the HTTP server, and once with that of conversations_host_times.json, which was measured on another
machine. Three intervals follow, from the 5th to the 95th percentile of NUM_DRAWS simulations:

same_arrivals: each of the six processes of clients begins up to START_SPREAD_S after the first one, as they did in the measurement: they
prepare their requests before their clocks start, and no one recorded when. A repetition of the measurement differs as much at least.
step_times: the same, and what prompts add to steps is longer or shorter by a normally distributed factor. Its standard deviation is that of
the steps of h200_mixed_steps.json that were measured several times with the same code.
other_arrivals: the same number of arrivals, drawn with other seeds. Another measurement of the same load differs as much at least.

With --record, the arrivals are those that were recorded, so that there is no interval of same_arrivals. If the record has steps, their
durations are compared with the step times.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from goodput import BETWEEN_S, FIRST_S, GENERATED, PROMPT, arrivals

from stoker.cli.benchmark.results import provenance
from stoker.simulation.frontend import FrontendTimes
from stoker.simulation.replica import ReplicaSettings
from stoker.simulation.report import make_report
from stoker.simulation.simulator import Simulator
from stoker.simulation.step_times import StepTimes, read_step_times
from stoker.simulation.traces import Arrival

RESULTS = Path(__file__).parent / "results"
STEP_TIMES = RESULTS / "h200_llama8b_fp8_step_times.json"
MIXED_STEPS, GOODPUT = RESULTS / "h200_mixed_steps.json", RESULTS / "h200_goodput.json"
HOST_TIMES = RESULTS / "conversations_host_times.json"
CAPTURED = (64, 128, 256, 384, 512, 768, 1024, 1280, 1536, 2048)  # sizes of captured steps with prompts
CAPTURED_ROWS = 512
PROCESSES, ARRIVALS_S = 6, 14.0  # of the clients of h200_goodput.json
START_SPREAD_S = 0.03  # 17 to 30 ms in five trials on two cores
NUM_DRAWS = 30
RUNS = {"before": [(30.0, 1), (36.0, 2), (43.2, 3)], "after": [(43.0 / 1.2, 2), (43.0, 1)]}  # (rate, seed)


def fit_step_times(name: str) -> StepTimes:
    """The step times of an engine in h200_mixed_steps.json.

    fixed_s is that of h200_llama8b_fp8_step_times.json, and context_token_s the time of the decode attention kernel. The time of a row
    is the mean of what remains of decode steps.
    """
    measured = json.loads(MIXED_STEPS.read_text())
    rows, steps, fixed_s = measured["rows"], measured[name]["steps"], read_step_times(STEP_TIMES).fixed_s
    attention = next(k for k in measured["after"]["breakdown"]["kernels"] if k["name"] == "decode_attention_kernel")
    context_token_s = 1e-6 * attention["step_us"] / (rows * _contexts(measured["context"], measured["after"]["steps"])[-1])
    rest = [step["apart"]["decode_ms"] / 1e3 - fixed_s - context_token_s * rows * context
            for step, context in zip(steps, _contexts(measured["context"], steps), strict=False)]  # fmt: skip
    added = _fit_line(steps) if name == "before" else _fit_points(measured, name)
    return StepTimes(fixed_s=fixed_s, row_s=statistics.mean(rest) / rows, context_token_s=context_token_s, **added)


def _fit_line(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """What prompts add, as a line through all sizes.

    Captured steps of this engine computed decodes as prompts, so that their time depends on the decodes in a way that no field describes.
    For sizes that are not captured, only `series` counts: otherwise a part of the launch is not in the time of the step.
    """
    series = [(step["prompt"], step["series"]) for step in steps]
    apart = [(step["prompt"], step["apart"]) for step in steps if step["prompt"] <= 1536]
    points = [(prompt, (step["mixed_ms"] - step["decode_ms"]) / 1e3) for prompt, step in series + apart]
    return dict(zip(("prefill_token_s", "prefill_fixed_s"), statistics.linear_regression(*zip(*points, strict=True)), strict=True))


def _fit_points(measured: dict[str, Any], name: str) -> dict[str, Any]:
    """What prompts add, by the prompt tokens with padding.

    From `series`, because the device is as busy under load. Steps that are not captured are the same in all engines of the file, and
    their launch is measured in `apart`, where no step that is not captured runs meanwhile.
    """
    rows, largest, launched = measured["rows"], CAPTURED[-1], _launched(measured)
    captured = _points(
        (next(size for size in CAPTURED if size >= step["prompt"] + rows) - rows, step["series"])
        for step in measured[name]["steps"]
        if step["prompt"] + rows <= largest
    )
    points = _points((step["prompt"], step["series"]) for step in launched)
    (first, first_s), (last, last_s) = points[0], points[-1]
    return {
        "captured_tokens": CAPTURED, "captured_rows": CAPTURED_ROWS, "captured_points": captured, "prefill_points": points,
        "prefill_token_s": (last_s - first_s) / (last - first),
        "launch_s": round(statistics.mean(step["apart"]["launch_ms"] for step in launched) / 1e3, 5),
    }  # fmt: skip


def _launched(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of all engines that are not captured."""
    return [step for name in ("before", "after", "counted_on_device") for step in measured[name]["steps"]
            if step["prompt"] + measured["rows"] > CAPTURED[-1]]  # fmt: skip


def _points(steps: Iterable[tuple[int, dict[str, float]]]) -> tuple[tuple[int, float], ...]:
    """(tokens, mean seconds by which steps with prompts are longer than those without), by tokens."""
    by_tokens: dict[int, list[float]] = {}
    for tokens, step in steps:
        by_tokens.setdefault(tokens, []).append((step["mixed_ms"] - step["decode_ms"]) / 1e3)
    return tuple((tokens, round(statistics.mean(by_tokens[tokens]), 5)) for tokens in sorted(by_tokens))


def _contexts(context: int, steps: list[dict[str, Any]]) -> list[int]:
    """The mean number of tokens before each decode in the steps of each size, and after the last size. See `mixed_steps.py`."""
    found, now = [], context + 25
    for step in steps:
        apart, series = 5 * step["apart"]["steps"] + 4, step["series"]["steps"] + 4
        found.append(now + 10 + apart // 2)
        now += 10 + apart + series
    return [*found, now]


def compare() -> dict[str, Any]:
    """All committed runs."""
    measured = [run for each in json.loads(GOODPUT.read_text())["runs"] for run in each["results"] if run["server"] == "stoker"]
    step_times, deviation, rows = {name: fit_step_times(name) for name in RUNS}, repeated_deviation(), []
    for name, runs in RUNS.items():
        for rate, seed in runs:
            parts = _draw(rate, ARRIVALS_S, seed)
            run = next(run for run in measured if run["requests"] == sum(map(len, parts)))
            dice = random.Random(seed)
            starts = [[dice.uniform(0.0, START_SPREAD_S) for _ in parts] for _ in range(NUM_DRAWS)]
            same = [(_interleave(parts, offsets), step_times[name]) for offsets in starts]
            row = _simulate_run(run, _interleave(parts, [0.0] * PROCESSES), step_times[name])
            scaled = [(times, scale_prompts(step_times[name], dice.gauss(1.0, deviation))) for times, _ in same]
            rows.append(
                {
                    "step_times": name,
                    **row,
                    "intervals": row["intervals"] | {"same_arrivals": _interval(same), "step_times": _interval(scaled)},
                }
            )
            print(json.dumps(rows[-1]))
    used = {name: msgspec.structs.asdict(times) for name, times in step_times.items()}
    return {"step_times": used, "deviation_of_step_times": round(deviation, 4), "rows": rows}


def repeated_deviation() -> float:
    """The relative standard deviation of what prompts add to steps that are not captured, between measurements of the same code."""
    launched = _launched(json.loads(MIXED_STEPS.read_text()))
    by_size = [[step["series"]["mixed_ms"] - step["series"]["decode_ms"] for step in launched if step["prompt"] == size]
               for size in {step["prompt"] for step in launched}]  # fmt: skip
    return statistics.mean(statistics.stdev(times) / statistics.mean(times) for times in by_size if len(times) > 1)


def scale_prompts(times: StepTimes, factor: float) -> StepTimes:
    """Step times in which prompts take `factor` times as long."""
    points = {
        name: tuple((tokens, seconds * factor) for tokens, seconds in getattr(times, name))
        for name in ("captured_points", "prefill_points")
    }
    seconds = {name: getattr(times, name) * factor for name in ("prefill_token_s", "prefill_fixed_s")}
    return msgspec.structs.replace(times, **points, **seconds)


def compare_recorded(file: Path, step_times: StepTimes) -> list[dict[str, Any]]:
    """The runs of a record of `goodput.py`, with the arrivals of the record."""
    rows = []
    for run in json.loads(file.read_text())["runs"]:
        sent = sorted(sent_s for _, sent_s, _ in run["requests"])
        row = _simulate_run(run["row"], [at_s - sent[0] for at_s in sent], step_times)
        rows.append({**row, "steps": _compare_steps(run["steps"], step_times)})
        print(json.dumps(rows[-1]))
    return rows


def _draw(rate: float, seconds: float, seed: int) -> list[list[float]]:
    """The arrivals of each process of clients."""
    return [[at_s for at_s, _, _ in arrivals("fixed", rate / PROCESSES, seconds, seed * PROCESSES + i)] for i in range(PROCESSES)]


def _interleave(parts: list[list[float]], starts: list[float]) -> list[float]:
    """The arrivals of all processes, which begin at `starts`."""
    return sorted(start_s + at_s for part, start_s in zip(parts, starts, strict=True) for at_s in part)


def _simulate_run(run: dict[str, Any], times: list[float], step_times: StepTimes) -> dict[str, Any]:
    """A measured run with these arrivals, simulated, and the interval of the same load with other arrivals."""
    simulated = _simulate(times, step_times, FrontendTimes())
    row = {"requests_per_s": run["requests_per_s"], "measured": {key: run[key] for key in simulated}, "simulated": simulated}
    row["simulated_with_frontend"] = _simulate(times, step_times, _http_times())
    return {**row, "intervals": {"other_arrivals": _interval([(_redraw(times, 1000 + i), step_times) for i in range(NUM_DRAWS)])}}


def _redraw(times: list[float], seed: int) -> list[float]:
    """As many arrivals at random times of the same seconds."""
    dice = random.Random(seed)
    return sorted(dice.uniform(times[0], times[-1]) for _ in times)


def _http_times() -> FrontendTimes:
    return FrontendTimes(**json.loads(HOST_TIMES.read_text())["frontend_without_router"])


def _interval(draws: list[tuple[list[float], StepTimes]]) -> dict[str, Any]:
    """The 5th and the 95th percentile of each result of simulations with these arrivals and step times."""
    found = [_simulate(times, step_times, _http_times()) for times, step_times in draws]

    def bounds(values: Iterable[float]) -> list[float]:
        steps = statistics.quantiles(values, n=20, method="inclusive")
        return [round(steps[0], 3), round(steps[-1], 3)]

    latencies = {
        key: {name: bounds(each[key][name] for each in found) for name in found[0][key]} for key in ("first_token_ms", "inter_token_ms")
    }
    return {"in_time": bounds(each["in_time"] for each in found), **latencies}


def _simulate(times: list[float], step_times: StepTimes, frontend: FrontendTimes) -> dict[str, Any]:
    """The keys of a measured run, for requests that arrive at these times."""
    dice = random.Random(0)
    replica = ReplicaSettings(max_batch_size=512, max_num_tokens=8192, kv_cache_tokens=1_700_000)
    requests = [Arrival(at_s, [dice.randrange(100_000) for _ in range(PROMPT)], GENERATED) for at_s in times]
    results = Simulator(1, replica, step_times, frontend=frontend).run(requests)
    pairs = zip(results.first_token_s, results.token_s, strict=True)
    in_time = sum(first_s <= FIRST_S and token_s <= BETWEEN_S for first_s, token_s in pairs) / len(times)
    report = make_report(results, 1, None)
    simulated: dict[str, Any] = {"in_time": round(in_time, 4), "seconds": round(results.end_s, 1)}
    for key, values in (("first_token_ms", report.time_to_first_token_ms), ("inter_token_ms", report.inter_token_latency_ms)):
        simulated[key] = {name: round(value, 1) for name, value in values.items()}
    return simulated


class _Plan:
    """What StepTimes reads of a plan."""

    def __init__(self, num_decodes: int, num_new: list[int]) -> None:
        self.num_decodes, self.num_prefill_tokens = num_decodes, sum(num_new)
        self.num_context_tokens = num_decodes * (PROMPT + GENERATED // 2)  # the mean
        self.num_rows = num_decodes + len(num_new)

    def __len__(self) -> int:
        return self.num_rows


def _compare_steps(steps: list[list[Any]], step_times: StepTimes) -> dict[str, dict[str, float]]:
    """Number of recorded steps, and the mean of measured ÷ simulated time, by kind.

    Steps that are not captured are compared together with the step before, because the launch divides the time of both differently.
    `launch` is the time of that step, from which `launch_s` follows if it is longer than the step itself.
    """
    plans: list[Any] = [_Plan(num_decodes, num_new) for _, _, num_decodes, num_new in steps]
    expected = [step_times.series(plan)[0] for plan in plans]
    launches = [step_times.launch_time_s(plan) if plan.num_prefill_tokens else 0.0 for plan in plans]
    found: dict[str, list[tuple[float, float]]] = {}
    for i, (_, duration_s, _, _) in enumerate(steps):
        if launches[i]:
            if i and not launches[i - 1]:
                found.setdefault("launched", []).append((steps[i - 1][1] + duration_s, expected[i - 1] + expected[i]))
                if expected[i - 1] < 0.8 * launches[i]:
                    found.setdefault("launch", []).append((steps[i - 1][1], launches[i]))
        elif i + 1 == len(steps) or not launches[i + 1]:
            found.setdefault("captured" if plans[i].num_prefill_tokens else "decodes", []).append((duration_s, expected[i]))
    return {
        kind: {"steps": len(pairs), "ratio": round(sum(pair[0] for pair in pairs) / sum(pair[1] for pair in pairs), 3)}
        for kind, pairs in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--step-times", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = compare_recorded(args.record, read_step_times(args.step_times))
    if args.json is not None:
        args.json.write_text(json.dumps({**provenance(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
