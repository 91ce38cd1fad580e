"""Incomplete checkpoints in the layout of each row are refused by tensor name, before anything is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from cases import CASES, FIRST
from safetensors.torch import load_file, save_file

from stoker.base.errors import CheckpointError
from stoker.builder.config import BuildConfig
from stoker.builder.prepare import prepare
from stoker.models import get_architecture


@pytest.mark.parametrize("row", FIRST)
def test_tensors_missing_left_over_or_misshapen(row: str, tmp_path: Path) -> None:
    CASES[FIRST[row]]().save(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    config = BuildConfig(device="cpu", dtype="float32")
    architecture = prepare(tmp_path, config).config.model.architecture
    victim = next(name for name in sorted(tensors) if re.search(r"\.1\..*(down_proj|mlp|ffn|fc2|w2|output_linear).*weight$", name))
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
