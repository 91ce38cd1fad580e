"""The `Deployment`: the settings in a deployment folder, in the same form for every format, with the file and line of each one."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping as Environment
from pathlib import Path
from typing import Any, Literal

import msgspec

from stoker.base.config import DTYPES, Limits, Mapping, RuntimeConfig, check_choice
from stoker.base.errors import ConfigError
from stoker.base.fields.errors import InvalidValueError
from stoker.base.registry import Registry
from stoker.server.settings import ServerSettings

Section = Literal["build", "runtime", "server"]
Severity = Literal["info", "warning"]


class Origin(msgspec.Struct, frozen=True):
    """The place where a setting was written. `line` counts from 1; 0 for sources without lines (environment, default)."""

    source: str  # a file's path, "environment" or "default"
    line: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


DEFAULT = Origin("default")


class PlacedError(ConfigError):
    """A ConfigError about the text at `origin`. Its message is the origin and `description`, a sentence."""

    def __init__(self, origin: Origin, description: str, cure: str = "") -> None:
        self.origin = origin
        self.description = description
        super().__init__(f"{origin}: {description}", cure=cure)

    @classmethod
    def of_value(cls, origin: Origin, key: str, error: InvalidValueError) -> PlacedError:
        """The error for a value that `key` does not accept."""
        plain = error.config_error(key)
        return cls(origin, plain.message, plain.cure)


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One setting that is used, as the report of `stoker serve --dry-run` lists it."""

    section: Section
    name: str  # the name of the setting in Stoker, such as max_beam_width
    value: Any
    origin: Origin = DEFAULT
    key: str = ""  # the name in the format, such as option.max_rolling_batch_size


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """A remark about one key: the reason why it has no effect, or an assumption."""

    severity: Severity
    key: str
    text: str
    origin: Origin = DEFAULT

    def __str__(self) -> str:
        return f"{self.origin}: {self.key}: {self.text}"


class EngineSource(msgspec.Struct, frozen=True, kw_only=True):
    """A built engine: a local directory, a hub id, or an s3:// or http(s):// address."""

    location: str
    revision: str | None = None
    digest: str | None = None  # sha256 of an archive, if the format states it
    token_secret: str | None = None  # *name* of the secret with the access token of a private repository, never its value
    mapping: Mapping | None = None  # the ranks that the format requires of the engine; None: no requirement


class BuildOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint and the settings of the engine to build from it."""

    checkpoint: str  # a local directory, a hub id, or an s3:// or http(s):// address
    name: str = ""  # the name that the engine records of its checkpoint; empty: that of `checkpoint`
    revision: str | None = None
    digest: str | None = None  # sha256 of an archive, if the format states it
    token_secret: str | None = None  # *name* of the secret with the access token of a private repository, never its value
    trust_remote_code: bool = False
    architecture: str | None = None  # a hint of the format (llama, chatglm2_6b); None: read it from the checkpoint
    dtype: str | None = None  # None: the dtype of the checkpoint
    quantization: str | None = None  # a row of the quantization formats; None: unquantized
    quantization_settings: dict[str, Any] = {}  # settings of that format: group size, alpha, number of calibration samples
    kv_cache_dtype: str | None = None  # None: the dtype of the engine
    limits: Limits = Limits()
    mapping: Mapping = Mapping()
    tokenizer: str | None = None  # location of the tokenizer; None: with the checkpoint
    extra: dict[str, Any] = {}  # further settings of the builder by name, such as rotary_base

    def __post_init__(self) -> None:
        if not self.checkpoint:
            raise ConfigError("checkpoint='' is refused.", cure="Name a local directory, a hub id or an s3:// address.")
        if self.dtype is not None:
            check_choice("dtype", self.dtype, DTYPES)


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of an engine that an export needs, from its config.json."""

    path: str  # absolute path of the engine directory
    architecture: str
    vocab_size: int
    dtype: str = "float16"
    device: str = "cuda"
    limits: Limits = Limits()
    mapping: Mapping = Mapping()


class RequiredNodes(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes that a format requires. None: any."""

    num_nodes: int | None = None  # hosts
    participants: tuple[int, ...] | None = None  # processes of the job that hold ranks
    origin: str = ""  # the file, for messages

    def check_one_host(self) -> None:
        """Raise ConfigError if several hosts are required. Called where an engine runs without the command line's nodes."""
        if self.num_nodes not in (None, 1):
            raise ConfigError(
                f"{self.origin}: num_nodes={self.num_nodes}, and the engine would run on one host.",
                cure="Use stoker serve --nnodes, or stoker tritonserver in a job, or change num_nodes.",
            )


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """The settings in a folder: the source of the engine, and how it is run and served."""

    format: str  # name of the row of FORMATS
    path: str  # the folder or file that was read
    source: EngineSource | BuildOptions
    tokenizer: str | None = None  # directory or hub id; None: that of the engine
    runtime: RuntimeConfig = RuntimeConfig()
    drafts: EngineSource | None = None  # of `runtime.speculate`, if it is a location to fetch
    server: ServerSettings = ServerSettings()
    log_level: str | None = None  # of the processes of the server, unless the command line or the environment sets one
    settings: tuple[Setting, ...] = ()  # the settings that are used, in the order of reading
    nodes: RequiredNodes = RequiredNodes()
    notes: tuple[Note, ...] = ()  # remarks, such as why a key has no effect


class Format(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment format.

    file: name of the file that configures a folder. Empty: the format has no such file.
    recognise: whether a path has this format.
    load(path, environment): reads it. Raises ConfigError with file, line, key and cure for a value that is not supported.
    complete(deployment, local): fills in settings that depend on the checkpoint or engine, once it is the local directory `local`.
        None: the format has no such settings.
    export(engine, path, options): writes an engine in this format and returns the files. None: the format is only read.
    """

    name: str
    file: str = ""
    recognise: Callable[[Path], bool]
    load: Callable[[Path, Environment[str, str]], Deployment]
    complete: Callable[[Deployment, Path], Deployment] | None = None
    export: Callable[[EngineInfo, Path, Environment[str, str]], list[Path]] | None = None


FORMATS: Registry[Format] = Registry("deployment format")


def configuration_files() -> tuple[str, ...]:
    """The names of the configuration files of all formats."""
    return tuple(row.file for row in map(FORMATS.get, FORMATS) if row.file)


def has_configuration_file(path: Path) -> bool:
    """Whether a folder has the configuration file of a format, which takes precedence over an engine or checkpoint in it."""
    return any((path / name).is_file() for name in configuration_files())


def find_format(path: Path) -> Format:
    """The format of `path`. Raises ConfigError when no format, or more than one, recognises `path`."""
    found = [row for row in map(FORMATS.get, FORMATS) if row.recognise(path)]
    if len(found) == 1:
        return found[0]
    if not found:
        configs = [name for name in ("config.json", *configuration_files()) if (path / name).is_file()]
        damaged = f" Its {' and its '.join(configs)} is damaged or belongs to another program." if configs else ""
        raise ConfigError(f"{path} is none of: {', '.join(FORMATS)}.{damaged}", cure="Name an engine, a checkpoint or a deployment folder.")
    names = " and of ".join(row.name for row in found)
    raise ConfigError(f"{path} is of the format {names}.", cure="Leave the files of one format in the folder.")
