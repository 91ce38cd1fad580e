"""Schemes of compressed-tensors: the publisher's package packs the weights, and computes their real values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_prequantized_import import SIZES, check_weights
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.build import build
from stoker.builder.checkpoint.weights import CheckpointWeights, TensorInfo
from stoker.builder.config import BuildConfig
from stoker.builder.prequantized.dequantize import dequantize
from stoker.builder.prequantized.methods import read_quantized
from stoker.builder.prequantized.weight import PrequantizedWeight
from stoker.engine.layerwise import LayerwiseModel, split_windows

pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from transformers import AutoModelForCausalLM

MODULE = "model.layers.0.mlp.down_proj"
INTS = {"type": "int", "strategy": "group", "group_size": 32}
SCHEMES: dict[str, dict[str, Any]] = {
    "int8 packed rows": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}},
    "int8 packed groups": {"weights": INTS | {"num_bits": 8}},
    "int8 packed asymmetric": {"weights": INTS | {"num_bits": 8, "symmetric": False}},
    "int8 rows asymmetric": {
        "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
        "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
    },
    "int6": {"weights": INTS | {"num_bits": 6}},
    "int4 in the order of activations": {"weights": INTS | {"num_bits": 4, "actorder": "group", "symmetric": False}},
    "int4 with 8-bit inputs": {
        "weights": INTS | {"num_bits": 4}, "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
    },
    "int3": {"weights": INTS | {"num_bits": 3}},
    "int3 asymmetric": {"weights": INTS | {"num_bits": 3, "symmetric": False}},
    "int2": {"weights": INTS | {"num_bits": 2}},
    "fp8 blocks": {
        "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32]},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "dynamic": True},
    },
    "fp8 blocks, weight-only": {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32]}},
    "mxfp8": {
        "weights": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "dynamic": True},
    },
    "nvfp4": {
        "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        "input_activations": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
    },
    "mxfp4": {"weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}},
}  # fmt: skip


class InMemory(CheckpointWeights):
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self.tensors = {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        self.files = [Path("model.safetensors")]

    def chunks(self, name: str) -> Iterator[Tensor]:
        yield self._tensors[name].flatten()


def pack(weight: Tensor, settings: dict[str, Any]) -> tuple[str, dict[str, Tensor], Tensor]:
    """(format, the tensors of a module, its real weight [out, in]), as the package computes them."""
    scheme = QuantizationScheme(targets=["Linear"], **settings)
    args = scheme.weights
    assert args is not None
    columns = weight.shape[1]
    state: dict[str, Tensor] = {"weight": weight}
    order = torch.arange(columns)
    if args.actorder == "group":
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(2))
        index = torch.empty(columns, dtype=torch.int32)
        index[order] = (torch.arange(columns) // 32).int()
        state["weight_g_idx"] = index
    if args.strategy == "block":
        blocks = weight.unflatten(1, (-1, 32)).unflatten(0, (-1, 32))
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    else:
        split = weight[:, order].unflatten(1, (-1, args.group_size or columns))
        low, high = split.amin(-1), split.amax(-1)
    extra = {}
    if args.strategy == "tensor_group":
        extra["global_scale"] = state["weight_global_scale"] = 448 * 6 / weight.abs().max().reshape(1)
        state["input_global_scale"] = torch.ones(1)
    scale, zero = calculate_qparams(low, high, args, **extra)
    state["weight_scale"] = scale
    if not args.symmetric:
        state["weight_zero_point"] = zero
    form = infer_module_format(torch.nn.Linear, scheme).value
    compressor = BaseCompressor.get_value_from_registry(form)
    with torch.compiler.set_stance("force_eager"):
        packed = compressor.compress(state, scheme)
    wide = {name: tensor.float() if tensor.dtype == torch.bfloat16 else tensor for name, tensor in packed.items()}
    return form, packed, compressor.decompress(wide, scheme)["weight"].float()


def real(found: Any, weights: InMemory) -> Tensor:
    parts = [weights.read(name) for name in found.sources]
    return dequantize(found.format, found.repack(parts)) if isinstance(found, PrequantizedWeight) else found.dequantize(parts)


@pytest.mark.parametrize("name", SCHEMES)
def test_values_are_those_of_the_package(name: str) -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
    form, packed, expected = pack(weight, SCHEMES[name])
    weights = InMemory({f"{MODULE}.{suffix}": tensor.contiguous() for suffix, tensor in packed.items()})
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"targets": ["Linear"]} | SCHEMES[name]}}
    found = read_quantized(weights, config)[f"{MODULE}.weight"]
    assert torch.allclose(real(found, weights), expected, rtol=4e-3 if "fp4" in name else 1e-6, atol=1e-7)  # the package rounds to bfloat16
    assert set(found.sources) == set(weights.tensors), "a tensor would be reported as unknown"
    assert (real(found, weights) - weight).norm() < 0.6 * weight.norm()


@pytest.mark.parametrize(("bits", "columns"), [(4, 60), (4, 31), (8, 30), (3, 95), (1, 40), (2, 33)])
def test_words_may_be_padded(bits: int, columns: int) -> None:
    """`weight_shape` tells the number of columns, also where that of the words is a multiple of 32."""
    weight = torch.randn(7, columns, generator=torch.Generator().manual_seed(1))
    settings = {"weights": {"num_bits": bits, "type": "int", "strategy": "channel"}}
    _, packed, expected = pack(weight, settings)
    weights = InMemory({f"{MODULE}.{suffix}": tensor.contiguous() for suffix, tensor in packed.items()})
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"]} | settings},
    }
    found = read_quantized(weights, config)[f"{MODULE}.weight"]
    assert torch.allclose(real(found, weights), expected, rtol=1e-6, atol=1e-7)


GROUPS: dict[str, dict[str, Any]] = {
    "group_0": {"targets": ["Linear"]} | SCHEMES["int4 in the order of activations"],
    "group_1": {"targets": [r"re:.*self_attn\.(q|k|v)_proj$", "model.layers.1.self_attn.o_proj"]} | SCHEMES["int8 packed groups"],
    "group_2": {"targets": ["re:.*mlp.(gate|up)_proj"]} | SCHEMES["fp8 blocks"],
    "group_3": {"targets": ["model.layers.0.self_attn.q_proj", r"re:.*layers\.0\.mlp\.\w+_proj"]} | SCHEMES["int8 packed rows"],
}


def group_of(module: str) -> str:
    """The group of a module by the precedence of the package: names, then patterns in their alphabetical order, then classes."""
    from compressed_tensors.utils.match import match_targets

    by_target = {target: key for key, group in GROUPS.items() for target in group["targets"]}
    return by_target[match_targets(module, torch.nn.Linear(1, 1), by_target)[0]]


def test_several_groups_by_name_pattern_and_class(tmp_path: Path) -> None:
    source = tiny.save(tiny.model(**SIZES), tmp_path / "hf")
    tensors, weights, forms = load_file(source / "model.safetensors"), {}, {}
    for name in [name for name in tensors if name.endswith("_proj.weight") and ".layers.2." not in name]:
        module = name.removesuffix(".weight")
        key = group_of(module)
        forms[key], packed, weights[name] = pack(tensors.pop(name), {k: v for k, v in GROUPS[key].items() if k != "targets"})
        tensors |= {f"{module}.{suffix}": part.contiguous() for suffix, part in packed.items()}
    weights |= {name: tensor for name, tensor in tensors.items() if ".layers.2." in name}
    assert set(forms) == set(GROUPS)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    quantization = {
        "quant_method": "compressed-tensors", "format": "mixed-precision", "quantization_status": "compressed",
        "config_groups": {key: group | {"format": forms[key]} for key, group in GROUPS.items()},
        "ignore": ["lm_head", r"re:model\.layers\.2\..*"],
    }  # fmt: skip
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))

    engine = build(source, tmp_path / "engine", BuildConfig(device="cpu", dtype="float32"), verify="files")
    check_weights(engine, weights)

    ids = torch.randint(3, 320, (40,), generator=torch.Generator().manual_seed(4))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.inference_mode():
        expected = torch.nn.functional.cross_entropy(model(ids[None]).logits[0, :-1].float(), ids[1:], reduction="sum")
    found = LayerwiseModel(engine.config.model, split_windows(ids.tolist(), len(ids))).run(engine.loader()).nll
    assert found == pytest.approx(float(expected), rel=2e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"group_0": GROUPS["group_0"] | {"targets": ["re:(?!a)b"]}},
            r"the pattern '\(\?!a\)b' in config_groups\.targets is not supported",
        ),
        ({"group_0": GROUPS["group_0"] | {"targets": ["re:" + "(a" * 9000]}}, "it is longer than 4096 characters"),
        ({"group_0": GROUPS["group_0"] | {"targets": "Linear"}}, r"group_0\.targets='Linear' is not a list of names"),
        ({"group_1": GROUPS["group_1"], "group_2": GROUPS["group_2"]}, f"no target of config_groups matches {MODULE}"),
        ({"W4A16": ["Linear"]}, r"W4A16=\['Linear'\] is not an object"),
        ({"group_0": GROUPS["group_0"], "group_1": {"weights": INTS | {"num_bits": 9}}}, "group_1.weights has 9-bit int values"),
        ({"group_0": {"weights": INTS | {"num_bits": 4, "group_size": 48}}}, "group_0.weights: groups of 48 are not supported"),
        ({"group_0": {"weights": {"num_bits": 4, "type": "float", "strategy": "channel"}}}, "strategy='channel' of 4-bit float"),
    ],
)
def test_settings_that_are_not_supported_are_rejected(change: dict[str, Any], message: str) -> None:
    _, packed, _ = pack(torch.randn(64, 96), {k: v for k, v in GROUPS["group_0"].items() if k != "targets"})
    weights = InMemory({f"{MODULE}.{suffix}": tensor.contiguous() for suffix, tensor in packed.items()})
    with pytest.raises(CheckpointError, match=message):
        read_quantized(weights, {"quant_method": "compressed-tensors", "config_groups": change})


def test_a_module_in_ignore_with_a_scale_is_rejected() -> None:
    _, packed, _ = pack(torch.randn(64, 96), SCHEMES["int8 packed groups"])
    weights = InMemory({f"{MODULE}.{suffix}": tensor.contiguous() for suffix, tensor in packed.items()})
    config = {"config_groups": {"group_0": SCHEMES["int8 packed groups"]}, "ignore": ["re:.*down_proj"]}
    with pytest.raises(CheckpointError, match=rf"ignore has {MODULE}, which has a weight_scale"):
        read_quantized(weights, {"quant_method": "compressed-tensors"} | config)
