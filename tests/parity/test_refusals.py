"""Checkpoints in the layout of each row with other tensors than the model has are refused by tensor name, before anything is written."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.checkpoint import open_checkpoint
from stoker.builder.checkpoint.weights import CheckpointWeights, TensorInfo
from stoker.builder.config import BuildConfig
from stoker.builder.conversion.canonical_names import CanonicalWeights
from stoker.builder.conversion.tensor_plan import TensorPlan, plan_tensors
from stoker.builder.prepare import prepare, read_model
from stoker.models import get_architecture


def test_tensors_missing_left_over_or_misshapen(saved: Path, tmp_path: Path) -> None:
    for file in saved.glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    file, tensors = tmp_path / "model.safetensors", load_file(saved / "model.safetensors")
    save_file(tensors, file)
    config = BuildConfig(device="cpu", dtype="float32")
    architecture = prepare(tmp_path, config).config.model.architecture
    victim = next(
        name
        for name in sorted(tensors)
        if re.search(r"\.1\..*(down_proj|mlp|ffn|fc2|w2|output_linear|mixer.out_proj|mixer.experts.0.up_proj).*weight$", name)
    )
    canonical = get_architecture(architecture).canonical_name(victim)

    save_file({name: tensor for name, tensor in tensors.items() if name != victim}, file)
    with pytest.raises(CheckpointError, match=rf"{re.escape(canonical)} is missing"):
        prepare(tmp_path, config)
    extra = victim.replace(".1.", ".9.", 1)
    save_file(tensors | {extra: torch.zeros(2)}, file)
    with pytest.raises(CheckpointError, match=rf"{re.escape(get_architecture(architecture).canonical_name(extra))} would not be used"):
        prepare(tmp_path, config)
    save_file(tensors | {victim: torch.zeros(tensors[victim].shape[0] + 1, *tensors[victim].shape[1:])}, file)
    with pytest.raises(CheckpointError, match=re.escape(victim)):
        prepare(tmp_path, config)


class Edited(CheckpointWeights):
    """The headers of a checkpoint with tensors added or removed."""

    def __init__(self, inner: CheckpointWeights, tensors: dict[str, TensorInfo]) -> None:
        self.inner, self.tensors, self.files = inner, tensors, inner.files

    def chunks(self, name: str) -> Iterator[Tensor]:
        yield from self.inner.chunks(name)


def test_each_tensor_is_used_or_without_effect_or_rejected(saved: Path) -> None:
    """Each tensor is removed, and a bias is added to each module without one: the plan is refused, or the tensor has no effect."""
    checkpoint = open_checkpoint(saved)
    architecture, model = read_model(checkpoint)
    tensors = checkpoint.weights.tensors

    def plan(edited: dict[str, TensorInfo]) -> dict[str, TensorPlan]:
        return plan_tensors(architecture, model, CanonicalWeights(Edited(checkpoint.weights, edited), architecture))

    def problem_of(edited: dict[str, TensorInfo]) -> str | None:
        try:
            plan(edited)
        except CheckpointError as problem:
            return problem.message
        return None

    planned = plan(tensors).values()
    used = {source for each in planned for group in each.sources for source in group}
    transformed = {source for each in planned if each.transformed for group in each.sources for source in group}
    assert used
    wrong: list[Any] = []
    num_rejected = 0
    for name, info in tensors.items():
        canonical = architecture.canonical_name(name)
        cases = {canonical: {key: value for key, value in tensors.items() if key != name}}
        bias = name.removesuffix("weight") + "bias"
        if name.endswith(".weight") and bias not in tensors:
            cases[architecture.canonical_name(bias)] = tensors | {bias: TensorInfo(info.shape[:1], info.dtype)}
        if canonical in transformed:  # without scales, the numbers of an int8 tensor are not those of a weight
            problem = problem_of(tensors | {name: TensorInfo(info.shape, torch.int8)})
            if "weights of torch.int8 are not floating-point" not in str(problem):
                wrong.append((canonical, "int8", problem))
        for changed, edited in cases.items():
            problem = problem_of(edited)
            num_rejected += problem is not None
            if problem is not None:
                named = changed in problem
            else:  # such as the weights of a vision tower
                named = changed not in used and any(fnmatch.fnmatchcase(changed, pattern) for pattern in architecture.ignored_tensors)
            if not named:
                wrong.append((changed, "removed" if changed == canonical else "added", problem))
    assert wrong == []
    assert num_rejected >= len(used)
