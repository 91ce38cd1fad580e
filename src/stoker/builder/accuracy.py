"""What quantization cost: perplexity before and after on text that calibration did not see, and how often the likeliest token changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from stoker.base.errors import ConfigError, EngineError
from stoker.builder.calibrate import CheckpointSource, work_device
from stoker.builder.calibration_text import token_windows
from stoker.builder.prepare import Prepared
from stoker.distributed.group import SINGLE
from stoker.engine.reader import Engine, rank_file
from stoker.engine.source import FileSource
from stoker.engine.stream import LayerStream, Scores
from stoker.layers.loader import Loader
from stoker.quant.calibration import held_out_text
from stoker.quant.names import limit
from stoker.quant.recipe import Recipe

NUM_WINDOWS = 2
WINDOW = 512
MOST_CPU_VALUES = 2_000_000_000  # of a model that is checked on a CPU without being asked: a minute for each billion


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """The findings, as config.json keeps them."""

    perplexity_before: float = 0.0
    perplexity_after: float = 0.0
    increase: float = 0.0  # a share: 0.01 is one percent
    greedy_agreement: float = 0.0  # the share of places with the same likeliest token
    tokens: int = 0
    skipped: str = ""  # why nothing was measured


def check_accuracy(prepared: Prepared, work: Path, *, ask: bool, progress: Callable[[str, int, int], None]) -> Accuracy:
    """Compare the engine in `work` with its checkpoint. `ask`: even when that takes long.

    Raises EngineError when perplexity grew by more than the build allows.
    """
    if reason := _skip_reason(prepared, work, ask):
        return Accuracy(skipped=reason)
    length = min(WINDOW, prepared.config.model.max_positions)
    try:
        tokens = token_windows(work, held_out_text(), NUM_WINDOWS, length)
        before = _run(prepared, tokens, lambda done, total: progress("accuracy", done, 2 * total))
    except ConfigError as problem:
        return Accuracy(skipped=problem.message)
    after = _run(prepared, tokens, lambda done, total: progress("accuracy", total + done, 2 * total), work)
    found = Accuracy(
        perplexity_before=before.perplexity,
        perplexity_after=after.perplexity,
        increase=after.perplexity / before.perplexity - 1,
        greedy_agreement=before.agreement(after),
        tokens=before.count,
    )
    _refuse(prepared, found)
    return found


def _skip_reason(prepared: Prepared, work: Path, ask: bool) -> str:
    config = prepared.config
    if config.weights == "dummy":
        return "the weights are random"
    if config.mapping.world_size > 1:
        return f"the engine is spread over {config.mapping.world_size} ranks"
    if not (work / "tokenizer.json").is_file():
        return "there is no tokenizer"
    values = sum(stored.num_bytes // stored.dtype.itemsize for stored in prepared.checkpoint.weights.stored.values())
    if work_device(prepared).type == "cpu" and values > MOST_CPU_VALUES and not ask:
        return f"{values / 1e9:.1f} G parameters take long on a CPU; --verify full measures them"
    return ""


def _run(prepared: Prepared, tokens: list[Tensor], progress: Callable[[int, int], None], work: Path | None = None) -> Scores:
    """Of the checkpoint, or of the engine in `work`."""
    config, device = prepared.config, work_device(prepared)
    dtype = getattr(torch, config.dtype)
    source = CheckpointSource(prepared, device) if work is None else FileSource(work / rank_file(0), device)
    recipe = Recipe() if work is None else Engine.open(work).config.recipe
    return LayerStream(config.model, tokens).run(Loader(source, recipe, dtype, device, SINGLE), progress)


def _refuse(prepared: Prepared, found: Accuracy) -> None:
    asked, name = prepared.build.max_perplexity_increase, prepared.config.recipe.name
    most = limit(name) if asked is None else asked
    if not found.increase <= most:
        raise EngineError(
            f"{name} raises perplexity by {found.increase:.1%} ({found.perplexity_before:.2f} to {found.perplexity_after:.2f} "
            f"over {found.tokens} tokens), and {most:.1%} is allowed.",
            cure=f"Use another quantization, smaller groups, or --max-perplexity-increase {found.increase * 100 + 1:.0f}.",
        )
