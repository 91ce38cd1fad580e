"""An engine → the five models of an inflight_batcher_llm repository, with v0.18's tensors."""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker.base.config import RuntimeConfig
from stoker.base.errors import ConfigError
from stoker.deploy import pbtxt
from stoker.deploy.deployment import EngineInfo
from stoker.deploy.pbtxt import Word
from stoker.deploy.triton import ensemble, values
from stoker.deploy.triton.keys import BLS, KEYS, LLM, POST, PRE
from stoker.deploy.triton.repository import CONFIG
from stoker.deploy.triton.scalars import did_you_mean
from stoker.server.protocols.kserve.model_config import KINDS, QueuePolicy, Tensor, TritonModel, tensors

# Options that are no `parameters` key; the names are fill_template's.
_SETTINGS: dict[str, values.Read] = {
    "triton_max_batch_size": values.whole,
    "decoupled_mode": values.boolean,
    "max_queue_size": values.whole,
    "max_queue_delay_microseconds": values.whole,
    "preprocessing_instance_count": values.whole,
    "postprocessing_instance_count": values.whole,
    "bls_instance_count": values.whole,
}
_ALIASES = {"batching_strategy": "gpt_model_type", "engine_dir": "gpt_model_path"}
_COUNTS = {PRE: "preprocessing_instance_count", POST: "postprocessing_instance_count", BLS: "bls_instance_count"}


def export_triton(engine: EngineInfo, repo: Path, options: Mapping[str, str]) -> list[Path]:
    """Write the repository and return its files. `options` are template variables or parameter keys, as text.

    Raises ConfigError for an unknown or unreadable option, and when a file would be overwritten.
    """
    models = five_models(engine, options)
    written = [repo / model.name / CONFIG for model in models]
    for file in written:
        if file.exists():
            raise ConfigError(f"{file} exists.", cure="Remove the repository, or name another folder.")
    for model, file in zip(models, written, strict=True):
        (file.parent / "1").mkdir(parents=True, exist_ok=True)
        file.write_text(pbtxt.write(config(model)), encoding="utf-8")
        written = written + _python_model(model.kind, file.parent / "1")
    return written


def five_models(engine: EngineInfo, options: Mapping[str, str]) -> tuple[TritonModel, ...]:
    """The models as `load` reads them back; also what a server shows for an engine without a repository."""
    settings, parameters = _sort(options)
    return tuple(_model(kind, engine, settings, parameters) for kind in KINDS)


def _sort(options: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Options into settings and parameters, each checked."""
    settings: dict[str, Any] = {}
    parameters: dict[str, str] = {}
    keys = {name: key for (_, name), key in KEYS.items() if key.handling == "honoured"}
    for option, value in options.items():
        name = _ALIASES.get(option, option)
        if name in _SETTINGS:
            settings[name] = _SETTINGS[name](name, value)
        elif name in keys:
            keys[name].value(value)
            parameters[name] = value
        else:
            raise ConfigError(f"option {option!r} is unknown, or has no effect.", cure=did_you_mean(option, [*_SETTINGS, *_ALIASES, *keys]))
    return settings, parameters


def _model(kind: str, engine: EngineInfo, settings: Mapping[str, Any], parameters: Mapping[str, str]) -> TritonModel:
    inputs, outputs = tensors(kind)
    defaults = _parameters(engine).get(kind, {})
    return TritonModel(
        name=kind,
        kind=kind,
        platform="ensemble" if kind == "ensemble" else "",
        backend="" if kind == "ensemble" else "python",
        max_batch_size=settings.get("triton_max_batch_size", engine.limits.max_batch_size),
        decoupled=kind in (LLM, BLS, "ensemble") and settings.get("decoupled_mode", False),
        inputs=inputs,
        outputs=outputs,
        instance_count=settings.get(_COUNTS.get(kind, ""), 1),
        queue=_queue(settings) if kind == LLM else None,
        steps=ensemble.steps() if kind == "ensemble" else (),
        parameters=defaults | {name: value for name, value in parameters.items() if _honours(kind, name)},
    )


def _honours(kind: str, name: str) -> bool:
    return (kind, name) in KEYS and KEYS[kind, name].handling == "honoured"


def _parameters(engine: EngineInfo) -> dict[str, dict[str, str]]:
    return {
        PRE: {"tokenizer_dir": engine.path, "add_special_tokens": "true"},
        LLM: {
            "gpt_model_type": "inflight_fused_batching",
            "gpt_model_path": engine.path,
            "max_beam_width": str(engine.limits.max_beam_width),
            "batch_scheduler_policy": "guaranteed_no_evict",
        },
        POST: {"tokenizer_dir": engine.path, "skip_special_tokens": "true"},
        BLS: {"accumulate_tokens": "false", "tensorrt_llm_model_name": LLM},
    }


def _queue(settings: Mapping[str, Any]) -> QueuePolicy:
    size = settings.get("max_queue_size", RuntimeConfig().max_queue_size)
    return QueuePolicy(max_queue_delay_us=settings.get("max_queue_delay_microseconds", 0), max_queue_size=size)


def config(model: TritonModel) -> dict[str, Any]:
    """A model as the fields of model_config.proto, ready for `pbtxt.write`."""
    fields: dict[str, Any] = {"name": model.name}
    fields |= {"platform": model.platform} if model.platform else {"backend": model.backend}
    fields["max_batch_size"] = model.max_batch_size
    if model.kind != "ensemble":
        fields["model_transaction_policy"] = {"decoupled": model.decoupled}
    if model.queue is not None:
        fields["dynamic_batching"] = _batching(model.queue)
    fields["input"] = [_tensor(tensor) for tensor in model.inputs]
    fields["output"] = [_tensor(tensor) for tensor in model.outputs]
    if model.steps:
        fields["ensemble_scheduling"] = {"step": [_step(step) for step in model.steps]}
    else:
        fields["instance_group"] = [{"count": model.instance_count, "kind": Word("KIND_CPU")}]
    fields["parameters"] = [{"key": key, "value": {"string_value": value}} for key, value in model.parameters.items()]
    return fields


def _batching(queue: QueuePolicy) -> dict[str, Any]:
    return {
        "max_queue_delay_microseconds": queue.max_queue_delay_us,
        "default_queue_policy": {"max_queue_size": queue.max_queue_size},
    }  # fmt: skip


def _tensor(tensor: Tensor) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": tensor.name, "data_type": Word(tensor.data_type), "dims": list(tensor.dims)}
    if tensor.scalar:
        fields["reshape"] = {"shape": []}
    if tensor.ragged:
        fields["allow_ragged_batch"] = True
    if tensor.optional:
        fields["optional"] = True
    return fields


def _step(step: Any) -> dict[str, Any]:
    return {
        "model_name": step.model_name,
        "model_version": step.model_version,
        "input_map": [{"key": key, "value": value} for key, value in step.input_map.items()],
        "output_map": [{"key": key, "value": value} for key, value in step.output_map.items()],
    }


def _python_model(kind: str, folder: Path) -> list[Path]:
    """The model.py that a real Triton server runs; the ensemble has none."""
    source = importlib.resources.files("stoker.deploy.triton.python_models") / f"{kind}.py"
    if not source.is_file():
        return []
    (folder / "model.py").write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    return [folder / "model.py"]
