"""What a folder asks for: one value for every deployment format, with the file and line each setting came from."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping as Environment
from pathlib import Path
from typing import Any, Literal

import msgspec

from stoker.base.config import DTYPES, Limits, Mapping, RuntimeConfig, check_choice
from stoker.base.errors import ConfigError
from stoker.base.registry import Registry
from stoker.server.settings import ServerSettings


class Origin(msgspec.Struct, frozen=True):
    """Where a setting was written. `line` counts from 1; 0 when the source has no lines (environment, default)."""

    source: str  # a file's path, "environment" or "default"
    line: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


DEFAULT = Origin("default")


class PlacedError(ConfigError):
    """A ConfigError that knows where the offending text stands; the message begins with the place."""

    def __init__(self, origin: Origin, what: str, cure: str = "") -> None:
        self.origin = origin
        self.what = what
        super().__init__(f"{origin}: {what}", cure=cure)


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the "understood" tables."""

    section: Literal["build", "runtime", "server"]
    name: str  # Stoker's name of the setting: max_beam_width
    value: Any
    origin: Origin = DEFAULT
    key: str = ""  # the format's own spelling, where it differs: option.max_rolling_batch_size


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """Something a person should know of one key: why it has no effect, or what was assumed."""

    severity: Literal["info", "warning"]
    key: str
    text: str
    origin: Origin = DEFAULT

    def __str__(self) -> str:
        return f"{self.origin}: {self.key}: {self.text}"


class EngineSource(msgspec.Struct, frozen=True, kw_only=True):
    """A built engine: a local directory, a hub id, or an s3:// or http(s):// address."""

    location: str
    revision: str | None = None
    digest: str | None = None  # sha256 of an archive, when the format names one
    token_secret: str | None = None  # the *name* of the secret that opens a private repository; never its value
    mapping: Mapping | None = None  # the ranks that the format names; they must be the engine's. None: it names none


class BuildOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint, and the engine to make of it. Everything a format may say about the build."""

    checkpoint: str  # a local directory, a hub id, or an s3:// or http(s):// address
    revision: str | None = None
    digest: str | None = None  # sha256 of an archive, when the format names one
    token_secret: str | None = None  # the *name* of the secret that opens a private repository; never its value
    trust_remote_code: bool = False
    architecture: str | None = None  # a hint the format gives (llama, chatglm2_6b); None: read it from the checkpoint
    dtype: str | None = None  # None: as the checkpoint says
    quantization: str | None = None  # a row of quant/; None: none
    quantization_settings: dict[str, Any] = {}  # of that row: group size, alpha, calibration sample count
    kv_cache_dtype: str | None = None  # None: the engine's dtype
    limits: Limits = Limits()
    mapping: Mapping = Mapping()
    tokenizer: str | None = None  # where the tokenizer is, when not with the checkpoint
    extra: dict[str, Any] = {}  # what only one format knows and the builder understands by name: rotary_base

    def __post_init__(self) -> None:
        if not self.checkpoint:
            raise ConfigError("checkpoint='' is refused.", cure="Name a local directory, a hub id or an s3:// address.")
        if self.dtype is not None:
            check_choice("dtype", self.dtype, DTYPES)


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an export must know of an engine, read from its config.json."""

    path: str  # absolute path of the engine directory
    architecture: str
    vocab_size: int
    dtype: str = "float16"
    limits: Limits = Limits()
    mapping: Mapping = Mapping()


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder asks for: one source, how to run it, how to serve it."""

    format: str  # the row of FORMATS that read it
    path: str  # the folder or file that was read
    source: EngineSource | BuildOptions
    tokenizer: str | None = None  # directory or hub id; None: the engine's own
    runtime: RuntimeConfig = RuntimeConfig()
    server: ServerSettings = ServerSettings()
    settings: tuple[Setting, ...] = ()  # every key that was understood, in reading order
    notes: tuple[Note, ...] = ()  # keys that have no effect here, and why

    def table(self, section: str) -> list[tuple[str, str, str]]:
        """Rows (name, value, where it came from) of one "understood" table."""
        return [(_title(s), str(s.value), str(s.origin)) for s in self.settings if s.section == section]


class Format(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment format: how to tell it, read it and write it.

    `load` raises ConfigError naming file, line, key and cure for what cannot be honoured. `complete` gets the deployment and its
    checkpoint (or engine) once that is a local directory, and fills in what depends on it; None where nothing does. `export`
    writes an engine in this format and returns the files written; None where a format is only read.
    """

    name: str
    recognise: Callable[[Path], bool]
    load: Callable[[Path, Environment[str, str]], Deployment]
    complete: Callable[[Deployment, Path], Deployment] | None = None
    export: Callable[[EngineInfo, Path, Environment[str, str]], list[Path]] | None = None


FORMATS: Registry[Format] = Registry("deployment format")


def recognise(path: Path) -> Format:
    """The one format of `path`. Raises ConfigError when none, or more than one, recognises it."""
    found = [FORMATS.get(name) for name in FORMATS if FORMATS.get(name).recognise(path)]
    if len(found) == 1:
        return found[0]
    if not found:
        held = [name for name in ("config.json", "config.yaml") if (path / name).is_file()]
        damaged = f" Its {' and its '.join(held)} is damaged, or of something else." if held else ""
        raise ConfigError(f"{path} is none of: {', '.join(FORMATS)}.{damaged}", cure="Name an engine, a checkpoint or a deployment folder.")
    raise ConfigError(f"{path} reads as {' and as '.join(f.name for f in found)}.", cure="Keep one of the two in the folder.")


def _title(setting: Setting) -> str:
    return f"{setting.name} ({setting.key})" if setting.key and setting.key != setting.name else setting.name
