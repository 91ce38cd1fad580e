"""Truss folders: config.yaml of every generation, read into a Deployment."""

from __future__ import annotations

import re
from collections.abc import Iterator
from collections.abc import Mapping as Environment
from pathlib import Path
from typing import Any

from stoker.base.config import Limits, Mapping, RuntimeConfig
from stoker.base.errors import ConfigError
from stoker.deploy import secrets, truss_packages, yaml_tree
from stoker.deploy.deployment import FORMATS, BuildOptions, Deployment, EngineSource, Format, Origin
from stoker.deploy.devices import check_world, visible_gpus
from stoker.deploy.fields import Collected, Found, refusal
from stoker.deploy.sources.store import inside
from stoker.deploy.truss_export import export
from stoker.deploy.truss_shape import SECTIONS, check_shape
from stoker.deploy.truss_table import TABLE
from stoker.deploy.yaml_tree import Node
from stoker.server.protocols.truss.options import TrussOptions
from stoker.server.settings import ServerSettings

FILE = "config.yaml"
OPENAI = "openai-compatible"
LEGACY = "force-legacy-api-non-openai-compatible"
_MARK = re.compile(rb"^(trt_llm|model_metadata|model_name|python_version|resources|external_package_dirs)\s*:", re.MULTILINE)
_UNREADABLE = {"GCS": "Google Cloud Storage", "AZURE": "Azure", "BASETEN_TRAINING": "Baseten's training store"}


def recognise(path: Path) -> bool:
    file = _file(path)
    return file.is_file() and _MARK.search(_read_bounded(file)) is not None


def load(path: Path, environment: Environment[str, str]) -> Deployment:
    """What the folder's config.yaml asks for. Raises ConfigError with file, line, path to the key, and cure."""
    file = _file(path)
    root = yaml_tree.parse(_read_bounded(file), str(file))
    if not isinstance(root.value, dict):
        raise ConfigError(f"{file} is not a mapping of keys.", cure="Write key: value lines.")
    asked = Collected(TABLE, typed=True)
    check_shape(root, str(file))
    for found in _walk(root, "", str(file), asked):
        asked.put(found.key, found.value, found.origin)
    if _oldest(asked):
        truss_packages.read(file.parent, asked)
    _settle(asked, environment)
    return _deployment(asked, file.parent)


def _file(path: Path) -> Path:
    return path if path.name == FILE else path / FILE


def _read_bounded(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(yaml_tree.MAX_BYTES + 1)


def _walk(node: Node, path: str, file: str, asked: Collected) -> Iterator[Found]:
    """Every key that has a row, by its dotted path. A section that is null is empty, and a null value is unset, as in Truss."""
    for name, child in node.value.items():
        key, origin = f"{path}{name}", Origin(file, child.line)
        if child.value is None and (key in TABLE or key in SECTIONS):
            continue
        if key in TABLE:
            yield Found(key, child.plain(), origin)
        elif key in SECTIONS:
            if not isinstance(child.value, dict):
                raise refusal(origin, key, child.plain(), "it must be a mapping of keys", "Indent its keys under it.")
            yield from _walk(child, key + ".", file, asked)
        elif path == "model_metadata.":
            asked.note(key, "it is shown to people only", origin)
        else:
            yield Found(key, None, origin)  # put() names the nearest


def _settle(asked: Collected, environment: Environment[str, str]) -> None:
    asked.drop("stack")
    _settle_repository(asked)
    _settle_quantization(asked)
    _settle_lengths(asked)
    _settle_tags(asked)
    _settle_transport(asked)
    _settle_secrets(asked)
    _settle_devices(asked, environment)
    name = asked.drop("name")
    if name:
        asked.default_from("server.model_name", name)
    asked.default("server.http_port", 8080)


def _settle_repository(asked: Collected) -> None:
    """checkpoint_repository's source says how its repo is spelled."""
    setting = asked.drop("repository.source")
    repo = asked.get("build.checkpoint", "")
    if setting is None:
        return
    if setting.value in _UNREADABLE:
        raise refusal(
            setting.origin, setting.key, setting.value, f"{_UNREADABLE[setting.value]} is not read", "Use HF, S3, LOCAL or REMOTE_URL."
        )
    prefix = {"S3": ("s3://",), "REMOTE_URL": ("https://", "http://")}.get(setting.value, ())
    where = asked.where("build.checkpoint")
    if prefix and not repo.startswith(prefix):
        raise refusal(
            where.origin,
            where.key,
            repo,
            f"source {setting.value} needs an address that begins with {prefix[0]}",
            "Correct one of the two.",
        )
    if not prefix and "://" in repo:
        raise refusal(where.origin, where.key, repo, f"source {setting.value} takes no address", "Set source to S3 or REMOTE_URL.")


def _settle_quantization(asked: Collected) -> None:
    setting = asked.drop("quantization_type")
    weights, cache = setting.value if setting else (None, None)
    if setting and weights:
        asked.set("build.quantization", weights, setting.origin, setting.key)
    if setting and cache:
        asked.set("build.kv_cache_dtype", cache, setting.origin, setting.key)
    for place in [p for p in asked.places() if p.startswith("quantization.")] if not weights else ():
        unused = asked.where(place)
        asked.drop(place)
        asked.note(unused.key, "nothing is calibrated without a quantization_type", unused.origin)


def _settle_lengths(asked: Collected) -> None:
    total = asked.get("limits.max_total_len")
    for name in ("max_input_len", "max_output_len") if total else ():
        asked.default(f"limits.{name}", total - 1)


def _settle_tags(asked: Collected) -> None:
    setting = asked.drop("tags")
    tags = setting.value if setting else []
    if setting and not (isinstance(tags, list) and all(isinstance(tag, str) for tag in tags)):
        raise refusal(setting.origin, setting.key, tags, "it must be a list of texts", "Write - openai-compatible under it.")
    if setting and LEGACY in tags and OPENAI in tags:
        raise refusal(setting.origin, setting.key, ", ".join(tags), f"{OPENAI} and {LEGACY} exclude each other", "Keep one of the two.")
    if setting and LEGACY in tags:
        asked.set("options.legacy", True, setting.origin, setting.key)
    if setting and OPENAI in tags and not _oldest(asked):  # the oldest reads messages, and answers as ever
        asked.set("options.openai", True, setting.origin, setting.key)
    if _oldest(asked):
        asked.default("options.max_tokens_counts_prompt", True)


def _oldest(asked: Collected) -> bool:
    """model_metadata names the engine."""
    return bool(asked.get("engine.location")) and asked.where("engine.location").key.startswith("model_metadata.")


def _settle_transport(asked: Collected) -> None:
    setting = asked.drop("transport")
    kind = setting.value.get("kind", "http") if setting and isinstance(setting.value, dict) else setting and setting.value
    if setting and kind not in ("http", "grpc"):
        raise refusal(setting.origin, f"{setting.key}.kind", kind, "only http and grpc are spoken", "Remove it.")


def _settle_secrets(asked: Collected) -> None:
    """Names only. A value in the file is neither used nor shown."""
    setting = asked.drop("secrets")
    if setting is None:
        return
    if not isinstance(setting.value, dict):
        raise ConfigError(f"{setting.origin}: secrets must be a mapping of names.", cure="Write hf_access_token: null under it.")
    for name, value in setting.value.items():
        secrets.check_name(name)
        if value:
            text = f"the value in the file is not used; put it into {secrets.places(name)}"
            asked.note(f"secrets.{name}", text, setting.origin, "warning")
    asked.set("server.secrets", tuple(setting.value), setting.origin, "secrets")


def _settle_devices(asked: Collected, environment: Environment[str, str]) -> None:
    """The accelerator's count, the ranks and the visible GPUs agree."""
    world_size = asked.get("mapping.tensor_parallel", 1) * asked.get("mapping.pipeline_parallel", 1)
    counts = [p for p in ("mapping.tensor_parallel", "mapping.pipeline_parallel") if asked.get(p) is not None]
    gpu, accelerator = asked.drop("resources.use_gpu"), asked.drop("resources.accelerator")
    if accelerator:
        named = re.fullmatch(r"([A-Za-z0-9_ ]{1,40})(?::([1-9]\d{0,3}))?", accelerator.value)
        if named is None:
            raise refusal(accelerator.origin, accelerator.key, accelerator.value, "it must be NAME or NAME:COUNT", "Write A100:2.")
        if int(named[2] or 1) != world_size:
            limit = f"tensor × pipeline parallel counts make {world_size} ranks"
            raise refusal(
                accelerator.origin, accelerator.key, accelerator.value, limit, f"Write {named[1]}:{world_size}, or change the counts."
            )
        asked.note(accelerator.key, "the kind of GPU is for the platform; Stoker uses what is visible", accelerator.origin)
    if gpu and not gpu.value and not accelerator:
        asked.set("runtime.device", "cpu", gpu.origin, gpu.key)
    elif counts:
        asked_by = asked.where(counts[0])
        check_world(world_size, visible_gpus(environment), str(asked_by.origin), asked_by.key)


def _deployment(asked: Collected, folder: Path) -> Deployment:
    source = _engine(asked, folder) if asked.get("engine.location") else _build(asked)
    tokenizer = asked.get("engine.tokenizer")
    names = asked.drop("server.secrets")
    server: ServerSettings = asked.build(
        ServerSettings, "server", protocols=("truss", "openai"), options=asked.build(TrussOptions, "options")
    )
    if names:
        asked.note("secrets", f"named: {', '.join(names.value) or 'none'}", names.origin)
    return Deployment(
        format="truss",
        path=str(folder),
        source=source,
        tokenizer=_own(tokenizer, folder) if tokenizer else None,
        runtime=asked.build(RuntimeConfig, "runtime"),
        server=server,
        settings=asked.rows(),
        notes=tuple(asked.notes),
    )


def _engine(asked: Collected, folder: Path) -> EngineSource:
    mapping = asked.build(Mapping, "mapping") if asked.under("mapping") else None
    return EngineSource(location=_own(asked.get("engine.location"), folder), token_secret="hf_access_token", mapping=mapping)


def _own(location: str, folder: Path) -> str:
    """A path that exists below the Truss is the Truss's own, as export writes it; anything else stands as it is."""
    return str((folder / location).resolve()) if inside(location) and (folder / location).is_dir() else location


def _build(asked: Collected) -> BuildOptions:
    asked.default("build.token_secret", "hf_access_token")
    secrets.check_name(asked.get("build.token_secret"))
    more: dict[str, Any] = {"limits": asked.build(Limits, "limits"), "mapping": asked.build(Mapping, "mapping")}
    return asked.build(BuildOptions, "build", quantization_settings=asked.under("quantization"), **more)


FORMATS.add("truss", Format(name="truss", recognise=recognise, load=load, export=export))
