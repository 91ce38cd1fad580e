"""Converts checkpoint tensors to the stored tensors of an engine, one weight at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.base.logging import get_logger
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN
from stoker.builder.checkpoint.weights import CheckpointWeights
from stoker.builder.conversion.import_linear import import_linear
from stoker.builder.conversion.input_factors import folds_of, has_input_factors, linear_of, read_factors, scale_rows
from stoker.builder.conversion.layouts import stored_layouts
from stoker.builder.conversion.tensor_plan import TensorPlan, combine_sources
from stoker.core.model_config import ModelConfig
from stoker.core.specs import LinearSpec, Spec
from stoker.engine.config import EngineConfig
from stoker.quant.calibration.scale_folding import ScaleFold
from stoker.quant.format import Format
from stoker.quant.formats.dense import Dense
from stoker.quant.recipe import AS_STORED

# Values of a weight that are quantized at a time, by device type. This bounds temporary memory, and fits a CPU's caches.
CHUNK_VALUES = {"cpu": 1 << 21, "cuda": 1 << 26}

CPU = torch.device("cpu")

log = get_logger(__name__)


class PrecomputedTensors(Protocol):
    """Stored tensors that exist already, for example because calibration has quantized them."""

    def __contains__(self, name: str) -> bool:
        """Whether the tensors of the spec with this name exist."""
        ...

    def __getitem__(self, name: str) -> Tensor:
        """A stored tensor by its engine name."""
        ...


class Converter:
    """Converts specs to their stored tensors, which are whole: not divided among ranks yet.

    Tensors are computed on `device`, or on the CPU if the device has not enough memory for a weight. `calibrated` are the tensors that
    calibration has quantized already.
    """

    def __init__(
        self,
        config: EngineConfig,
        tensor_plans: Mapping[str, TensorPlan],
        weights: CheckpointWeights,
        device: torch.device = CPU,
        calibrated: PrecomputedTensors | None = None,
    ) -> None:
        self.config = config
        self.tensor_plans = tensor_plans
        self.weights = weights
        self.device = device
        self.calibrated = calibrated
        self.dtype: torch.dtype = getattr(torch, config.dtype)

    def convert(self, spec: Spec) -> Iterator[tuple[str, Tensor]]:
        """(engine name, tensor) of each stored tensor of `spec`, in the order of `stored_layouts`.

        Raises CheckpointError when a value is not finite, in the checkpoint or after a cast.
        """
        if self.calibrated is not None and spec.name in self.calibrated:
            yield from ((name, self.calibrated[name]) for name in stored_layouts(spec, self.config.recipe, self.dtype))
        elif isinstance(spec, LinearSpec):
            yield from self._convert_linear(spec)
        else:
            yield spec.name, self.dense_tensor(spec.name, getattr(torch, spec.dtype) if spec.dtype else self.dtype)

    def dense_tensor(self, name: str, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """The engine tensor called `name` before quantization, in `dtype` on `device`."""
        return assemble_tensor(self.tensor_plans[name], self.weights, self.config.model, dtype, device or self.device)

    def _convert_linear(self, spec: LinearSpec) -> Iterator[tuple[str, Tensor]]:
        """(engine name, tensor) of each stored tensor of a linear, which is imported unchanged or quantized."""
        chosen = self.config.recipe.format_for(spec)
        if self.config.recipe.name == AS_STORED and not isinstance(chosen, Dense):
            stored = import_linear(spec, chosen, self.tensor_plans, self.weights, self.config.model)
            location = self.weights.location(self.tensor_plans[f"{spec.name}.weight"].sources[0][0])
            folded = self._folded_factors(spec)
            for fold, factors in folded:
                scale_rows(stored, fold, factors)
            for suffix, tensor in stored.items():
                _check_imported(f"{spec.name}.{suffix}", tensor, location)
        else:
            stored, folded = self._quantize(spec, chosen), []
        for suffix in chosen.layout(spec, self.dtype):
            yield f"{spec.name}.{suffix}", stored.pop(suffix)
        if spec.bias:
            bias = self.dense_tensor(f"{spec.name}.bias", self.dtype)
            for (start, stop), factors in ((fold.rows, factors) for fold, factors in folded):
                bias[..., start:stop] *= factors
            yield f"{spec.name}.bias", bias

    def _folded_factors(self, spec: LinearSpec) -> list[tuple[ScaleFold, Tensor]]:
        """The folds into `spec` of the factors that the checkpoint has for the inputs of other imported linears."""
        found = []
        for fold in folds_of(spec.name, self.config.model):
            reader = fold.consumers[0]
            if fold.linear != spec.name or not has_input_factors(reader, self.tensor_plans, self.weights):
                continue
            if not isinstance(self.config.recipe.format_for(linear_of(reader, self.config.model)), Dense):
                found.append((fold, read_factors(reader, self.tensor_plans, self.weights)))
        return found

    def _quantize(self, spec: LinearSpec, chosen: Format) -> dict[str, Tensor]:
        """The stored tensors of a linear by suffix, quantized on the device or, if it is out of memory, on the CPU."""
        name = f"{spec.name}.weight"
        try:
            return quantize_in_chunks(chosen, self.dense_tensor(name, self.dtype), spec)
        except torch.OutOfMemoryError:
            if self.device == CPU:
                raise
            log.info("%s is quantized on the CPU: %s is out of memory", spec.name, self.device)
            return quantize_in_chunks(chosen, self.dense_tensor(name, self.dtype, CPU), spec)


def quantize_in_chunks(chosen: Format, weight: Tensor, spec: LinearSpec) -> dict[str, Tensor]:
    """The result of `chosen.quantize` for a weight [(experts,) out, in], by chunks of rows if the format quantizes rows independently."""
    rows, together, chunk = weight.shape[-2], chosen.rows_per_call, CHUNK_VALUES[weight.device.type]
    if together is None or weight.numel() <= chunk:
        return chosen.quantize(weight, spec)
    step = max(together, chunk // weight.shape[-1] // together * together)
    layouts = chosen.layout(spec, weight.dtype)
    stored = {suffix: torch.empty(layout.shape, dtype=layout.dtype, device=weight.device) for suffix, layout in layouts.items()}
    outputs = [stored] if weight.dim() == 2 else [{suffix: t[e] for suffix, t in stored.items()} for e in range(len(weight))]
    for matrix, output in zip(weight.view(-1, *weight.shape[-2:]), outputs, strict=True):
        for first in range(0, rows, step):
            for suffix, part in chosen.quantize(matrix[first : first + step], spec).items():
                output[suffix].narrow(0, first // layouts[suffix].row_unit, len(part)).copy_(part)
    return stored


def assemble_tensor(
    plan: TensorPlan, weights: CheckpointWeights, config: ModelConfig, dtype: torch.dtype, device: torch.device = CPU
) -> Tensor:
    """One engine tensor in `dtype` on `device`, assembled from its checkpoint tensors.

    Raises CheckpointError for a value that is not finite, before or after the cast.
    """
    out = torch.empty(plan.shape, dtype=dtype, device=device)
    for part, group in zip(out.unbind(0) if plan.stacked else (out,), plan.sources, strict=True):
        if plan.transformed is not None:
            part.copy_(combine_sources(plan, [weights.read(source) for source in group], config))
            _check_finite(part, group[0], weights)
        else:
            _copy_concatenated(part.view(-1), group, weights)
    return out


def _copy_concatenated(out: Tensor, sources: tuple[str, ...], weights: CheckpointWeights) -> None:
    """Fill the flat tensor `out` with the elements of one source after another, which concatenates them along the rows."""
    done = 0
    for source in sources:
        for part in weights.copy_into(source, out[done : done + math.prod(weights.tensors[source].shape)]):
            _check_finite(part, source, weights)
            done += part.numel()


def _check_imported(name: str, tensor: Tensor, location: str) -> None:
    """Raise CheckpointError when a tensor that is imported unchanged contains NaN or infinity."""
    if not tensor.dtype.is_floating_point:
        return
    wrong = torch.isnan(tensor) if tensor.dtype.itemsize == 1 else ~torch.isfinite(tensor)  # e4m3fn has no infinity
    if bool(wrong.any()):
        raise CheckpointError(f"{location}: {name} would contain NaN or infinity.", cure="Download it again.")


def _check_finite(values: Tensor, source: str, weights: CheckpointWeights) -> None:
    """Raise CheckpointError when a converted tensor contains NaN or infinity."""
    if not values.numel():
        return
    least, most = values.aminmax()  # NaN propagates to both; isfinite of every value takes three times as long
    if not bool(torch.isfinite(least) & torch.isfinite(most)):
        if values.dtype == torch.float16 and weights.tensors[source].dtype != torch.float16:
            problem, cure = "holds NaN or infinity, or numbers that overflow float16", "Build with --dtype bfloat16, or download it again."
        else:
            problem, cure = "holds NaN or infinity", DOWNLOAD_AGAIN
        raise CheckpointError(f"{weights.location(source)} {problem}.", cure=cure)
