"""An engine's config.json: everything the runtime must know, in one value."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec

from stoker.base.config import DEVICES, DTYPES, Limits, Mapping, check_choice
from stoker.base.errors import ConfigError, EngineError
from stoker.core.model_config import ModelConfig, decode_model, encode_model
from stoker.engine.tensor_file import FileRecord
from stoker.layers.shard import Sharding
from stoker.quant import recipe as recipes
from stoker.quant.recipe import Recipe

FORMAT_VERSION = 3


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The device an engine was laid out for."""

    device: str = "cpu"  # cpu, cuda
    compute_capability: str | None = None  # "9.0"; None: any device of the kind


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint an engine was made of."""

    name: str  # the directory's or file's name, or the hub id
    fingerprint: str  # sha256 over the checkpoint's files


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What config.json holds."""

    stoker_version: str
    model: ModelConfig
    limits: Limits
    dtype: str  # of arithmetic and of weights that are not quantized
    mapping: Mapping = Mapping()
    recipe: Recipe = Recipe()
    target: Target = Target()
    weights: str = "files"  # files; dummy: random ones are made at load
    checkpoint: Origin
    files: dict[str, FileRecord] = {}  # every other file of the directory
    checks: dict[str, Any] = {}  # what the build verified, for people to read

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("target.device", self.target.device, DEVICES)
        check_choice("weights", self.weights, ("files", "dummy"))
        check_choice("recipe.kv_cache", self.recipe.kv_cache, (None, *recipes.KV_DTYPES))

    @property
    def sharding(self) -> Sharding:
        """How each stage's weights are spread over its tensor-parallel ranks."""
        mapping = self.mapping
        return Sharding(size=mapping.tensor_parallel, grain=self.recipe.grain, by_expert=mapping.expert_parallel)


def address(config: EngineConfig) -> str:
    """What an engine is, by content: a digest of format version, model, settings, target and checkpoint fingerprint."""
    bare = msgspec.structs.replace(config, files={}, checks={}, stoker_version="")
    bare = msgspec.structs.replace(bare, checkpoint=msgspec.structs.replace(bare.checkpoint, name=""))
    return hashlib.sha256(encode(bare)).hexdigest()[:40]


def rank_metadata(config: EngineConfig, rank: int) -> dict[str, str]:
    """What a rank's file says of itself, so that one of another build, or of another rank, is refused."""
    return {"engine": address(config), "rank": f"{rank} of {config.mapping.world_size}"}


def encode(config: EngineConfig) -> bytes:
    """The text of config.json."""
    plain = {"format_version": FORMAT_VERSION, "stoker_version": config.stoker_version}
    plain["model"] = encode_model(config.model)
    plain["recipe"] = recipes.encode(config.recipe)
    for name in ("limits", "dtype", "mapping", "target", "weights", "checkpoint", "files", "checks"):
        plain[name] = msgspec.to_builtins(getattr(config, name))
    return json.dumps(plain, indent=1).encode() + b"\n"


def decode(plain: dict[str, Any], path: object) -> EngineConfig:
    """The inverse of `encode`, from parsed JSON. Raises EngineError naming `path` and the field that is wrong."""
    try:
        fields = {name: plain[name] for name in plain if name not in ("format_version", "model", "recipe")}
        fields["model"] = decode_model(plain["model"])
        fields["recipe"] = recipes.decode(plain["recipe"])
        names = EngineConfig.__struct_fields__
        types = {f.name: f.type for f in msgspec.structs.fields(EngineConfig)}
        plain_names = [n for n in names if n in fields and n not in ("model", "recipe")]
        return EngineConfig(**fields | {n: msgspec.convert(fields[n], types[n]) for n in plain_names})
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as problem:
        raise EngineError(f"{path}: config.json is damaged ({problem!r}).", cure="Build the engine again.") from None
