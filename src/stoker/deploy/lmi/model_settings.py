"""Settings of an LMI folder that depend on the model: default lengths, version keys, and a prebuilt engine instead of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from stoker.base.errors import EngineError
from stoker.deploy.collected_settings import invalid_value
from stoker.deploy.deployment import DEFAULT, BuildOptions, Deployment, EngineSource, Note, Origin
from stoker.deploy.engine import read_config

OTHER_LENGTHS = (1024, 512)
_LENGTHS = {"llama": (512, 512), "falcon": (1024, 1024)}  # model_type → default max_input_len, max_output_len
_PREBUILT = ("tensorrt_llm/1", "trt_llm_model_repo/tensorrt_llm/1")
# Version key → the model types that it belongs to.
_VERSIONS: dict[str, tuple[str, ...]] = {
    "baichuan_model_version": ("baichuan",),
    "chatglm_model_version": ("chatglm", "glm", "glm4"),
    "gpt_model_version": ("gpt2", "gpt_bigcode", "starcoder2"),
}


def complete_lmi(deployment: Deployment, local: Path) -> Deployment:
    """Complete a deployment whose checkpoint or engine is the directory `local`.

    A prebuilt engine replaces the build. Lengths that are not set get the default of the model family. Raises ConfigError when a
    *_model_version key belongs to another family.
    """
    if not isinstance(deployment.source, BuildOptions):
        return deployment
    if engine := find_prebuilt_engine(local):
        return _with_engine(deployment, engine)
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


def find_prebuilt_engine(folder: Path) -> Path | None:
    """The engine directory of LMI's layout for prebuilt engines (tensorrt_llm/1), or None. Raises EngineError for a TensorRT engine."""
    names = (*_PREBUILT, "1") if (folder / "config.pbtxt").is_file() else _PREBUILT  # with "1", the folder is tensorrt_llm itself
    for name in names:
        engine = folder / name
        if not engine.is_dir():
            continue
        ranks = sorted(engine.glob("*.engine"))
        if ranks and "format_version" not in read_config(engine):
            raise EngineError(
                f"{ranks[0]} is an engine of TensorRT, which Stoker cannot run.",
                cure="Set option.model_id to the Hugging Face checkpoint; Stoker builds its own engine from it.",
            )
        if (engine / "config.json").is_file():
            return engine
        raise EngineError(f"{engine} has no config.json.", cure="Package it again with: stoker package lmi ENGINE.")
    return None


def _model_type(checkpoint: Path) -> str:
    """model_type in the config.json of the checkpoint, or an empty string."""
    model_type = read_config(checkpoint).get("model_type")
    return model_type if isinstance(model_type, str) else ""


def _with_engine(deployment: Deployment, engine: Path) -> Deployment:
    """The deployment with a finished engine instead of the build. Build settings of the configuration, except ranks, get a note."""
    assert isinstance(deployment.source, BuildOptions)
    explicit = [s for s in deployment.settings if s.section == "build" and s.origin != DEFAULT]
    ranks = [s for s in explicit if s.name in ("tensor_parallel", "pipeline_parallel")]
    unused = [s for s in explicit if s not in ranks and s.name not in ("checkpoint", "revision", "tokenizer")]
    text = "the engine is built already; the settings of its build apply"
    source = EngineSource(location=str(engine), mapping=deployment.source.mapping if ranks else None)
    beside = engine.parent  # where the layout has its tokenizer files
    tokenizer = str(beside) if (beside / "tokenizer.json").is_file() else None
    return msgspec.structs.replace(
        deployment,
        source=source,
        tokenizer=deployment.tokenizer or tokenizer,
        settings=tuple(s for s in deployment.settings if s.section != "build" or s in ranks),
        notes=deployment.notes + tuple(Note(severity="warning", key=s.key, text=text, origin=s.origin) for s in unused),
    )


def _check_versions(deployment: Deployment, model_type: str) -> None:
    """Raise ConfigError for a *_model_version key of another family than the checkpoint. Otherwise the checkpoint decides."""
    extra: dict[str, Any] = getattr(deployment.source, "extra", {})
    for name, families in _VERSIONS.items():
        if model_type and name in extra and model_type not in families:
            setting = next(s for s in deployment.settings if s.name == name)
            limit = f"it is for {', '.join(families)}, and the checkpoint's model_type is {model_type}"
            raise invalid_value(setting.origin, setting.key, setting.value, limit, "Remove it.")
