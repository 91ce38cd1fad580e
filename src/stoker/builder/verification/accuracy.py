"""What quantization cost: perplexity before and after on text that calibration did not see, and how often the likeliest token changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from stoker.base.errors import ConfigError, EngineError
from stoker.builder.calibration.calibrate import CheckpointSource, work_device
from stoker.builder.calibration.text import token_windows
from stoker.builder.conversion.convert import Ready, convert, stored_tensors
from stoker.builder.prepare import Prepared
from stoker.distributed.group import SINGLE
from stoker.engine.layerwise import LayerStream, Scores
from stoker.engine.reader import rank_file
from stoker.engine.tensor_source import FileSource
from stoker.layers.decoder import declare
from stoker.layers.loader import Loader
from stoker.quant.calibration import TensorTable, held_out_text
from stoker.quant.format import TensorSource
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


class WholeSource(TensorSource):
    """The stored tensors of an engine of several ranks before they are cut: made again, one linear in memory at a time."""

    def __init__(self, prepared: Prepared, calibrated: Ready | None, device: torch.device) -> None:
        self.prepared, self.calibrated, self.device = prepared, calibrated, device
        config, self._dtype = prepared.config, getattr(torch, prepared.config.dtype)
        specs = declare(config.model, config.recipe.kv_cache).values()
        self._specs = {name: spec for spec in specs for name in stored_tensors(spec, config.recipe, self._dtype)}
        self._made: dict[str, Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if name not in self._made:
            prepared, config = self.prepared, self.prepared.config
            weights, recipe = prepared.checkpoint.weights, config.recipe
            spec = self._specs[name]
            made = convert(spec, prepared.makings, weights, config.model, recipe, self._dtype, self.calibrated, self.device)
            self._made = dict(made)
        return TensorTable(self._made).get(name, shape, dtype).to(self.device)


def check_accuracy(
    prepared: Prepared, work: Path, *, ask: bool, progress: Callable[[str, int, int], None], calibrated: Ready | None = None
) -> Accuracy:
    """Compare the engine in `work` with its checkpoint. `ask`: even when that takes long. `calibrated`: the layers that were measured.

    Raises EngineError when perplexity grew by more than the build allows.
    """
    if reason := _skip_reason(prepared, work, ask):
        return Accuracy(skipped=reason)
    length, device = min(WINDOW, prepared.config.model.max_positions), work_device(prepared)
    try:
        tokens = token_windows(work, held_out_text(), NUM_WINDOWS, length)
        before = _run(prepared, Recipe(), CheckpointSource(prepared, device), tokens, lambda n, of: progress("accuracy", n, 2 * of))
    except ConfigError as problem:
        return Accuracy(skipped=problem.message)
    alone = prepared.config.mapping.world_size == 1
    stored = FileSource(work / rank_file(0), device) if alone else WholeSource(prepared, calibrated, device)
    after = _run(prepared, prepared.config.recipe, stored, tokens, lambda n, of: progress("accuracy", of + n, 2 * of))
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
    if not (work / "tokenizer.json").is_file():
        return "there is no tokenizer"
    values = sum(stored.num_bytes // stored.dtype.itemsize for stored in prepared.checkpoint.weights.stored.values())
    if work_device(prepared).type == "cpu" and values > MOST_CPU_VALUES and not ask:
        return f"{values / 1e9:.1f} G parameters take long on a CPU; --verify full measures them"
    return ""


def _run(prepared: Prepared, recipe: Recipe, source: TensorSource, tokens: list[Tensor], progress: Callable[[int, int], None]) -> Scores:
    loader = Loader(source, recipe, getattr(torch, prepared.config.dtype), work_device(prepared), SINGLE)
    return LayerStream(prepared.config.model, tokens).run(loader, progress)


def _refuse(prepared: Prepared, found: Accuracy) -> None:
    asked, name = prepared.build.max_perplexity_increase, prepared.config.recipe.name
    most = limit(name) if asked is None else asked
    if not math.isfinite(found.increase):
        raise EngineError(
            f"{name} makes a model without a perplexity ({found.perplexity_before:.4g} before, {found.perplexity_after:.4g} after).",
            cure="Use another quantization or dtype; --verify files builds without the measurement.",
        )
    if found.increase > most:
        raise EngineError(
            f"{name} raises perplexity by {found.increase:.1%} ({found.perplexity_before:.2f} to {found.perplexity_after:.2f} "
            f"over {found.tokens} tokens), and {most:.1%} is allowed.",
            cure=f"Use another quantization, smaller groups, or --max-perplexity-increase {found.increase * 100 + 1:.0f}.",
        )
