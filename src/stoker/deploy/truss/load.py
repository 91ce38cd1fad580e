"""Reads a Truss: converts a config.yaml of any generation to a Deployment."""

from __future__ import annotations

import re
from collections.abc import Iterator
from collections.abc import Mapping as Environment
from pathlib import Path

import msgspec

from stoker.base import yaml_tree
from stoker.base.config import Limits, Mapping, RuntimeConfig
from stoker.base.errors import ConfigError
from stoker.base.yaml_tree import Node
from stoker.deploy.collected_settings import CollectedSettings, FoundValue, invalid_value
from stoker.deploy.deployment import BuildOptions, Deployment, EngineSource, Origin
from stoker.deploy.devices import visible_gpus
from stoker.deploy.secrets import check_secret_name
from stoker.deploy.sources.store import is_inside
from stoker.deploy.truss.dependent_settings import apply_dependent_settings, is_before_trt_llm, read_draft_repository
from stoker.deploy.truss.keys import TABLE
from stoker.deploy.truss.runtime_packages import add_runtime_packages
from stoker.deploy.truss.shape import SECTIONS, check_shape
from stoker.server.protocols.truss.options import TrussOptions
from stoker.server.settings import ServerSettings

FILE = "config.yaml"
PROTOCOLS = ("truss", "openai", "anthropic")
_TRUSS_KEYS = re.compile(rb"^(trt_llm|model_metadata|model_name|python_version|resources|external_package_dirs)\s*:", re.MULTILINE)


def is_truss(path: Path) -> bool:
    """Whether `path` is a config.yaml of a Truss, or a folder with one."""
    file = _config_file(path)
    return file.is_file() and _TRUSS_KEYS.search(_read_bounded(file)) is not None


def load_truss(path: Path, environment: Environment[str, str]) -> Deployment:
    """The deployment for a folder or config.yaml. Raises ConfigError with the file, line, path of the key, and fix."""
    file = _config_file(path)
    root = yaml_tree.parse(_read_bounded(file), str(file))
    if not isinstance(root.value, dict):
        raise ConfigError(f"{file} is not a mapping of keys.", cure="Write key: value lines.")
    settings = CollectedSettings(TABLE, typed=True)
    check_shape(root, str(file))
    for found in _walk(root, "", str(file), settings):
        settings.add(found)
    if is_before_trt_llm(settings):
        add_runtime_packages(file.parent, settings)
    apply_dependent_settings(settings, visible_gpus(environment))
    return _deployment(settings, file.parent)


def _config_file(path: Path) -> Path:
    """The path of the config.yaml."""
    return path if path.name == FILE else path / FILE


def _read_bounded(file: Path) -> bytes:
    """The content of a file, of which at most one byte more than the limit is read."""
    with file.open("rb") as opened:
        return opened.read(yaml_tree.MAX_BYTES + 1)


def _walk(node: Node, path: str, file: str, settings: CollectedSettings) -> Iterator[FoundValue]:
    """Every value of the YAML tree with its dotted path. A null section counts as empty and a null value as unset, as in Truss."""
    for name, child in node.value.items():
        key, origin = f"{path}{name}", Origin(file, child.line)
        if child.value is None and (key in TABLE or key in SECTIONS):
            continue
        if key in TABLE:
            yield FoundValue(key, child.plain(), origin)
        elif key in SECTIONS:
            if not isinstance(child.value, dict):
                raise invalid_value(origin, key, child.plain(), "it must be a mapping of keys", "Indent its keys under it.")
            yield from _walk(child, key + ".", file, settings)
        elif path == "model_metadata.":
            settings.note(key, "it is information for people", origin)
        else:
            yield FoundValue(key, None, origin)  # CollectedSettings.add raises for the unknown key


def _deployment(settings: CollectedSettings, folder: Path) -> Deployment:
    """The Deployment with the collected settings."""
    source = _engine_source(settings, folder) if settings.get("engine.location") else _build_options(settings)
    tokenizer, drafts = settings.get("engine.tokenizer"), read_draft_repository(settings)
    runtime = settings.build(RuntimeConfig, "runtime")
    if drafts is not None:
        drafts = msgspec.structs.replace(drafts, location=_in_folder(drafts.location, folder))
        runtime = msgspec.structs.replace(runtime, speculate=drafts.location)
    settings.note_unused_drafts(runtime, "speculator.speculative_decoding_mode")
    secrets = settings.pop("server.secrets")
    options = settings.build(TrussOptions, "options")
    server = settings.build(ServerSettings, "server", protocols=PROTOCOLS, options=options)
    if secrets:
        settings.note("secrets", f"names: {', '.join(secrets.value) or 'none'}", secrets.origin)
    return Deployment(
        format="truss",
        path=str(folder),
        source=source,
        tokenizer=_in_folder(tokenizer, folder) if tokenizer else None,
        runtime=runtime,
        drafts=drafts,
        server=server,
        log_level="debug" if settings.get("debug_logs") else None,
        settings=settings.settings(),
        notes=tuple(settings.notes),
    )


def _engine_source(settings: CollectedSettings, folder: Path) -> EngineSource:
    """The built engine that the Truss names."""
    mapping = settings.build(Mapping, "mapping") if settings.section("mapping") else None
    location = _in_folder(settings.get("engine.location"), folder)
    return EngineSource(location=location, token_secret="hf_access_token", mapping=mapping)


def _in_folder(location: str, folder: Path) -> str:
    """The absolute path of a directory in the Truss, or the location unchanged if it is none."""
    return str((folder / location).resolve()) if is_inside(location) and (folder / location).is_dir() else location


def _build_options(settings: CollectedSettings) -> BuildOptions:
    """The checkpoint and the settings of the build."""
    settings.set_default("build.token_secret", "hf_access_token")
    check_secret_name(settings.get("build.token_secret"))
    limits, mapping = settings.build(Limits, "limits"), settings.build(Mapping, "mapping")
    quantization = settings.section("quantization")
    return settings.build(BuildOptions, "build", quantization_settings=quantization, limits=limits, mapping=mapping)
