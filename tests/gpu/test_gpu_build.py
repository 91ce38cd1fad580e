"""A weight that the device quantizes for a build is the one that a CPU would have made."""

from __future__ import annotations

import pytest
import torch

from stoker.builder.convert import quantized
from stoker.layers.specs import LinearSpec
from stoker.quant.block_fp8 import BlockFp8
from stoker.quant.format import Format
from stoker.quant.fp8 import Fp8
from stoker.quant.int4 import Int4
from stoker.quant.int8 import Int8
from stoker.quant.int8_grouped import GroupedInt8


@pytest.mark.parametrize("chosen", [Fp8(), BlockFp8(), Int8(), GroupedInt8(), Int4()], ids=lambda f: type(f).__name__)
@pytest.mark.parametrize("experts", [0, 2])
def test_the_device_quantizes_as_a_cpu_does(chosen: Format, experts: int) -> None:
    spec = LinearSpec(name="up", in_features=4096, parts=(1024, 640), num_experts=experts)
    weight = torch.randn(spec.weight_shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    weight[..., 5, :] = 0
    here, there = quantized(chosen, weight, spec), quantized(chosen, weight.cuda(), spec)
    assert here.keys() == there.keys()
    for suffix, tensor in here.items():
        assert there[suffix].is_cuda and there[suffix].dtype == tensor.dtype
        differs = (there[suffix].cpu().float() != tensor.float()).float().mean()
        assert differs <= (1e-3 if isinstance(chosen, Int4) else 0), suffix  # clips that fit as well as each other are a matter of rounding
