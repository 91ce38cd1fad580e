"""Settings of an LMI folder that depend on the model: default lengths, version keys, and a prebuilt engine instead of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from stoker.deploy.collected_settings import invalid_value
from stoker.deploy.deployment import DEFAULT, BuildOptions, Deployment, Origin
from stoker.deploy.engine import read_config
from stoker.deploy.lmi.prebuilt import find_prebuilt_engine, with_engine

OTHER_LENGTHS = (1024, 512)
_LENGTHS = {"llama": (512, 512), "falcon": (1024, 1024)}  # model_type → default max_input_len, max_output_len
# Version key → the model types that it belongs to.
_VERSIONS: dict[str, tuple[str, ...]] = {
    "baichuan_model_version": ("baichuan",),
    "chatglm_model_version": ("chatglm", "glm", "glm4"),
    "gpt_model_version": ("gpt2", "gpt_bigcode", "starcoder2"),
}


def complete_lmi(deployment: Deployment, local: Path) -> Deployment:
    """The deployment, completed with settings that depend on its checkpoint or engine in the directory `local`.

    A prebuilt engine replaces the build. Lengths that are not set get the default of the model family. Raises ConfigError when a
    *_model_version key belongs to another family.
    """
    if not isinstance(deployment.source, BuildOptions):
        return deployment
    if engine := find_prebuilt_engine(local):
        return with_engine(deployment, engine)
    model_type = _model_type(local)
    _check_versions(deployment, model_type)
    max_input_len, max_output_len = _LENGTHS.get(model_type, OTHER_LENGTHS)
    lengths = {"max_input_len": max_input_len, "max_output_len": max_output_len}
    unset = {s.name for s in deployment.settings if s.origin == DEFAULT and s.name in lengths}
    limits = msgspec.structs.replace(deployment.source.limits, **{name: lengths[name] for name in unset})
    origin = Origin(f"default of {model_type}")
    settings = tuple(
        msgspec.structs.replace(s, value=lengths[s.name], origin=origin) if s.name in unset else s for s in deployment.settings
    )
    return msgspec.structs.replace(deployment, source=msgspec.structs.replace(deployment.source, limits=limits), settings=settings)


def _model_type(checkpoint: Path) -> str:
    """The model_type in the checkpoint's config.json, or an empty string."""
    model_type = read_config(checkpoint).get("model_type")
    return model_type if isinstance(model_type, str) else ""


def _check_versions(deployment: Deployment, model_type: str) -> None:
    """Raise ConfigError for a *_model_version key of another family than the checkpoint's."""
    extra: dict[str, Any] = getattr(deployment.source, "extra", {})
    for name, families in _VERSIONS.items():
        if model_type and name in extra and model_type not in families:
            setting = next(s for s in deployment.settings if s.name == name)
            limit = f"it is for {', '.join(families)}, and the checkpoint's model_type is {model_type}"
            raise invalid_value(setting.origin, setting.key, setting.value, limit, "Remove it.")
