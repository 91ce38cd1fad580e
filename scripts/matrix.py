"""Prints docs/matrix.md from the tables of architectures, formats and quantizations: `python scripts/matrix.py > docs/matrix.md`."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from stoker import __version__
from stoker.base.config import Limits
from stoker.base.errors import ConfigError
from stoker.builder.checkpoint.gguf.registry import ARCHITECTURES as GGUF_ARCHITECTURES
from stoker.builder.checkpoint.tensorrt_llm.families.table import ARCHITECTURES as TENSORRT_LLM_ARCHITECTURES
from stoker.builder.checkpoint.tensorrt_llm.families.table import FAMILIES as TENSORRT_LLM_FAMILIES
from stoker.builder.conversion.shard_plan import check_shards
from stoker.builder.conversion.tensor_plan import is_computed
from stoker.builder.prequantized.methods import METHODS
from stoker.builder.recipe import is_calibrated
from stoker.core.model_config import ModelConfig
from stoker.core.specs import LinearSpec
from stoker.engine.config import CheckpointOrigin, EngineConfig
from stoker.layers.decoder import layer_specs
from stoker.models import Architecture, all_architectures, resolve_architecture
from stoker.quant.named_recipes import RECIPES, find_recipe

# The names that TensorRT-LLM writes, and the architectures that its checkpoints are read as.
TENSORRT_LLM_NAMES = {*TENSORRT_LLM_FAMILIES} | TENSORRT_LLM_ARCHITECTURES
PARITY = Path(__file__).parents[1] / "tests" / "parity"
_HEAD = """# Formats by architecture

This page is generated with `python scripts/matrix.py > docs/matrix.md`; `tests/project/test_matrix.py` compares the two. Every combination
of a row of the first table with a column, and of a row of the second with a column, works unless a note says otherwise: a checkpoint in
any format can be converted to any quantization (`stoker build --quantize NAME`), and it keeps the numbers that it stores if no quantization
is named. The combinations are tested with tiny checkpoints of each architecture (`tests/parity/test_quantized.py`,
`tests/parity/test_prequantized_rows.py`).

## Formats of checkpoints

*Hugging Face* is config.json with safetensors files or pickled tensors. *GGUF* names the values of `general.architecture` that are read,
with all [types of blocks](quantization.md#pre-quantized-checkpoints). *TensorRT-LLM* is a
[checkpoint of its tools](quantization.md#checkpoints-of-tensorrt-llm). *Pre-quantized* is the Hugging Face layout with a
`quantization_config`; methods: {methods}. Its linears are kept as they are stored, with
the exceptions in the last column: their tensors are computed from those of the checkpoint, so their values are dequantized, and the build
stores them in the engine's dtype or in the quantization that is named.

| architecture | Hugging Face | GGUF | TensorRT-LLM | pre-quantized | dequantized |
|---|---|---|---|---|---|
"""
_RECIPES = """
## Quantization by the build

The shapes of a published model of each row decide. `yes`: the weights of all linears and, where the name says so, the KV cache.

| architecture | {recipes} |
|---|{dashes}|
"""


def markdown() -> str:
    """The text of docs/matrix.md."""
    rows = sorted(all_architectures(), key=lambda row: row.name.lower())
    models = published_models()
    names = [name for name in RECIPES if name != "NO_QUANT"]
    notes: list[str] = []
    quantizations = [_quantization_row(row, models[row.name], names, notes) for row in rows]
    table = _RECIPES.format(recipes=" | ".join(f"`{name}`" for name in names), dashes="|".join("---" for _ in names))
    listed = [f"{i}. {note}" for i, note in enumerate(notes, 1)]
    parts = [_HEAD.format(methods=", ".join(f"`{name}`" for name in sorted(METHODS)))]
    parts += [_lines(_format_row(row, models[row.name]) for row in rows), table, _lines(quantizations), "\n", _lines(listed)]
    return "".join(parts)


def published_models() -> dict[str, ModelConfig]:
    """The model of the first published config of each architecture, by its name."""
    found: dict[str, ModelConfig] = {}
    files = [json.loads(file.read_text()) for file in sorted((PARITY / "published").glob("*.json"))]
    keys = [hf for hf, _ in runpy.run_path(str(PARITY / "full_size.py"))["PUBLISHED"].values()]
    for hf in [*keys, *files]:
        row = resolve_architecture(hf)
        if row.name not in found:
            found[row.name] = row.read_config(hf)
    return found


def dequantized_linears(row: Architecture, model: ModelConfig) -> list[str]:
    """The linears of a layer whose stored values cannot be kept, such as `attention.qkv`."""
    names = row.tensor_names(model)
    found: dict[str, None] = {}
    for index in _different_layers(model):
        for spec in layer_specs(model, index).values():
            if isinstance(spec, LinearSpec) and spec.quantize and is_computed(f"{spec.name}.weight", names):
                found[spec.name.removeprefix(f"layers.{index}.")] = None
    return list(found)


def refusal(model: ModelConfig, quantization: str) -> str | None:
    """Why a checkpoint of the model cannot be built with a quantization; None if it can."""
    recipe = find_recipe(quantization)
    if model.requires_whole_prompt and is_calibrated(model, recipe):
        return "Calibrated on text, which is impossible for a prefix LM, whose prompt tokens attend in both directions."
    short = msgspec.structs.replace(model, layers=tuple(model.layers[i] for i in _different_layers(model)))
    config = EngineConfig(
        stoker_version=__version__, model=short, limits=Limits(), dtype="bfloat16", recipe=recipe,
        checkpoint=CheckpointOrigin(name="", fingerprint=""),
    )  # fmt: skip
    try:
        check_shards(config)
    except ConfigError:
        return "A fused weight of the published model has parts that are not a multiple of 128 rows. Set `rows` of the format lower."
    return None


def _different_layers(model: ModelConfig) -> list[int]:
    """The indices of the first layers of each kind."""
    return [model.layers.index(layer) for layer in dict.fromkeys(model.layers)]


def _format_row(row: Architecture, model: ModelConfig) -> str:
    """A row of the table of checkpoint formats."""
    gguf = [f"`{name}`" for name in sorted(_gguf_names(row.name))]
    changed = dequantized_linears(row, model)
    tensorrt = "yes" if row.name in TENSORRT_LLM_NAMES else "–"
    return f"| {row.name} | yes | {', '.join(gguf) or '–'} | {tensorrt} | yes | {', '.join(changed) or '–'} |"


def _gguf_names(architecture: str) -> list[str]:
    """The GGUF architectures that are read as a row."""
    rows = GGUF_ARCHITECTURES.values()
    return [row.name for row in rows if any(resolve_architecture({"model_type": kind}).name == architecture for kind in row.model_types)]


def _quantization_row(row: Architecture, model: ModelConfig, names: list[str], notes: list[str]) -> str:
    """A row of the table of quantizations. New reasons of refusals are appended to `notes`."""
    cells: list[Any] = []
    for name in names:
        reason = refusal(model, name)
        if reason is not None and reason not in notes:
            notes.append(reason)
        cells.append("yes" if reason is None else f"no ({notes.index(reason) + 1})")
    return f"| {row.name} | {' | '.join(cells)} |"


def _lines(rows: Iterable[str]) -> str:
    return "".join(f"{row}\n" for row in rows)


if __name__ == "__main__":
    sys.stdout.write(markdown())
