"""Writes an engine as SageMaker model data: a tar archive with serving.properties and LMI's layout for prebuilt engines."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import tarfile
import tempfile
from collections.abc import Callable
from collections.abc import Mapping as Environment
from contextlib import closing
from pathlib import Path
from typing import IO, Any

import msgspec

from stoker.base.errors import ConfigError, EngineError
from stoker.deploy.collected_settings import CollectedSettings, FoundValue, invalid_value
from stoker.deploy.deployment import EngineInfo, Origin
from stoker.deploy.engine import CONFIG, read_config
from stoker.deploy.lmi.keys import TABLE, canonical_key
from stoker.deploy.lmi.prebuilt import LOWERED, built_limit
from stoker.deploy.lmi.rank_names import rank_names
from stoker.deploy.syntax import properties
from stoker.deploy.syntax.pbtxt import format_message
from stoker.deploy.triton.export import five_models, proto_fields_of

Progress = Callable[[str, int, int | None], None]  # action, bytes done, bytes in total
Member = Path | bytes  # a file, or the content of one

_MODEL = "tensorrt_llm"
_ENGINE = f"{_MODEL}/1"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
_SUFFIXES = (".tar", ".tar.gz", ".tgz")
_LEVEL = 1  # weights compress little; higher levels take minutes longer for the same size
_BLOCK = 1 << 20
_BUILD_SECTIONS = ("build", "limits", "mapping", "quantization", "extra", "AWQ", "SMOOTH_QUANT", "any")
_SET = Origin("--set")


def package(engine: EngineInfo, out: Path, options: Environment[str, str], *, force: bool = False, progress: Progress | None = None) -> str:
    """Write the archive `out` and return its sha256. `options` are further keys of serving.properties.

    The file appears only when it is complete. The same engine and options produce the same bytes. Raises ConfigError for an unknown option
    and for a setting of the build, and EngineError for an incomplete engine.
    """
    if not out.name.endswith(_SUFFIXES):
        raise ConfigError(f"{out} is not the name of a tar archive.", cure=f"Use one of the suffixes {', '.join(_SUFFIXES)}.")
    if out.exists() and not force:
        raise ConfigError(f"{out} exists.", cure="Name another file, or replace it with --force.")
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is not a directory.", cure="Create it, or name a file in another directory.")
    members = _members(engine, _properties(engine, options))
    handle, name = tempfile.mkstemp(prefix=f".{out.name}.", dir=out.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            _write(file, members, compress=not out.name.endswith(".tar"), progress=progress)
        os.chmod(name, 0o644)
        os.replace(name, out)
    finally:
        Path(name).unlink(missing_ok=True)
    with out.open("rb") as done:
        return hashlib.file_digest(done, "sha256").hexdigest()


def export_lmi(engine: EngineInfo, path: Path, options: Environment[str, str]) -> list[Path]:
    """Write an archive with the signature of `Format.export`."""
    package(engine, path, options)
    return [path]


def _properties(engine: EngineInfo, options: Environment[str, str]) -> bytes:
    """The content of serving.properties."""
    mapping = engine.mapping
    lines = {"engine": "Python", "option.rolling_batch": "auto", "option.tensor_parallel_degree": str(mapping.tensor_parallel)}
    if mapping.pipeline_parallel > 1:
        lines["option.pipeline_parallel_degree"] = str(mapping.pipeline_parallel)
    if mapping.data_parallel > 1:
        lines |= {"option.data_parallel_size": str(mapping.data_parallel), "option.enable_expert_parallel": "true"}
    settings = CollectedSettings(TABLE)
    for key, value in options.items():
        settings.add(FoundValue(canonical_key(key), value, _SET, key))
        _check_build_setting(engine, settings, key, value)
        if re.search(r"\s#(\s|$)", value):
            raise invalid_value(_SET, key, value, "the text after # would be a comment", "Leave out the #.")
    return "".join(properties.format_line(key, value) for key, value in (lines | dict(options)).items()).encode()


def _check_build_setting(engine: EngineInfo, settings: CollectedSettings, key: str, value: str) -> None:
    """Raise ConfigError for a setting of the build, except a limit that is not above that of the engine."""
    row = TABLE[canonical_key(key)]
    section, _, name = row.target.partition(".")
    if section not in _BUILD_SECTIONS:
        return
    if name not in LOWERED:
        raise invalid_value(_SET, key, value, "the build decides it", "Build the engine with this setting.")
    if settings.get(row.target) > (built := built_limit(engine.limits, name)):
        raise invalid_value(_SET, key, value, f"it is above the engine's {name}={built}", "Lower it, or build the engine again.")


def _members(engine: EngineInfo, text: bytes) -> dict[str, Member]:
    """The files of the archive, or their content, by their names in it."""
    folder = Path(engine.path)
    listed = read_config(folder).get("files")
    if not isinstance(listed, dict):
        raise EngineError(f"{folder / CONFIG} is not the config of an engine.", cure="Name a directory that stoker build wrote.")
    llm = next(m for m in five_models(msgspec.structs.replace(engine, path=_ENGINE), {}) if m.kind == _MODEL)
    members: dict[str, Member] = {"serving.properties": text, f"{_MODEL}/config.pbtxt": format_message(proto_fields_of(llm)).encode()}
    members |= {f"{_MODEL}/{name}": folder / name for name in _TOKENIZER if name in listed}
    ranks = {f"rank{i}.safetensors": f"{name}.engine" for i, name in enumerate(rank_names(engine.dtype, engine.mapping))}
    return members | {f"{_ENGINE}/{ranks.get(name, name)}": _engine_file(folder, name, ranks) for name in sorted([CONFIG, *listed])}


def _engine_file(folder: Path, name: str, ranks: dict[str, str]) -> Path:
    """The path of an engine's file `name`. In an engine from such an archive, rank files have LMI's names."""
    candidates = [folder / name, *([folder / ranks[name]] if name in ranks else [])]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None or Path(name).name != name:
        raise EngineError(f"{folder / name} is missing.", cure="Copy the engine again, or build it again.")
    return found


def _write(file: IO[bytes], members: dict[str, Member], *, compress: bool, progress: Progress | None) -> None:
    """Write a tar archive of these members into `file`, compressed by gzip with `compress`."""
    counted = _Counted(sum(len(m) if isinstance(m, bytes) else m.stat().st_size for m in members.values()), progress)
    target: Any = gzip.GzipFile("", "wb", _LEVEL, file, mtime=0) if compress else file
    with tarfile.open(fileobj=target, mode="w|", bufsize=_BLOCK, format=tarfile.PAX_FORMAT) as tar:
        for name, member in members.items():
            info = tarfile.TarInfo(name)  # without owner and time, so that equal engines produce equal bytes
            info.size, info.mode = len(member) if isinstance(member, bytes) else member.stat().st_size, 0o644
            with closing(io.BytesIO(member) if isinstance(member, bytes) else member.open("rb")) as source:
                tar.addfile(info, counted.reading(source))
    if compress:
        target.close()


class _Counted:
    """Reads the files that are packed into an archive, one after the other, and reports the number of bytes read."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress, self._done = total, progress, 0
        self._source: IO[bytes] = io.BytesIO()

    def reading(self, source: IO[bytes]) -> Any:
        """This object, whose `read` now reads `source` instead of the previous file."""
        self._source = source
        return self

    def read(self, size: int = -1) -> bytes:
        """Read from the source, and report the bytes read so far."""
        data = self._source.read(size)
        self._done += len(data)
        if self._progress is not None:
            self._progress("packing", self._done, self._total)
        return data
