"""Measures the loss of accuracy by quantization: perplexity before and after on held-out text, and changes of the most likely token."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from stoker.base.errors import ConfigError, EngineError
from stoker.builder.build_plan import BuildPlan
from stoker.builder.calibration.calibration_text import tokenize_windows
from stoker.builder.calibration.recording import CheckpointTensorSource
from stoker.builder.conversion.convert import PrecomputedTensors
from stoker.builder.conversion.layouts import stored_layouts
from stoker.distributed.group import SINGLE
from stoker.engine.config_file import rank_file_name
from stoker.engine.layerwise import LayerwiseModel, Scores
from stoker.engine.tensor_source import FileTensorSource
from stoker.layers.decoder import declare
from stoker.layers.loader import Loader
from stoker.quant.calibration.sample_text import held_out_text
from stoker.quant.format import TensorSource, TensorTable
from stoker.quant.named_recipes import max_perplexity_increase
from stoker.quant.recipe import Recipe

NUM_WINDOWS = 2
WINDOW = 512  # tokens
MAX_CPU_VALUES = 2_000_000_000  # size of a model that is measured on a CPU by default; each billion takes a minute


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """The result, as config.json stores it."""

    perplexity_before: float = 0.0
    perplexity_after: float = 0.0
    increase: float = 0.0  # fraction: 0.01 is one percent
    greedy_agreement: float = 0.0  # fraction of positions with the same most likely token
    tokens: int = 0
    skipped: str = ""  # the reason when nothing was measured


class WholeTensorSource(TensorSource):
    """The stored tensors of an engine of several ranks, not divided. They are converted again, one linear at a time."""

    def __init__(self, plan: BuildPlan, calibrated: PrecomputedTensors | None) -> None:
        self._converter = plan.converter(calibrated=calibrated)
        self._device = plan.device
        config = plan.config
        specs = declare(config.model, config.recipe.kv_cache).values()
        self._spec_by_tensor = {name: spec for spec in specs for name in stored_layouts(spec, config.recipe, plan.dtype)}
        self._converted: dict[str, Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The stored tensor called `name`. The tensors of the last linear are cached, because a loader reads them in sequence."""
        if name not in self._converted:
            self._converted = dict(self._converter.convert(self._spec_by_tensor[name]))
        return TensorTable(self._converted).get(name, shape, dtype).to(self._device)


def check_accuracy(
    plan: BuildPlan,
    work: Path,
    *,
    even_if_slow: bool,
    progress: Callable[[str, int, int], None],
    calibrated: PrecomputedTensors | None = None,
) -> Accuracy:
    """Compare the accuracy of the engine in `work` with that of its checkpoint.

    `calibrated`: the layers that calibration quantized, for several ranks. Large models are measured only on a GPU, or if `even_if_slow`.
    Raises EngineError when perplexity increased by more than the settings or the recipe allow.
    """
    if reason := _reason_to_skip(plan, work, even_if_slow):
        return Accuracy(skipped=reason)
    length = min(WINDOW, plan.config.model.max_positions)
    try:
        tokens = tokenize_windows(work, held_out_text(), NUM_WINDOWS, length)
        source = CheckpointTensorSource(plan.converter())
        before = _score(plan, Recipe(), source, tokens, lambda n, of: progress("accuracy", n, 2 * of))
    except ConfigError as problem:
        return Accuracy(skipped=problem.message)
    is_single = plan.config.mapping.world_size == 1
    stored = FileTensorSource(work / rank_file_name(0), plan.device) if is_single else WholeTensorSource(plan, calibrated)
    after = _score(plan, plan.config.recipe, stored, tokens, lambda n, of: progress("accuracy", of + n, 2 * of))
    accuracy = Accuracy(
        perplexity_before=before.perplexity,
        perplexity_after=after.perplexity,
        increase=after.perplexity / before.perplexity - 1,
        greedy_agreement=before.agreement(after),
        tokens=before.count,
    )
    _check_increase(plan, accuracy)
    return accuracy


def _reason_to_skip(plan: BuildPlan, work: Path, even_if_slow: bool) -> str:
    """Why accuracy is not measured: random weights, no tokenizer in `work`, or a model too large for a CPU unless `even_if_slow`.

    Empty if it is measured. `work` is the directory in which the engine is built.
    """
    if plan.config.weights == "dummy":
        return "the weights are random"
    if not (work / "tokenizer.json").is_file():
        return "there is no tokenizer"
    num_values = sum(info.num_bytes // info.dtype.itemsize for info in plan.checkpoint.weights.tensors.values())
    if plan.device.type == "cpu" and num_values > MAX_CPU_VALUES and not even_if_slow:
        return f"{num_values / 1e9:.1f} G parameters take long on a CPU; --verify full measures them"
    return ""


def _score(plan: BuildPlan, recipe: Recipe, source: TensorSource, tokens: list[Tensor], progress: Callable[[int, int], None]) -> Scores:
    """The scores of the model with these tensors on windows of tokens."""
    loader = Loader(source, recipe, plan.dtype, plan.device, SINGLE)
    return LayerwiseModel(plan.config.model, tokens).run(loader, progress)


def _check_increase(plan: BuildPlan, found: Accuracy) -> None:
    """Raise EngineError when perplexity is not finite, or increased by more than the settings or the recipe allow."""
    requested, name = plan.settings.max_perplexity_increase, plan.config.recipe.name
    allowed = max_perplexity_increase(name) if requested is None else requested
    if not math.isfinite(found.increase):
        raise EngineError(
            f"{name} results in an infinite or undefined perplexity ({found.perplexity_before:.4g} before, {found.perplexity_after:.4g} "
            "after).",
            cure="Use another quantization or dtype; --verify files builds without the measurement.",
        )
    if found.increase > allowed:
        raise EngineError(
            f"{name} increases perplexity by {found.increase:.1%} ({found.perplexity_before:.2f} to {found.perplexity_after:.2f} "
            f"over {found.tokens} tokens), and {allowed:.1%} is allowed.",
            cure=f"Use another quantization, smaller groups, or --max-perplexity-increase {found.increase * 100 + 1:.0f}.",
        )
