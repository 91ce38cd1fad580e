"""Settings of pre-quantized checkpoints that change the meaning of tensors are refused by name; published ones are accepted.

The readers run on tensor headers only, without a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.weights import CheckpointWeights, TensorInfo
from stoker.builder.prequantized.methods import read_quantized

Headers = dict[str, tuple[tuple[int, ...], torch.dtype]]
I32, F16, F32, E4M3 = torch.int32, torch.float16, torch.float32, torch.float8_e4m3fn
LAYER = "model.layers.0.mlp.down_proj"
GPTQ: Headers = {"qweight": ((8, 64), I32), "qzeros": ((2, 8), I32), "scales": ((2, 64), F16)}  # [in 64, out 64], 4 bits
AWQ: Headers = {"qweight": ((64, 8), I32), "qzeros": ((2, 8), I32), "scales": ((2, 64), F16)}
PACKED: Headers = {"weight_packed": ((64, 8), I32), "weight_scale": ((64, 2), F16)}
ROWS: Headers = {"weight": ((64, 64), torch.int8), "weight_scale": ((64, 1), F32)}
FP8: Headers = {"weight": ((64, 64), E4M3), "weight_scale": ((), F32)}
NVFP4: Headers = {"weight": ((64, 32), torch.uint8), "weight_scale": ((64, 4), E4M3), "weight_scale_2": ((), F32)}
EIGHT: Headers = {"weight": ((64, 64), torch.int8), "SCB": ((64,), F32), "weight_format": ((), torch.uint8)}
FOUR_BITS = {"bits": 4, "group_size": 32}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}


class HeadersOnly(CheckpointWeights):
    """The headers of one module, whose contents are zero."""

    def __init__(self, module: Headers) -> None:
        self.tensors = {f"{LAYER}.{suffix}": TensorInfo(shape, dtype) for suffix, (shape, dtype) in module.items()}
        self.files = [Path("model.safetensors")]

    def chunks(self, name: str) -> Iterator[Tensor]:
        yield torch.zeros(self.tensors[name].shape, dtype=self.tensors[name].dtype).flatten()


def group(weights: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights} | others}}


@pytest.mark.parametrize(
    ("method", "module", "settings"),
    [
        (
            "gptq", GPTQ, FOUR_BITS | {
                "desc_act": False, "sym": True, "lm_head": False, "checkpoint_format": "gptq", "format": "GPTQ", "pack_dtype": "int32",
                "meta": {"quantizer": ["gptqmodel:5.6.12"]}, "pack_impl": "cpu", "dynamic": {r"-:.*visual\..*": {}},
            },
        ),
        ("gptq", GPTQ, FOUR_BITS | {"damp_percent": 0.01, "model_name_or_path": None, "model_file_base_name": "model"}),
        ("awq", AWQ, FOUR_BITS | {"version": "GEMM", "zero_point": True, "backend": "autoawq", "modules_to_not_convert": None}),
        (
            "compressed-tensors", PACKED, group(INT4 | {"actorder": "weight"}, output_activations=None, format=None) | {
                "format": "pack-quantized", "sparsity_config": {"format": "dense"}, "transform_config": {}, "version": "0.13.0",
                "global_compression_ratio": 1.2, "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed",
            },
        ),
        ("fp8", FP8, {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_per_tensor": True, "scale_fmt": "ue8m0"}),
        ("fp8", FP8, {"activation_scheme": "static", "ignored_layers": ["lm_head"], "weight_block_size": None}),
        ("auto-round", GPTQ, FOUR_BITS | {"extra_config": {r".*mlp\.down_proj": {"bits": 4, "data_type": "int", "act_bits": 16}}}),
        ("modelopt", NVFP4, {"quant_algo": "NVFP4"}),
    ],
)  # fmt: skip
def test_published_settings_are_accepted(method: str, module: Headers, settings: dict[str, Any]) -> None:
    found = read_quantized(HeadersOnly(module), {"quant_method": method} | settings)
    assert list(found) == [f"{LAYER}.weight"]


@pytest.mark.parametrize(
    ("method", "module", "settings", "message"),
    [
        ("gptq", GPTQ, FOUR_BITS | {"checkpoint_format": "gptq_v3"}, "checkpoint_format='gptq_v3' is not supported"),
        ("gptq", GPTQ, FOUR_BITS | {"checkpoint_format": "gptq", "format": "gptq_v2"}, "checkpoint_format and format are different"),
        ("gptq", GPTQ, FOUR_BITS | {"pack_dtype": "int16"}, "pack_dtype='int16' is not supported"),
        ("gptq", GPTQ, FOUR_BITS | {"dynamic": {"+:.*": {"bits": 8}}}, r"qzeros has shape \[2, 8\], and quantization_config implies"),
        ("gptq", GPTQ, FOUR_BITS | {"dynamic": {"+:.*": {"bits": 5}}}, "5 bits in groups of 32 are not supported"),
        ("gptq", GPTQ, FOUR_BITS | {"dynamic": {"+:.*": {"adapter": 1}}}, r"dynamic\.\+:\.\*\.adapter='1' is not known"),
        ("gptq", GPTQ, FOUR_BITS | {"dynamic": {"+:(": {"bits": 8}}}, r"the pattern '\(' in dynamic is not supported"),
        ("gptq", GPTQ, FOUR_BITS | {"rotate": True}, "rotate='True' is not known"),
        ("gptq", GPTQ, {"bits": [4] * 99, "group_size": 32}, "bits in groups of 32 are not supported"),
        ("awq", AWQ, FOUR_BITS | {"backend": "llm-awq"}, "backend='llm-awq' is not supported"),
        ("awq", AWQ, FOUR_BITS | {"smooth": 1}, "smooth='1' is not known"),
        ("fp8", FP8, {"fmt": "e5m2"}, "fmt='e5m2' is not supported"),
        ("fp8", FP8, {"activation_scheme": ["static"]}, r"activation_scheme=.* is not supported"),
        ("fp8", FP8, {"transform": 1}, "transform='1' is not known"),
        ("compressed-tensors", PACKED, group(INT4 | {"symmetric": False}), "weight_zero_point is missing"),
        ("compressed-tensors", PACKED, group(INT4 | {"actorder": "group"}), "weight_g_idx is missing"),
        ("compressed-tensors", PACKED, group(INT4 | {"actorder": "row"}), r"group_0\.weights\.actorder='row' is not supported"),
        ("compressed-tensors", PACKED, group(INT4) | {"format": "marlin-24"}, "format='marlin-24' is not supported"),
        ("compressed-tensors", ROWS, group(INT8 | {"symmetric": False}), "weight_zero_point is missing"),
        ("compressed-tensors", ROWS, group(INT8, output_activations=INT8), "output_activations=.* is not supported"),
        (
            "compressed-tensors",
            ROWS,
            group(INT8) | {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
            "transform_config",
        ),
        ("compressed-tensors", ROWS, group(INT8) | {"sparsity_config": {"format": "sparse-24-bitmask"}}, r"sparsity_config\.format="),
        ("compressed-tensors", ROWS, group(INT8, rotation="r1"), r"config_groups\.group_0\.rotation='r1' is not known"),
        ("auto-round", GPTQ, FOUR_BITS | {"extra_config": {LAYER: {"act_bits": 8}}}, r"down_proj\.act_bits='8' is not supported"),
        ("auto-round", GPTQ, FOUR_BITS | {"extra_config": {LAYER: {"data_type": "fp"}}}, "data_type='fp' is not supported"),
        ("auto-round", GPTQ, FOUR_BITS | {"extra_config": {LAYER: {"rotation": 1}}}, "rotation='1' is not known"),
        ("auto-round", GPTQ, FOUR_BITS | {"extra_config": {"(.*)*x": {}}}, r"the pattern '\(\.\*\)\*x' in extra_config is not supported"),
        ("auto-round", GPTQ, FOUR_BITS | {"extra_config": {".*" * 120 + "x": {"bits": 8}}, "bits": [4]}, "down_proj is not a number"),
        ("auto-round", GPTQ, FOUR_BITS | {"packing_format": ["auto_round"]}, "packing_format=.* is not supported"),
        ("modelopt", NVFP4 | {"weight_scale_2": ((64,), F32)}, {"quant_algo": "NVFP4"}, r"weight_scale_2 has shape \[64\], and one number"),
        ("modelopt", NVFP4, {"quant_algo": ["NVFP4"]}, "quant_algo=.* is not supported"),
        ("mxfp4", {"experts_blocks": ((0, 8, 2, 16), torch.uint8), "experts_scales": ((0, 8, 2), torch.uint8)}, {}, "does not fit"),
        ("mxfp4", {}, {"rotation": 1}, "rotation='1' is not known"),
        ("gptq", GPTQ | {"qweight": ((0, 64), I32)}, {"bits": 4, "group_size": -1}, r"qweight has shape \[0, 64\]"),
        ("gptq", GPTQ, {"bits": 3, "group_size": 32}, r"qweight has shape \[8, 64\], which is no whole number of values of 3 bits"),
        ("awq", AWQ | {"qweight": ((0, 8), I32)}, {"bits": 4, "group_size": -1}, r"qweight has shape \[0, 8\]"),
        ("compressed-tensors", PACKED | {"weight_packed": ((64, 0), I32)}, group(INT4 | {"group_size": -1}), r"has shape \[64, 0\]"),
        ("bitsandbytes", EIGHT | {"weight_format": ((0,), torch.uint8)}, {}, "weight_format is not 0"),
    ],
)
def test_settings_and_shapes_that_change_the_weights_are_refused(
    method: str, module: Headers, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        read_quantized(HeadersOnly(module), {"quant_method": method} | settings)
    assert len(str(error.value)) < 500


def test_an_unexpected_error_of_a_reader_names_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = HeadersOnly(FP8)
    monkeypatch.setitem(weights.tensors, f"{LAYER}.weight", None)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: the tensors do not fit the quantization_config of fp8: AttributeError"):
        read_quantized(weights, {"quant_method": "fp8"})
