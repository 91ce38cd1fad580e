"""Every key of a quantization_config is used, known to have no effect, or rejected by name, at each level of nesting.

Each published configuration is changed in one place at a time. A change is harmless if the weights are read as before, and otherwise it is
rejected or is one of the settings that describe the tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_prequantized_settings import AWQ, FOUR_BITS, FP8, GPTQ, I32, INT4, LAYER, NVFP4, PACKED, Headers, HeadersOnly, group

from stoker.base.errors import CheckpointError
from stoker.builder.prequantized.methods import read_quantized
from stoker.builder.recipe import kv_cache_algorithm

U8 = torch.uint8
HQQ: Headers = {
    "W_q": ((64, 32), U8), "scale": ((128, 1), torch.float16), "zero": ((128, 1), torch.float16), "shape": ((2,), torch.int64),
    "axis": ((), I32), "group_size": ((), I32), "packing": ((7,), U8),
}  # fmt: skip
HQQ_VALUES = {"shape": [64, 64], "axis": [1], "group_size": [32], "packing": list(b"4bit_u8")}
FOUR: Headers = {"weight": ((2048, 1), U8), "weight.absmax": ((64,), torch.float32), "weight.quant_map": ((16,), torch.float32)}
WEIGHT = {"nbits": 4, "channel_wise": True, "group_size": 32, "optimize": True, "round_zero": True, "axis": 1, "view_as_float": False}
# Objects whose keys are not settings: names of modules and patterns, and free text.
OPEN = (
    "extra_config",
    "regex_config",
    "quantized_layers",
    "dynamic",
    "meta",
    "producer",
    "config_groups",
    "observer_kwargs",
)
# Settings that say what the tensors mean, or which modules are concerned. Other values give another reading, or do not fit the tensors.
MEANING = {
    "bits", "group_size", "num_bits", "type", "strategy", "symmetric", "desc_act", "checkpoint_format", "format", "actorder", "dynamic",
    "quant_algo", "weight_block_size", "block_structure", "activation_scheme", "packing_format", "data_type", "ignore", "targets",
    "quant_method", "input_activations", "weights", "quantized_layers", "config_groups", "extra_config", "observer",
}  # fmt: skip
CASES: dict[str, tuple[Headers, dict[str, Any]]] = {
    "gptq": (GPTQ, FOUR_BITS | {
        "quant_method": "gptq", "desc_act": False, "sym": True, "lm_head": False, "damp_percent": 0.01, "true_sequential": True,
        "checkpoint_format": "gptq", "pack_dtype": "int32", "meta": {"quantizer": ["gptqmodel:5.6.12"]}, "dynamic": {"-:lm_head": {}},
    }),
    "awq": (AWQ, FOUR_BITS | {"quant_method": "awq", "version": "gemm", "zero_point": True, "modules_to_not_convert": None}),
    "auto-round": (GPTQ, FOUR_BITS | {
        "quant_method": "auto-round", "sym": True, "data_type": "int", "iters": 200, "autoround_version": "0.8",
        "extra_config": {LAYER: {"bits": 4, "group_size": 32, "data_type": "int", "sym": True}},
        "regex_config": {".*up_proj": {"bits": 8, "group_size": 32}}, "packing_format": "auto_round:auto_gptq",
    }),
    "compressed-tensors": (PACKED, group(INT4 | {"actorder": "weight", "observer": "mse", "observer_kwargs": {}}) | {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "sparsity_config": {"format": "dense"},
        "transform_config": {"config_groups": {}}, "version": "0.13.0", "global_compression_ratio": 1.2, "ignore": ["lm_head"],
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False},
        "quantization_status": "compressed",
    }),
    "modelopt": (NVFP4, {
        "quant_method": "modelopt", "producer": {"name": "modelopt"}, "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None,
        "quantized_layers": {LAYER: {"quant_algo": "NVFP4", "group_size": 16}}, "exclude_modules": ["lm_head"],
    }),
    "fp8": (FP8, {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "modules_to_not_convert": ["lm_head"]}),
    "hqq": (HQQ, {
        "quant_method": "hqq", "skip_modules": ["lm_head"], "quant_config": {
            "offload_meta": False, "scale_quant_params": None, "zero_quant_params": None, "weight_quant_params": WEIGHT,
        },
    }),
    "bitsandbytes": (FOUR, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
}  # fmt: skip


class Contents(HeadersOnly):
    """Headers, and the contents of the small tensors that HQQ stores its settings in."""

    def read(self, name: str) -> torch.Tensor:
        suffix = name.removeprefix(f"{LAYER}.")
        if suffix in HQQ_VALUES:
            return torch.tensor(HQQ_VALUES[suffix], dtype=self.tensors[name].dtype).reshape(self.tensors[name].shape)
        return super().read(name)


def reading(module: Headers, config: dict[str, Any]) -> dict[str, Any]:
    """What is read of each weight: its tensors, shape, and format or dtype."""
    found = read_quantized(Contents(module), copy.deepcopy(config))
    if config.get("quant_method") == "modelopt":
        kv_cache_algorithm(config)
    return {name: (weight.sources, getattr(weight, "shape", None), getattr(weight, "format", None)) for name, weight in found.items()}


def objects(config: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of all objects in a configuration, itself included."""
    yield path
    for key, value in config.items():
        if isinstance(value, dict):
            yield from objects(value, (*path, key))


def at(config: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for key in path:
        config = config[key]
    return config


def others(value: Any) -> list[Any]:
    """Other values for a key, of its type and of other types."""
    if isinstance(value, bool):
        return [not value, "yes"]
    if isinstance(value, (int, float)):
        return [value * 2, value + 1, "x"]
    if isinstance(value, str):
        return [f"{value}_2", 7]
    return [["x"], "x", {"x": 1}]


@pytest.mark.parametrize("name", CASES)
def test_unknown_keys_are_rejected_at_each_level(name: str) -> None:
    module, config = CASES[name]
    assert reading(module, config) or name == "bitsandbytes"
    for path in objects(config):
        if (path and path[-1] in OPEN) or "meta" in path or "dynamic" in path:
            continue
        changed = copy.deepcopy(config)
        at(changed, path)["unheard_of"] = 1
        with pytest.raises(CheckpointError, match="unheard_of") as error:
            reading(module, changed)
        assert len(str(error.value)) < 500


@pytest.mark.parametrize("name", CASES)
def test_each_value_is_harmless_rejected_or_describes_the_tensors(name: str) -> None:
    module, config = CASES[name]
    expected = reading(module, config)
    for path in objects(config):
        for key, value in at(config, path).items():
            if key == "quant_method":
                continue
            for other in others(value):
                changed = copy.deepcopy(config)
                at(changed, path)[key] = other
                try:
                    found = reading(module, changed)
                except CheckpointError as error:
                    assert len(str(error)) < 700
                    continue
                assert found == expected or key in MEANING, (*path, key, other)
