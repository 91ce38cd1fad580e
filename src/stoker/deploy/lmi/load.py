"""Reads a SageMaker LMI model folder: converts serving.properties and environment variables to a Deployment."""

from __future__ import annotations

import re
from collections.abc import Iterator
from collections.abc import Mapping as Environment
from pathlib import Path

import msgspec

from stoker.base.config import PROPOSERS, Limits, Mapping, RuntimeConfig
from stoker.base.errors import ConfigError
from stoker.deploy.collected_settings import CollectedSettings, FoundValue
from stoker.deploy.deployment import BuildOptions, Deployment, EngineSource, Origin
from stoker.deploy.devices import visible_gpus
from stoker.deploy.lmi import environment as variables
from stoker.deploy.lmi.dependent_settings import apply_dependent_settings
from stoker.deploy.lmi.keys import TABLE, canonical_key
from stoker.deploy.lmi.model_settings import complete_lmi
from stoker.deploy.lmi.secure_mode import check_secure_mode
from stoker.deploy.syntax import properties
from stoker.server.protocols.sagemaker.options import LMIOptions
from stoker.server.settings import ServerSettings

FILE = "serving.properties"
SAGEMAKER_DRAIN_S = 20.0  # SageMaker sends SIGKILL 30 s after SIGTERM
CONTAINER = Path("/opt/ml/model")  # where SageMaker unpacks a model in a container


def model_folder(path: Path) -> Path | None:
    """The folder with serving.properties: `path`, or its only sub-folder with one, which `tar czf model.tar.gz model/` creates."""
    if (path / FILE).is_file():
        return path
    if not path.is_dir():
        return None
    inner = [child for child in path.iterdir() if child.is_dir() and (child / FILE).is_file()]
    return inner[0] if len(inner) == 1 else None


def is_lmi_folder(path: Path) -> bool:
    """Whether `path` is a serving.properties or a folder with one."""
    return (path.name == FILE and path.is_file()) or model_folder(path) is not None


def load_lmi(path: Path, environment: Environment[str, str]) -> Deployment:
    """The deployment for a folder or serving.properties, and for `environment`. Without the file, only the environment is read.

    Precedence, highest first: SAGEMAKER_* variables, the file, HF_* and similar variables, OPTION_* variables, SERVING_* variables, and the
    variables that LMI images set for all models. Raises ConfigError, with file, line, key and fix, for a value that is not supported.
    """
    folder = path.parent if path.name == FILE else model_folder(path) or path
    settings = CollectedSettings(TABLE)
    settings.add_layer(variables.sagemaker_variables(environment))
    settings.add_layer(_properties(folder / FILE, settings))
    settings.add_layer(variables.named_variables(environment))
    settings.add_layer(variables.option_variables(environment))
    settings.add_layer(variables.serving_variables(environment))
    settings.add_layer(variables.fallback_variables(environment))
    check_secure_mode(settings, environment)
    if (folder / "adapters").is_dir():
        cure = "Merge them into the checkpoint, and remove the folder."
        raise ConfigError(f"{folder / 'adapters'}: LoRA adapters are not served.", cure=cure)
    _set_server_defaults(settings, folder, environment)
    apply_dependent_settings(settings, folder, visible_gpus(environment))
    return _deployment(settings, folder, environment)


def _properties(path: Path, settings: CollectedSettings) -> Iterator[FoundValue]:
    """The values in a serving.properties; none if it does not exist."""
    if not path.is_file():
        return
    for key, entry in properties.parse(_read_bounded(path), str(path)).items():
        origin = Origin(str(path), entry.line)
        value, comment, _ = re.split(r"(\s#(?:\s|$))", entry.value + " # ", maxsplit=1)
        if comment and value != entry.value.rstrip():
            text = "the text after # is treated as a comment; Java would treat it as a part of the value"
            settings.note(key, text, origin, "warning")
        yield FoundValue(canonical_key(key), value, origin, key)


def _read_bounded(path: Path) -> bytes:
    """The content of a file, of which at most one byte more than the limit is read."""
    with path.open("rb") as file:
        return file.read(properties.MAX_BYTES + 1)


def _set_server_defaults(settings: CollectedSettings, folder: Path, environment: Environment[str, str]) -> None:
    """Set the defaults of LMI's server."""
    settings.set_default("server.load_timeout_s", 1800)
    settings.set_default("server.request_timeout_s", 120)
    settings.set_default("server.http_port", 8080)
    settings.set_default("server.max_request_bytes", 6553500)  # of the DJL server
    if folder.is_relative_to(CONTAINER) or environment.get("SAGEMAKER_BIND_TO_PORT"):
        settings.set("server.host", "0.0.0.0", Origin("SageMaker's container contract"))
        settings.set_default("server.drain_timeout_s", SAGEMAKER_DRAIN_S)
    _set_rolling_batch(settings)
    streaming = settings.pop("streaming")
    if streaming and streaming.value:
        settings.set_default("options.output_formatter", "jsonlines")


def _set_rolling_batch(settings: CollectedSettings) -> None:
    """Set whether requests and responses have the format of the rolling batch. LMI's async handlers answer single requests."""
    if settings.get("options.dialect") == "async" and (disabled := settings.pop("options.rolling_batch")):
        settings.note(disabled.key, "the async handler has one response format", disabled.origin)
    settings.set_default("options.rolling_batch", settings.get("options.dialect") == "async" or settings.get("options.batch_size", 1) == 1)


def _deployment(settings: CollectedSettings, folder: Path, environment: Environment[str, str]) -> Deployment:
    """The Deployment with the collected settings."""
    model_id = environment.get("HF_MODEL_ID", "")
    options = settings.build(LMIOptions, "options")
    checkpoint = settings.get("build.checkpoint")
    build = BuildOptions(
        **settings.section("build") | {"checkpoint": _in_folder(folder, checkpoint)},
        quantization_settings=settings.section("quantization"),
        limits=settings.build(Limits, "limits"),
        mapping=settings.build(Mapping, "mapping"),
        extra=settings.section("extra"),
        token_secret="HF_TOKEN",
    )
    runtime = settings.build(RuntimeConfig, "runtime")
    settings.note_unused_drafts(runtime, "option.speculative_draft_model")
    speculate, drafts = runtime.speculate, None
    if speculate not in PROPOSERS:
        speculate = _in_folder(folder, speculate)
        drafts = EngineSource(location=speculate, token_secret="HF_TOKEN")
    deployment = Deployment(
        format="lmi",
        path=str(folder),
        source=build,
        tokenizer=build.tokenizer,
        runtime=msgspec.structs.replace(runtime, speculate=speculate),
        drafts=drafts,
        server=settings.build(
            ServerSettings,
            "server",
            model_name=re.sub(r"\W", "_", model_id) if model_id and checkpoint == model_id else folder.resolve().name,
            protocols=("sagemaker", "openai"),
            options=options,
        ),
        settings=settings.settings(),
        notes=tuple(settings.notes),
    )
    local = Path(build.checkpoint).expanduser()
    return complete_lmi(deployment, local) if local.is_dir() else deployment


def _in_folder(folder: Path, location: str) -> str:
    """A location relative to the model folder, if it exists there; else the location unchanged.

    LMI's Python process runs in that folder.
    """
    inside = folder / location
    return str(inside) if "://" not in location and not Path(location).is_absolute() and inside.exists() else location
