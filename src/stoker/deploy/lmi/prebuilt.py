"""Prebuilt engines of an LMI folder, and settings that lower the limits with which such an engine was built."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from stoker.base.config import Limits, RequestLimits
from stoker.base.errors import EngineError
from stoker.deploy.collected_settings import invalid_value
from stoker.deploy.deployment import DEFAULT, BuildOptions, Deployment, EngineSource, Note, Setting
from stoker.deploy.engine import read_config

_LAYOUT = "1"  # name of the engine directory in LMI's layout
_PREBUILT = (f"tensorrt_llm/{_LAYOUT}", f"trt_llm_model_repo/tensorrt_llm/{_LAYOUT}")
# Limits of a step: a higher value than that of the engine has no effect, because further requests and tokens are computed in later steps.
_OF_A_STEP = ("max_batch_size", "max_num_tokens")
_OF_A_REQUEST = RequestLimits.__struct_fields__
LOWERED = (*_OF_A_STEP, *_OF_A_REQUEST)
_UNCHANGED = ("checkpoint", "revision", "tokenizer")


def find_prebuilt_engine(folder: Path) -> Path | None:
    """The engine in an LMI folder: the folder itself or tensorrt_llm/1, or None.

    Raises EngineError for a TensorRT engine.
    """
    names = (*_PREBUILT, _LAYOUT) if (folder / "config.pbtxt").is_file() else _PREBUILT  # with "1", the folder is tensorrt_llm itself
    if "format_version" in read_config(folder):
        return folder
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


def with_engine(deployment: Deployment, engine: Path) -> Deployment:
    """The deployment with a finished engine instead of the build.

    Limits of the configuration apply if they are below those of the engine. Other settings of the build, except ranks, get a note. Raises
    ConfigError for a limit of a request above that of the engine.
    """
    assert isinstance(deployment.source, BuildOptions)
    explicit = [s for s in deployment.settings if s.section == "build" and s.origin != DEFAULT]
    ranks = [s for s in explicit if s.name in ("tensor_parallel", "pipeline_parallel", "data_parallel", "expert_parallel")]
    limits = [s for s in explicit if s.name in LOWERED]
    built, dtype = _built_limits(engine), read_config(engine).get("dtype")
    as_built = {"dtype": dtype, "tokens_per_block": built.tokens_per_block}
    unused = [s for s in explicit if s not in (*ranks, *limits) and s.name not in _UNCHANGED and s.value != as_built.get(s.name)]
    notes = [_built_already(setting) for setting in unused] + [note for s in limits if (note := _note_of_limit(s, built))]
    lowered = [s for s in limits if s.value < built_limit(built, s.name)]
    unset = [name for name in _OF_A_STEP if getattr(deployment.runtime, name) is None]  # others are set on the command line
    beside = engine.parent  # where the layout has its tokenizer files
    tokenizer = str(beside) if engine.name == _LAYOUT and (beside / "tokenizer.json").is_file() else None
    return msgspec.structs.replace(
        deployment,
        source=EngineSource(location=str(engine), mapping=deployment.source.mapping if ranks else None),
        tokenizer=deployment.tokenizer or tokenizer,
        runtime=msgspec.structs.replace(deployment.runtime, **_values(lowered, unset)),
        server=msgspec.structs.replace(deployment.server, request_limits=RequestLimits(**_values(lowered, _OF_A_REQUEST))),
        settings=(*(s for s in deployment.settings if s.section != "build" or s in ranks), *map(_moved, lowered)),
        notes=(*deployment.notes, *notes),
    )


def _built_limits(engine: Path) -> Limits:
    """The limits in the config of an engine. Raises EngineError for a damaged one."""
    try:
        return msgspec.convert(read_config(engine).get("limits", {}), Limits)
    except msgspec.ValidationError as error:
        raise EngineError(f"{engine / 'config.json'} is damaged: {error}.", cure="Build the engine again.") from None


def built_limit(built: Limits, name: str) -> int:
    """The engine's limit that the setting `name` can lower."""
    return built.max_seq_len if name == "max_total_len" else getattr(built, name)


def _note_of_limit(setting: Setting, built: Limits) -> Note | None:
    """A note about a limit above the engine's, or None. Raises ConfigError if requests would be affected."""
    limit = built_limit(built, setting.name)
    if setting.value <= limit:
        return None
    text = f"the engine was built with {setting.name}={limit}"
    if setting.name in _OF_A_REQUEST:
        raise invalid_value(setting.origin, setting.key, setting.value, text, f"Set it to at most {limit}, or build the engine again.")
    return Note(severity="warning", key=setting.key, text=f"{text}, which applies", origin=setting.origin)


def _built_already(setting: Setting) -> Note:
    """A note that a setting of the build has no effect."""
    text = "the engine is built already; the settings of its build apply"
    return Note(severity="warning", key=setting.key, text=text, origin=setting.origin)


def _values(settings: list[Setting], names: Sequence[str]) -> dict[str, Any]:
    """The values of the settings called `names`, by name."""
    return {s.name: s.value for s in settings if s.name in names}


def _moved(setting: Setting) -> Setting:
    """The setting, moved to the section of the report to which it belongs once the engine is built."""
    return msgspec.structs.replace(setting, section="runtime" if setting.name in _OF_A_STEP else "server")
