"""The plot of what measured steps and runs reach of their theoretical floors, with the targets."""

from __future__ import annotations

from typing import Any, NamedTuple

from plots import CONTEXT, result
from svg import Drawing

WIDTH = 180  # pixels of 100 %
ROW = 21


class Bar(NamedTuple):
    """A measured value, its floor and its target, as fractions of the floor."""

    label: str
    reached: float
    target: float | None


def reached_floors() -> Drawing:
    """Fractions of the theoretical floor: decode steps on the left, runs at full load on the right."""
    left, right = _steps(), _runs()
    height = 118 + ROW * max(len(left), len(right))
    d = Drawing("Reached part of the theoretical floor", "Decode steps and runs at full load on H200s, with the targets.", 980, height)
    d.heading("H200, random weights; the line in a bar's row is the target")
    _draw(d, 24, "decode steps after 1,000 tokens: floor ÷ time", left)
    _draw(d, 504, "full load: output tokens/s ÷ floor", right)
    d.text(24, height - 14, "Floors: benchmarks/step_floor.py and benchmarks/throughput_floor.py. No line: no target.", "small soft")
    return d


def _draw(d: Drawing, x: float, heading: str, bars: list[Bar]) -> None:
    d.text(x, 66, heading, "bold")
    start, bottom = x + 172, 82 + ROW * len(bars)
    d.line((start + WIDTH, 78), (start + WIDTH, bottom), colour="grid", width=1)
    for number, bar in enumerate(bars):
        y = 82 + ROW * number
        d.text(x, y + 12, bar.label, "small")
        d.rect(start, y, round(WIDTH * bar.reached, 1), 15, "strong-blue", outline="", radius=2)
        if bar.target is not None:
            place = start + round(WIDTH * bar.target, 1)
            d.line((place, y - 2), (place, y + 17), colour="strong-rose", width=2.4)
        note = f"{bar.reached:.0%}" if bar.target is None else f"{bar.reached:.0%}, target {bar.target:.0%}"
        d.text(start + WIDTH + 14, y + 12, note, "small")


def _steps() -> list[Bar]:
    """Captured steps of one GPU, and steps through the executor of several."""
    int4_target_ms = _captured("h200_step_bf16", 32) / 2.2
    found = [
        _step("8B bfloat16, 1 row", "bfloat16", 1, _captured("h200_step_bf16", 1), 3.65),
        _step("8B bfloat16, 64 rows", "bfloat16", 64, _captured("h200_step_bf16", 64), 6.0),
        _step("8B FP8, 1 row", "FP8", 1, _captured("h200_step_fp8", 1), 2.0),
        _step("8B FP8, 64 rows", "FP8", 64, _captured("h200_step_fp8", 64), 4.0),
        _step("8B FP8_KV, 1 row", "FP8_KV", 1, _captured("h200_step_fp8_kv", 1), 2.0),
        _step("8B FP8_KV, 64 rows", "FP8_KV", 64, _captured("h200_step_fp8_kv", 64), 4.0),
        _step("8B AWQ, 1 row", "AWQ", 1, _captured("h200_step_awq", 1), 1.34),
        _step("8B AWQ, 32 rows", "AWQ", 32, _captured("h200_step_awq", 32), int4_target_ms),
        _step("1B bfloat16, 1 row", "1B bfloat16", 1, _captured("h200_step_llama1b_bf16", 1), 0.66),
        _step("Mixtral bfloat16, 1 row", "Mixtral bfloat16", 1, _captured("h200_step_mixtral_bf16", 1)),
        _step("gpt-oss-20b MXFP4, 1 row", "gpt-oss-20b MXFP4", 1, result("h200_moe")["after"]["gpt-oss-20b"]["gap"][0]["step_ms"]),
    ]
    two, eight = result("h200_new_tokens")["parts"]["70b"]["rows"], result("h200x8_engines")["rows"]
    found += [
        _step("70B FP8_KV, 2 GPUs, 1 row", "70B FP8_KV, two GPUs", 1, _engine_step(two, 1), 9.4),
        _step("70B FP8_KV, 2 GPUs, 64 rows", "70B FP8_KV, two GPUs", 64, _engine_step(two, 64), 14.5),
        _step("70B FP8_KV, 8 GPUs, 1 row", "70B FP8_KV, eight GPUs", 1, _engine_step(eight, 1)),
    ]
    return found


def _runs() -> list[Bar]:
    newest = result("h200_full_load_and_ranks")["parts"]
    bf16 = newest["bf16"]["throughput"]
    fp8_kv = newest["fp8_kv"]["throughput"] + newest["fp8_kv_more"]["throughput"]
    engines = result("h200x4_engines")["rows"]
    one, two, mixtral = (
        [row for row in engines if row["what"].startswith(what)] for what in ("70b fp8 tp1", "70b fp8 tp2", "mixtral fp8 tp2")
    )
    return [
        _run("8B bfloat16, 2048/128", "bf16", 2048, 128, 448, bf16, 2450),
        _run("8B bfloat16, 1000/1000", "bf16", 1000, 1000, 768, bf16, 10500),
        _run("8B FP8_KV, 2048/128", "FP8_KV", 2048, 128, 640, fp8_kv, 4160),
        _run("8B FP8_KV, 1000/1000", "FP8_KV", 1000, 1000, 768, fp8_kv, 20000),
        _run("8B FP8_KV, 128/128", "FP8_KV", 128, 128, 2048, fp8_kv, 32200),
        _run("8B FP8_KV, 128/2048", "FP8_KV", 128, 2048, 1024, fp8_kv, 30000),
        _run("8B FP8_KV, 2048/2048", "FP8_KV", 2048, 2048, 448, fp8_kv, 14000),
        _run("70B FP8_KV, 1000/1000", "70B FP8_KV", 1000, 1000, 212, one),
        _run("70B FP8_KV, 128/2048", "70B FP8_KV", 128, 2048, 198, one),
        _run("70B, 2 GPUs, 1000/1000", "70B FP8_KV, two GPUs", 1000, 1000, 384, newest["70b"]["rows"], 5900),
        _run("70B, 2 GPUs, 128/2048", "70B FP8_KV, two GPUs", 128, 2048, 384, two),
        _run("70B, 8 GPUs, 1000/1000", "70B FP8_KV, eight GPUs", 1000, 1000, 768, result("h200x8_engines")["rows"]),
        _run("Mixtral, 2 GPUs, 1000/1000", "Mixtral FP8_KV, two GPUs", 1000, 1000, 768, mixtral[::-1], 0.95 * 18712),
    ]


def _step(label: str, case: str, rows: int, measured_ms: float, target_ms: float | None = None) -> Bar:
    steps = next(found["steps"] for found in result("h200_step_floors")["cases"] if found["what"] == case)
    floor_ms = next(step["floor_ms"] for step in steps if step["rows"] == rows)
    return Bar(label, floor_ms / measured_ms, None if target_ms is None else floor_ms / target_ms)


def _run(label: str, case: str, isl: int, osl: int, requests: int, measured: list[dict[str, Any]], target: float | None = None) -> Bar:
    """The first of the measured runs with these lengths and number of requests: lists have the newest result first."""
    sizes = {"isl": isl, "osl": osl, "requests": requests}
    rate, floor = (
        next(row["output_tokens_per_s"] for row in rows if sizes.items() <= row.items())
        for rows in (measured, result("h200_throughput_floors")[case]["runs"])
    )
    return Bar(label, rate / floor, None if target is None else target / floor)


def _captured(name: str, rows: int) -> float:
    return next(row["ms"] for row in result(name)["results"] if (row["rows"], row["context"]) == (rows, CONTEXT))


def _engine_step(found: list[dict[str, Any]], rows: int) -> float:
    """The last measured step of `rows` rows through an executor."""
    return [row["step_ms"] for row in found if row.get("batch") == rows and "step_ms" in row][-1]
