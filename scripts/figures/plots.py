"""Plots of measured results. Every number is read from benchmarks/results/*.json, or computed from the sizes of the model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from axes import Axes, Points, draw_bars
from svg import Drawing

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BYTES_PER_S = 4.42e12  # measured read bandwidth of an H200
CONTEXT = 1000
BYTES = {"bfloat16": 2, "fp8": 1}
LENGTHS = ((128, 128), (1000, 1000), (2048, 128))
SHAPES = "Llama-3.1-8B shapes, one H200"


def result(name: str) -> Any:
    return json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())


def step_time() -> Drawing:
    """Milliseconds per decode step by batch size, with the theoretical floor and vLLM."""
    d = Drawing("Time per decode step", f"{SHAPES}: Stoker, vLLM and the theoretical floor.", 980, 424)
    d.heading(f"{SHAPES}, context of {CONTEXT:,} tokens; lower is better")
    peers = result("h200_peers")["vllm"]
    left = _step_axes(d, 66, "bfloat16: ms by batch size")
    left.curve("floor", floors("bfloat16"), "strong-grey", dash="5 4")
    left.curve("Stoker", captured_steps("h200_step_bf16"), "strong-blue")
    left.curve("vLLM 0.26", _steps(peers["bf16"]), "strong-rose")
    right = _step_axes(d, 546, "8 and 4 bits: ms by batch size")
    right.curve("floor, FP8", floors("fp8"), "strong-grey", dash="5 4")
    right.curve("Stoker, FP8", captured_steps("h200_step_fp8_kv"), "strong-blue")
    right.curve("Stoker, AWQ", captured_steps("h200_step_awq"), "strong-green")
    right.curve("vLLM 0.26, FP8", _steps(peers["fp8"]), "strong-rose")
    d.text(
        24, 394, "FP8: weights and cache. AWQ: int4 weights in groups of 128, 16-bit cache. Floor: bytes read ÷ 4.42 TB/s.", "small soft"
    )
    d.text(
        24, 411, "Stoker: captured steps (benchmarks/kernels/step.py). vLLM: whole steps at 1,032 to 1,160 tokens of context.", "small soft"
    )
    return d


def throughput() -> Drawing:
    """Output tokens per second at full load, with vLLM and TensorRT-LLM's published figures."""
    d = Drawing("Throughput at full load", f"Output tokens per second, {SHAPES}: Stoker, vLLM and TensorRT-LLM.", 980, 330)
    d.heading(f"output tokens/s by prompt and output length; {SHAPES}; higher is better")
    peers, newest = result("h200_peers"), result("h200_full_load_and_ranks")["parts"]
    prompts = [row for run in result("h200_prompt_kernels")["runs"] if run["quantization"] is None for row in run["throughput"]]
    bf16 = result("h200_llama8b_bf16")["throughput"] + prompts + result("h200_full_load_bf16")["throughput"] + newest["bf16"]["throughput"]
    two_sides = {
        "Stoker": _rates(bf16),
        "vLLM 0.26": _rates(peers["vllm"]["bf16"]["throughput"]),
    }
    runs = [row for row in result("h200x4_engines")["rows"] if row["what"] == "8b fp8 tp1" and "output_tokens_per_s" in row]
    runs += [row for run in result("h200_key_means")["engine"] for row in run["throughput"]]
    runs += result("h200_before_and_after")["engine"]["after"]["throughput"]
    runs += result("h200_full_load_decodes")["throughput"] + result("h200_full_load_prompts")["throughput"]
    runs += result("h200_full_load_fp8_kv")["after"]["throughput"]
    runs += newest["fp8_kv"]["throughput"] + newest["fp8_kv_more"]["throughput"]
    three_sides = {
        "Stoker": _rates(result("h200_llama8b_fp8")["throughput"] + runs),
        "vLLM 0.26": _rates(peers["vllm"]["fp8"]["throughput"]),
        "TensorRT-LLM, published": _rates(peers["tensorrt_llm"]["fp8"]["throughput"]),
    }
    draw_bars(d, 24, "bfloat16", two_sides, 20000)
    draw_bars(d, 504, "FP8 weights and cache", three_sides, 35000)
    return d


def fused_layer_time() -> Drawing:
    """Microseconds of the four linears of a layer by number of tokens: fused, one by one, and the floor."""
    d = Drawing("Time of a layer's four linears", f"{SHAPES}: the fused layer kernel and one launch per linear.", 980, 424)
    d.heading(f"{SHAPES}; µs by number of tokens; lower is better")
    int4 = result("h200_fused_layer_large_batch")["results"]
    left = Axes(d, 66, 84, 400, 270, (1, 2, 4, 8, 16, 32, 64), (0, 180), 20)
    left.heading("int4 in groups of 128")
    left.curve("floor", [(row["rows"], row["floor_us"]) for row in int4], "strong-grey", dash="5 4")
    left.curve("fused layer kernel", [(row["rows"], row["fused_us"]) for row in int4], "strong-blue")
    left.curve("one launch per linear", [(row["rows"], row["alone_us"]) for row in int4], "strong-rose")
    launches = result("h200_fused_layer_launches")["results"]
    right = Axes(d, 546, 84, 400, 270, (1, 2, 3, 4), (0, 180), 20)
    right.heading("bfloat16 (upper curves) and FP8 (lower curves)")
    for form, suffix in (("bfloat16", "bfloat16"), ("fp8", "FP8")):
        rows = [row for row in launches if row["form"] == form]
        right.curve(f"floor, {suffix}", [(row["rows"], row["floor_us"]) for row in rows], "strong-grey", dash="5 4")
        right.curve(f"fused, {suffix}", [(row["rows"], row["fused_us"]) for row in rows], "strong-blue")
        right.curve(f"per linear, {suffix}", [(row["rows"], row["alone_us"]) for row in rows], "strong-rose")
    d.text(24, 411, "benchmarks/kernels/fused_layer.py. Floor: bytes of the four weights ÷ 4.42 TB/s.", "small soft")
    return d


def floors(dtype: str) -> Points:
    """(batch size, ms) at which the weights and the keys and values of a step are read at the measured bandwidth."""
    model = json.loads((BENCHMARKS / "models" / "llama-3.1-8b" / "config.json").read_text())
    hidden, layers, heads, kv_heads = (
        model[f"{key}"] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    )
    head_dim = model["head_dim"]
    layer = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * model["intermediate_size"]
    weights = (layers * layer + hidden * model["vocab_size"]) * BYTES[dtype]
    row = 2 * layers * kv_heads * head_dim * CONTEXT * BYTES[dtype]
    return [(2**i, (weights + row * 2**i) / BYTES_PER_S * 1000) for i in range(7)]


def captured_steps(name: str) -> Points:
    return [(row["rows"], row["ms"]) for row in result(name)["results"] if row["context"] == CONTEXT and row["rows"] <= 64]


def _steps(peer: dict[str, Any]) -> Points:
    return [(row["batch"], row["step_ms"]) for row in peer["latency"]]


def _rates(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Prompt and output length → the best rate of them."""
    return {
        f"{isl:,} / {osl:,}": max(row["output_tokens_per_s"] for row in rows if (row["isl"], row["osl"]) == (isl, osl))
        for isl, osl in LENGTHS
    }


def _step_axes(d: Drawing, x: float, heading: str) -> Axes:
    axes = Axes(d, x, 84, 400, 258, tuple(2**i for i in range(int(math.log2(64)) + 1)), (0, 8), 2)
    axes.heading(heading)
    return axes
