"""Reports the memory that imported weights need if no kernel reads the format of the checkpoint."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

import torch

from stoker.base.logging import get_logger
from stoker.builder.conversion.canonical_names import CanonicalWeights
from stoker.builder.conversion.tensor_plan import TensorPlan
from stoker.core.specs import LinearSpec
from stoker.engine.config import EngineConfig
from stoker.layers.decoder import declare
from stoker.quant.format import Format
from stoker.quant.formats.dense import Dense
from stoker.quant.formats.int8_grouped import GroupedInt8

NOTICEABLE = 1.25  # engine bytes per checkpoint byte above which the difference is reported

log = get_logger(__name__)


def report_memory_cost(name: str, weights: CanonicalWeights, config: EngineConfig, plans: Mapping[str, TensorPlan]) -> None:
    """Log one warning for each format of an engine that is larger than what the checkpoint `name` stores. Headers are sufficient."""
    dtype, plain = getattr(torch, config.dtype), _with_unfolded_factors(weights, config, plans)
    sizes: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])  # number of weights, bytes in the checkpoint, bytes in the engine
    for weight, sources in weights.quantized_sources.items():
        chosen = Dense() if weight in plain else weights.prequantized.get(weight, Dense())
        entry = sizes[_describe(chosen, dtype)]
        entry[0] += 1
        entry[1] += sum(weights.inner.tensors[source].num_bytes for source in sources)
        entry[2] += _stored_bytes(chosen, weights.tensors[weight].shape, dtype)
    for stored_as, (count, before, after) in sizes.items():
        if after > NOTICEABLE * before:
            log.warning(
                "%s: %d weights are stored as %s, %.4g MiB instead of %.4g MiB: no kernel reads their format. No value changes.",
                name, count, stored_as, after / 2**20, before / 2**20,
            )  # fmt: skip


def _with_unfolded_factors(weights: CanonicalWeights, config: EngineConfig, plans: Mapping[str, TensorPlan]) -> set[str]:
    """The weights that contain the factors of their inputs in the engine, which stores them in plain numbers."""
    linears = [spec for spec in declare(config.model).values() if isinstance(spec, LinearSpec)] if weights.input_factors else []
    plain = [spec for spec in linears if isinstance(config.recipe.format_for(spec), Dense)]
    return {source for spec in plain for group in plans[f"{spec.name}.weight"].sources for source in group} & {*weights.input_factors}


def _describe(chosen: Format, dtype: torch.dtype) -> str:
    """The name of a format for messages."""
    if isinstance(chosen, Dense):
        return str(dtype).removeprefix("torch.")
    if isinstance(chosen, GroupedInt8):
        return f"int8 in groups of {chosen.group_size} (without kernels for it, a GPU widens them to {str(dtype).removeprefix('torch.')})"
    return str(type(chosen).__struct_config__.tag)


def _stored_bytes(chosen: Format, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """The bytes of a weight in the engine."""
    if isinstance(chosen, Dense):
        return math.prod(shape) * dtype.itemsize
    if len(shape) == 3:  # experts, which the checkpoint stores as one tensor [experts, in, out]
        spec = LinearSpec(name="weight", in_features=shape[1], parts=(shape[2],), num_experts=shape[0])
    else:
        spec = LinearSpec(name="weight", in_features=shape[1], parts=(shape[0],))
    return sum(math.prod(layout.shape) * layout.dtype.itemsize for layout in chosen.layout(spec, dtype).values())
