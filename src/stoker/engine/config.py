"""The config.json of an engine: everything that the runtime needs besides the weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from stoker.base.config import DEVICES, DTYPES, Limits, Mapping, check_choice
from stoker.base.errors import ConfigError, EngineError, first_line
from stoker.core.model_config import ModelConfig, decode_model, encode_model
from stoker.engine.config_file import FORMAT_VERSION
from stoker.engine.file_record import FileRecord
from stoker.layers.shard import Sharding
from stoker.quant.recipe import KV_DTYPES, Recipe, decode_recipe, encode_recipe


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The device that an engine was built for."""

    device: str = "cpu"
    """`cpu` or `cuda`."""

    compute_capability: str | None = None
    """Such as `9.0`. None: any device of that kind."""


class CheckpointOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint that an engine was built from."""

    name: str
    """Name of the directory or file, or the hub id."""

    fingerprint: str
    """SHA-256 over the checkpoint's files."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The content of config.json."""

    stoker_version: str
    """Version of Stoker that built the engine."""

    model: ModelConfig
    """Sizes and blocks of the model."""

    limits: Limits
    """Largest batch and sequence lengths."""

    dtype: str
    """Dtype of activations and of weights that are not quantized."""

    mapping: Mapping = Mapping()
    """Number of tensor-parallel and pipeline-parallel ranks."""

    recipe: Recipe = Recipe()
    """Weight formats of all linears, and the dtype of the KV cache."""

    target: Target = Target()
    """Device that the engine runs on."""

    weights: str = "files"
    """`files`, or `dummy`: random weights are created at load."""

    checkpoint: CheckpointOrigin
    """Where the weights come from."""

    files: dict[str, FileRecord] = {}
    """Size and digest of every other file of the directory."""

    checks: dict[str, Any] = {}
    """What the build verified, for people to read."""

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("target.device", self.target.device, DEVICES)
        check_choice("weights", self.weights, ("files", "dummy"))
        check_choice("recipe.kv_cache", self.recipe.kv_cache, (None, *KV_DTYPES))

    @property
    def sharding(self) -> Sharding:
        """How the weights of each pipeline stage are split over its ranks."""
        mapping = self.mapping
        return Sharding(
            size=mapping.tensor_parallel,
            unit=self.recipe.shard_unit,
            by_expert=mapping.expert_parallel,
            replicas=mapping.data_parallel,
        )


def content_address(config: EngineConfig) -> str:
    """A digest of everything that determines the engine's content: format version, model, settings, target and checkpoint fingerprint."""
    bare = msgspec.structs.replace(config, files={}, checks={}, stoker_version="")
    bare = msgspec.structs.replace(bare, checkpoint=msgspec.structs.replace(bare.checkpoint, name=""))
    return hashlib.sha256(encode_engine_config(bare)).hexdigest()[:40]


def rank_metadata(config: EngineConfig, rank: int) -> dict[str, str]:
    """The metadata of a rank's file, which distinguishes it from files of other builds and other ranks."""
    return {"engine": content_address(config), "rank": f"{rank} of {config.mapping.world_size}"}


def encode_engine_config(config: EngineConfig) -> bytes:
    """The content of config.json."""
    plain: dict[str, Any] = {"format_version": FORMAT_VERSION, "stoker_version": config.stoker_version}
    plain["model"] = encode_model(config.model)
    plain["recipe"] = encode_recipe(config.recipe)
    for name in ("limits", "dtype", "mapping", "target", "weights", "checkpoint", "files", "checks"):
        plain[name] = msgspec.to_builtins(getattr(config, name))
    if config.mapping.data_parallel == 1:  # engines that were built before this field existed keep their content address
        del plain["mapping"]["data_parallel"]
    return json.dumps(plain, indent=1).encode() + b"\n"


def decode_engine_config(plain: dict[str, Any], path: object) -> EngineConfig:
    """The inverse of `encode_engine_config`, from parsed JSON. Raises EngineError naming `path` and the invalid field."""
    types = {field.name: field.type for field in msgspec.structs.fields(EngineConfig)}
    decoders: dict[str, Callable[[Any], Any]] = {name: partial(msgspec.convert, type=types[name]) for name in types}
    decoders |= {"model": decode_model, "recipe": decode_recipe}
    fields = {name: value for name, value in plain.items() if name != "format_version"}
    part = ""
    try:
        for name in decoders.keys() & fields.keys():
            part = f"{name}: "
            fields[name] = decoders[name](fields[name])
        part = ""
        return EngineConfig(**fields)
    except (TypeError, ValueError, ConfigError) as problem:
        raise EngineError(f"{path}: config.json is damaged ({part}{first_line(problem)}).", cure="Build the engine again.") from None
