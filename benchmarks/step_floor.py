"""The shortest time of the decode steps in docs/performance.md: the bytes that a step reads ÷ the measured bandwidth of an H200.

    PYTHONPATH=src python benchmarks/step_floor.py --json benchmarks/results/h200_step_floors.json

A step reads the weights of all linears once, of experts those that at least one token chooses, and the keys and values of every row.
Activations, norms, router, biases and the communication of ranks take no time. The first token of up to 300 tokens has the floor
of one row without keys: the weights take longer to read than to multiply.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec
from throughput_floor import Model

MODELS = Path(__file__).parent / "models"
BYTES_PER_S = 4.42e12  # measured read bandwidth of one H200
CONTEXT = 1000
INT4_128 = 0.5 + 3 / 128  # four bits, and per group of 128 a scale of two bytes and a zero of one
INT4_32 = 0.5 + 3 / 32
MXFP4 = 0.5 + 2 / 32  # four bits, and per group of 32 a scale, which is stored in one byte and read in two


class Case(msgspec.Struct, frozen=True):
    """Steps of one model in one format: bytes per weight of layers, head and experts (None: as layers), and bytes per cached value."""

    what: str
    config: str
    rows: tuple[int, ...]
    layer_bytes: float
    head_bytes: float
    cache_bytes: float
    ranks: int = 1
    expert_bytes: float | None = None

    def floor(self, rows: int) -> dict[str, float | int]:
        """Gigabytes that a step of `rows` rows reads on each rank, and its shortest time."""
        config = (MODELS / self.config / "config.json").read_bytes()
        model, window = msgspec.json.decode(config, type=Model), json.loads(config).get("sliding_window")
        experts = model.experts_read(rows) * model.expert_weights * (self.layer_bytes if self.expert_bytes is None else self.expert_bytes)
        weights = model.attention_weights * self.layer_bytes + experts + model.head_weights * self.head_bytes
        # Every second layer of gpt-oss has a window. Mixtral's config has none.
        keys = CONTEXT if window is None else (CONTEXT + window) / 2
        cache = rows * keys * model.cached_values * self.cache_bytes
        return {
            "rows": rows,
            "weights_gb": round(weights / self.ranks / 1e9, 4),
            "cache_gb": round(cache / self.ranks / 1e9, 4),
            "floor_ms": round((weights + cache) / self.ranks / BYTES_PER_S * 1000, 3),
        }


CASES = (
    Case("bfloat16", "llama-3.1-8b", (1, 2, 3, 4, 8, 32, 64), 2, 2, 2),
    Case("FP8", "llama-3.1-8b", (1, 2, 3, 4, 8, 64), 1, 1, 2),
    Case("FP8_KV", "llama-3.1-8b", (1, 2, 3, 4, 8, 64, 256), 1, 1, 1),
    Case("WEIGHTS_ONLY_INT8", "llama-3.1-8b", (1, 2, 3, 4, 8, 32, 64), 1, 1, 2),
    Case("AWQ", "llama-3.1-8b", (1, 2, 3, 4, 8, 16, 32, 64), INT4_128, 1, 2),
    Case("AWQ, int8 cache", "llama-3.1-8b", (1, 8, 32, 64), INT4_128, 1, 1),
    Case("WEIGHTS_ONLY_INT4", "llama-3.1-8b", (1, 2, 3, 4, 8, 16, 32, 64), INT4_32, 1, 2),
    Case("WEIGHTS_KV_INT4", "llama-3.1-8b", (1, 8, 32), INT4_32, 1, 1),
    Case("1B bfloat16", "llama-3.2-1b", (1, 2, 3, 4, 8), 2, 2, 2),
    Case("Mixtral bfloat16", "mixtral-8x7b", (1, 64), 2, 2, 2),
    Case("gpt-oss-20b MXFP4", "gpt-oss-20b", (1, 8, 64), 2, 2, 2, expert_bytes=MXFP4),
    Case("gpt-oss-20b bfloat16", "gpt-oss-20b", (1, 8, 64), 2, 2, 2),
    Case("Qwen3-30B-A3B MXFP4", "qwen3-30b-a3b", (1, 8, 64), 2, 2, 2, expert_bytes=MXFP4),
    Case("Qwen3-30B-A3B FP8", "qwen3-30b-a3b", (1, 8, 64), 1, 1, 2),
    Case("70B FP8_KV", "llama-3.1-70b", (1, 8, 64), 1, 1, 1),
    Case("70B FP8_KV, two GPUs", "llama-3.1-70b", (1, 2, 8, 16, 32, 64), 1, 1, 1, 2),
    Case("70B FP8_KV, four GPUs", "llama-3.1-70b", (1,), 1, 1, 1, 4),
    Case("70B FP8_KV, eight GPUs", "llama-3.1-70b", (1, 64), 1, 1, 1, 8),
    Case("bfloat16, two GPUs", "llama-3.1-8b", (1, 64), 2, 2, 2, 2),
    Case("bfloat16, four GPUs", "llama-3.1-8b", (1, 64), 2, 2, 2, 4),
)


def results() -> dict[str, Any]:
    """What the JSON file contains."""
    cases = [
        {"what": case.what, "config": case.config, "ranks": case.ranks, "steps": [case.floor(rows) for rows in case.rows]} for case in CASES
    ]
    return {"bytes_per_s": BYTES_PER_S, "context": CONTEXT, "cases": cases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = results()
    for case in found["cases"]:
        print(case["what"], *(f"{step['rows']}: {step['floor_ms']} ms" for step in case["steps"]), sep="  ")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
