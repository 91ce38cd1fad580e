"""A build on the device writes the same files as a build on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stoker.base.config import Mapping
from stoker.builder.build import build
from stoker.builder.build_plan import BuildPlan
from stoker.builder.config import BuildConfig
from stoker.builder.conversion.convert import quantize_in_chunks
from stoker.core.specs import LinearSpec
from stoker.engine.config_file import rank_file_name
from stoker.quant.format import Format
from stoker.quant.formats.block_fp8 import BlockFp8
from stoker.quant.formats.fp8 import Fp8
from stoker.quant.formats.int4 import Int4
from stoker.quant.formats.int8 import Int8
from stoker.quant.formats.int8_grouped import GroupedInt8

sys.path.append(str(Path(__file__).parents[1] / "parity"))
from cases import CASES


@pytest.mark.parametrize("weight_format", [Fp8(), BlockFp8(), Int8(), GroupedInt8(), Int4()], ids=lambda f: type(f).__name__)
@pytest.mark.parametrize("experts", [0, 2])
def test_the_device_quantizes_as_a_cpu_does(weight_format: Format, experts: int) -> None:
    spec = LinearSpec(name="up", in_features=4096, parts=(1024, 640), num_experts=experts)
    weight = torch.randn(spec.weight_shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    weight[..., 5, :] = 0
    on_cpu, on_device = quantize_in_chunks(weight_format, weight, spec), quantize_in_chunks(weight_format, weight.cuda(), spec)
    assert on_cpu.keys() == on_device.keys()
    for suffix, tensor in on_cpu.items():
        assert on_device[suffix].is_cuda and on_device[suffix].dtype == tensor.dtype
        differs = (on_device[suffix].cpu().float() != tensor.float()).float().mean()
        assert differs <= (1e-3 if isinstance(weight_format, Int4) else 0), suffix  # rounding decides between clips with equal errors


@pytest.mark.parametrize(
    ("quantization", "ranks"),
    [
        ("NO_QUANT", 1),
        ("NO_QUANT", 2),
        ("FP8", 1),
        ("FP8", 2),
        ("WEIGHTS_ONLY_INT8", 1),
        ("WEIGHTS_ONLY_INT8", 2),
        ("WEIGHTS_ONLY_INT4", 1),
    ],
)
@pytest.mark.parametrize("row", ["LlamaForCausalLM", "MixtralForCausalLM", "DeepseekV2ForCausalLM"])
def test_a_build_on_the_device_equals_one_on_a_cpu(
    row: str, quantization: str, ranks: int, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors go through pinned memory in both directions, and are sharded on the device."""
    next(CASES[case]() for case in CASES if case[0] == row).save(tmp_path / "hf")
    settings = {"FP8": {"compensate": False}, "WEIGHTS_ONLY_INT4": {"clip": False}}.get(quantization, {})
    config = BuildConfig(
        tokenizer=str(tokenizer), device="cuda", dtype="bfloat16", quantization=quantization, quantization_settings=settings,
        mapping=Mapping(tensor_parallel=ranks), max_perplexity_increase=None if quantization == "NO_QUANT" else 10.0,
    )  # fmt: skip
    device_engine = build(tmp_path / "hf", tmp_path / "device", config, verify="files").path
    monkeypatch.setattr(BuildPlan, "device", torch.device("cpu"))
    cpu_engine = build(tmp_path / "hf", tmp_path / "cpu", config, verify="files").path
    for rank in range(ranks):
        ours, theirs = (load_file(path / rank_file_name(rank)) for path in (device_engine, cpu_engine))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)) for name, tensor in ours.items() if tensor.dim())
