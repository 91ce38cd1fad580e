"""A row of the architecture table: how a config.json is read, and which checkpoint tensors make each engine tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from stoker.core.model_config import ModelConfig
from stoker.models.config_values import Kind

# Converts the data of a Hugging Face config.json into a ModelConfig.
ConfigReader = Callable[[dict[str, Any]], ModelConfig]


@dataclass(frozen=True, slots=True)
class Transformed:
    """An engine tensor that a function computes from checkpoint tensors.

    `transform` receives the tensors named in `sources`, in that order, and the model config. Source names may contain `{i}` and `{e}`. The
    function is applied to weights and biases alike, and to meta tensors when shapes are checked.

    `restore` is its inverse, with which an engine is exported as a checkpoint: it receives the engine tensor and those of the engine
    modules `partners`, which are made of the same sources, and returns all sources. One of several partners has a `restore`. An engine of
    an architecture with an entry that has neither cannot be exported.

    `moves` is "rows" or "columns" if `transform` only moves or selects these, in which case quantized weights keep their stored bits, and
    "expert_rows" if it transposes stacked experts [experts, in, out] and moves their rows in the same way.
    """

    sources: tuple[str, ...]
    transform: Callable[[list[Tensor], ModelConfig], Tensor]
    restore: Callable[[list[Tensor], ModelConfig], tuple[Tensor, ...]] | None = None
    partners: tuple[str, ...] = ()
    moves: Literal["rows", "columns", "expert_rows"] | None = None


# Maps engine names to checkpoint names. Both are module names: ".weight" and ".bias" are appended on both sides. "{i}" stands for the
# layer index and "{e}" for the expert index; experts are stacked along a new first axis. A tuple is concatenated along the rows. A
# checkpoint name that already ends in ".weight" or ".bias", and an engine name given in full, are used as they are.
TensorNames = dict[str, str | tuple[str, ...] | Transformed]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Architecture:
    """One kind of model, registered under the name that config.json lists in `architectures`."""

    name: str
    read_config: ConfigReader
    tensor_names: Callable[[ModelConfig], TensorNames]
    family: str  # the published models, for documentation: "Llama 1, 2, 3"
    oracle: str  # the implementation that the parity test compares with, for documentation
    model_types: tuple[str, ...] = ()  # values of config.json's `model_type`, used when `architectures` is absent
    aliases: tuple[str, ...] = ()  # other names in `architectures`
    variant: Callable[[dict[str, Any]], str | None] | None = None  # returns the row to use instead, for names that several models share
    ignored_tensors: tuple[str, ...] = ()  # fnmatch patterns of checkpoint tensors that hold no weights (rotary tables, masks)
    kinds: Mapping[str, Kind] = field(default_factory=dict)  # of values of config.json, where they are not those of config_values.KINDS
    ignored_keys: tuple[str, ...] = ()  # fnmatch patterns of config.json keys without effect, beyond those of config_data.NO_EFFECT
    tensor_renames: tuple[tuple[str, str], ...] = ()  # (regular expression, replacement) for older spellings of tensor names
    stacks_experts: bool = False  # whether checkpoints may have stacked experts instead of single ones, see `models.stacked_experts`
    plain_export: bool = False  # whether exported checkpoints have plain numbers only: quantized ones have experts of another kind
    # Foreign option that names a model version, such as gpt_model_version → the values that agree with a config.json.
    version_options: Mapping[str, Callable[[dict[str, Any]], tuple[str, ...]]] = field(default_factory=dict)
    # Engine module → the number of parts of a fused linear that each of its sources has, where one has several; for the export.
    source_parts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    tensor_parallel: str = "any"  # restrictions on the number of ranks, for documentation

    def canonical_name(self, tensor: str) -> str:
        """The canonical name of a checkpoint tensor: older names are replaced by those that `tensor_names` uses."""
        for pattern, replacement in self.tensor_renames:
            tensor = re.sub(pattern, replacement, tensor)
        return tensor
