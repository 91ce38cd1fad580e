"""A row of the table of GGUF architectures: how the metadata becomes the data of a config.json, and how tensors are named."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stoker.builder.checkpoint.gguf.metadata import Metadata
from stoker.core.model_config import ModelConfig
from stoker.models.architecture import TensorNames, Transformed

# Engine module → GGUF module, of one layer: without "layers.{i}." and "blk.{i}.".
ModuleNames = Mapping[str, str | tuple[str, ...] | Transformed]

# Converts metadata to the data of a config.json: the keys that the row of the models table reads, without dtype and token ids.
MetadataReader = Callable[[Metadata], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFArchitecture:
    """One value of `general.architecture`."""

    name: str
    model_types: tuple[str, ...]  # `model_type` of config.json: the first unless read_config returns another one
    read_config: MetadataReader
    # The modules of a layer that are not as in `names.COMMON_NAMES`, for the names of all tensors in the file.
    names: Callable[[Container[str]], ModuleNames] = lambda tensors: {}
    # Modules that are not in a layer, or only in some layers, under their full engine and GGUF names.
    model_names: Callable[[ModelConfig], TensorNames] = lambda config: {}
    computed: Callable[[Metadata], dict[str, Tensor]] = lambda m: {}  # float32 tensors that are stored as metadata, by their name
    permuted: bool = False  # rows of q and k are stored in the order of interleaved rotary pairs (2i, 2i + 1)
    ignored_keys: tuple[str, ...] = ()  # fnmatch patterns of metadata keys without effect, beyond those of metadata.NO_EFFECT
    ignored_tensors: tuple[str, ...] = ()  # fnmatch patterns of tensors without effect
