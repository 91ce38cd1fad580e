"""Writes docs/images/*.svg and docs/stylesheets/figures.css: run `python scripts/figures`.

A test compares the committed files with what this script writes, so plots cannot differ from `benchmarks/results`.
"""

from __future__ import annotations

from pathlib import Path

from fused_layer import fused_layer
from kv_cache import kv_cache
from placement import placement
from plots import fused_layer_time, step_time, throughput
from ray_application import ray_application
from reached import reached_floors
from request import request
from routing import routing
from scaling import scaling
from slurm_job import slurm_job
from speculation import speculation
from svg import stylesheet

from engine import engine

DOCS = Path(__file__).parents[2] / "docs"


def generated_files() -> dict[str, str]:
    """Path below docs/ → content."""
    drawings = (
        request, routing, engine, kv_cache, fused_layer, placement, step_time, throughput, reached_floors, fused_layer_time, scaling,
        speculation, ray_application, slurm_job,
    )  # fmt: skip
    figures = {f"images/{draw.__name__}.svg": draw().svg() for draw in drawings}
    return figures | {"stylesheets/figures.css": stylesheet()}


if __name__ == "__main__":
    for name, content in generated_files().items():
        (DOCS / name).write_text(content, encoding="utf-8")
