"""Stacked experts of a checkpoint are read as linears of single experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.pytorch_bin import PickledWeights
from stoker.builder.checkpoint.safetensors import SafetensorsWeights
from stoker.builder.checkpoint.single_experts import SingleExperts
from stoker.builder.checkpoint.weights import CheckpointWeights

STEM = "model.layers.3.mlp.experts"


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_linears(tmp_path: Path, suffix: str) -> None:
    up, down, gate = torch.randn(3, 8, 6).bfloat16(), torch.randn(3, 6, 4).bfloat16(), torch.randn(3, 6)
    tensors = {f"{STEM}.gate_up_proj": up, f"{STEM}.down_proj": down, "model.layers.3.mlp.gate.weight": gate}
    file = tmp_path / f"weights.{suffix}"
    inner: CheckpointWeights
    if suffix == "bin":
        torch.save(tensors, file)
        inner = PickledWeights([file])
    else:
        save_file(tensors, file)
        inner = SafetensorsWeights([file])
    weights = SingleExperts(inner)
    expected = {"model.layers.3.mlp.gate.weight": gate}
    for expert in range(3):
        expected |= {f"{STEM}.{expert}.gate_proj.weight": up[expert, :4], f"{STEM}.{expert}.up_proj.weight": up[expert, 4:]}
        expected |= {f"{STEM}.{expert}.down_proj.weight": down[expert]}
    assert set(weights.tensors) == set(expected)
    for name, tensor in expected.items():
        assert weights.tensors[name].shape == tuple(tensor.shape) and torch.equal(weights.read(name), tensor), name
    assert weights.location(f"{STEM}.1.up_proj.weight") == f"{file}: {STEM}.gate_up_proj"


def test_an_expert_that_is_stored_twice_is_refused(tmp_path: Path) -> None:
    tensors = {f"{STEM}.down_proj": torch.zeros(2, 6, 4), f"{STEM}.1.down_proj.weight": torch.zeros(6, 4)}
    save_file(tensors, tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"experts.1.down_proj.weight is also in the stacked tensor"):
        SingleExperts(SafetensorsWeights([tmp_path / "weights.safetensors"]))
