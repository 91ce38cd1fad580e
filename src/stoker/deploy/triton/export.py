"""Writes an engine as the five models of an inflight_batcher_llm repository, with the tensors of v0.18."""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from stoker.base.config import RuntimeConfig
from stoker.base.errors import ConfigError
from stoker.base.fields.errors import InvalidValueError
from stoker.base.fields.values import ValueType
from stoker.deploy.deployment import EngineInfo
from stoker.deploy.syntax.pbtxt import Word, format_message
from stoker.deploy.triton import ensemble
from stoker.deploy.triton.keys import BLS, KEYS, LLM, POST, PRE, ParameterRow
from stoker.deploy.triton.repository import CONFIG
from stoker.deploy.triton.scalars import did_you_mean
from stoker.deploy.triton.values import BOOLEAN, WHOLE
from stoker.server.protocols.kserve.model_config import KINDS, QueuePolicy, Tensor, TritonModel, tensors

# Options that are not a `parameters` key, with the names of fill_template.
_SETTINGS: dict[str, ValueType] = {
    "triton_max_batch_size": WHOLE,
    "decoupled_mode": BOOLEAN,
    "max_queue_size": WHOLE,
    "max_queue_delay_microseconds": WHOLE,
    "preprocessing_instance_count": WHOLE,
    "postprocessing_instance_count": WHOLE,
    "bls_instance_count": WHOLE,
}
_ALIASES = {"batching_strategy": "gpt_model_type", "engine_dir": "gpt_model_path"}
# Kind → what the model does, and the module and class that do it inside a Triton server. The ensemble has no code.
_PYTHON_MODELS = {
    PRE: ("converts text and word lists to token ids", "tokenizer", "TokenizerModel"),
    LLM: ("generates token ids with a Stoker executor, which it starts", "engine", "EngineModel"),
    POST: ("converts token ids to text", "tokenizer", "TokenizerModel"),
    BLS: (f"calls {PRE}, {LLM} and {POST}", "bls", "BLSModel"),
}
_COUNTS = {PRE: "preprocessing_instance_count", POST: "postprocessing_instance_count", BLS: "bls_instance_count"}


def export_triton(engine: EngineInfo, repo: Path, options: Mapping[str, str]) -> list[Path]:
    """Write the repository and return its files. `options` are template variables or parameter keys with values as text.

    Raises ConfigError for an unknown option, a wrong value, a folder that is an engine or a checkpoint, and when a file exists.
    """
    if (repo / "config.json").is_file():
        raise ConfigError(f"{repo} is an engine or a checkpoint, and no repository.", cure="Name a new folder.")
    models = five_models(engine, options)
    written = [repo / model.name / CONFIG for model in models]
    for file in written:
        if file.exists():
            raise ConfigError(f"{file} exists.", cure="Remove the repository, or name another folder.")
    for model, file in zip(models, written, strict=True):
        (file.parent / "1").mkdir(parents=True, exist_ok=True)
        file.write_text(format_message(proto_fields_of(model)), encoding="utf-8")
        written = written + _python_model(model.kind, file.parent / "1")
    return written


def five_models(engine: EngineInfo, options: Mapping[str, str]) -> tuple[TritonModel, ...]:
    """The models in the form in which `load_repository` returns them, and in which a server without a repository presents them."""
    settings, parameters = _split_options(options)
    return tuple(_model(kind, engine, settings, parameters) for kind in KINDS)


def _split_options(options: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """(values of _SETTINGS, parameters), both checked. Raises ConfigError."""
    settings: dict[str, Any] = {}
    parameters: dict[str, str] = {}
    keys = _accepted_keys()
    for option, value in options.items():
        name = _ALIASES.get(option, option)
        if name in _SETTINGS:
            settings[name] = _parse(_SETTINGS[name], name, value)
        elif name in keys:
            _parse(keys[name], name, value)
            parameters[name] = value
        else:
            raise ConfigError(f"option {option!r} is unknown, or has no effect.", cure=did_you_mean(option, [*_SETTINGS, *_ALIASES, *keys]))
    return settings, parameters


def _accepted_keys() -> dict[str, ParameterRow]:
    """The accepted parameters of all models, by key."""
    return {row.name: row for table in KEYS.values() for row in table if row.status == "accepted"}


def _parse(type: ValueType, name: str, value: str) -> Any:
    """The value of an option. Raises ConfigError."""
    try:
        return type.parse(value)
    except InvalidValueError as error:
        raise error.config_error(name) from None


def _model(kind: str, engine: EngineInfo, settings: Mapping[str, Any], parameters: Mapping[str, str]) -> TritonModel:
    """The model of this kind in the exported repository, with the tensors of release 0.18.

    `settings` are values of template variables, such as decoupled_mode. Of `parameters`, it gets the ones that its kind has.
    """
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
        parameters=defaults | {name: value for name, value in parameters.items() if _accepts(kind, name)},
    )


def _accepts(kind: str, name: str) -> bool:
    """Whether a kind of model has this parameter."""
    row = KEYS[kind].get(name)
    return row is not None and row.status == "accepted"


def _parameters(engine: EngineInfo) -> dict[str, dict[str, str]]:
    """The parameters that depend on the engine, by kind of model."""
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
    """The queue policy in the options."""
    size = settings.get("max_queue_size", RuntimeConfig().max_queue_size)
    return QueuePolicy(max_queue_delay_us=settings.get("max_queue_delay_microseconds", 0), max_queue_size=size)


def proto_fields_of(model: TritonModel) -> dict[str, Any]:
    """A model as plain data for `format_message`, with the field names of model_config.proto."""
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
    """The field dynamic_batching."""
    policy = {"max_queue_size": queue.max_queue_size}
    return {"max_queue_delay_microseconds": queue.max_queue_delay_us, "default_queue_policy": policy}


def _tensor(tensor: Tensor) -> dict[str, Any]:
    """A tensor as plain data."""
    fields: dict[str, Any] = {"name": tensor.name, "data_type": Word(tensor.data_type), "dims": list(tensor.dims)}
    if tensor.scalar:
        fields["reshape"] = {"shape": []}
    if tensor.ragged:
        fields["allow_ragged_batch"] = True
    if tensor.optional:
        fields["optional"] = True
    return fields


def _step(step: Any) -> dict[str, Any]:
    """A step of an ensemble as plain data."""
    return {
        "model_name": step.model_name,
        "model_version": step.model_version,
        "input_map": [{"key": key, "value": value} for key, value in step.input_map.items()],
        "output_map": [{"key": key, "value": value} for key, value in step.output_map.items()],
    }


def _python_model(kind: str, folder: Path) -> list[Path]:
    """Write the model.py that a Triton server runs, if the kind has one. Returns the files."""
    if kind not in _PYTHON_MODELS:
        return []
    purpose, module, name = _PYTHON_MODELS[kind]
    template = importlib.resources.files("stoker.deploy.triton").joinpath("templates", "model.py.txt").read_text(encoding="utf-8")
    text = Template(template).substitute(kind=kind, purpose=purpose, module=f"stoker.deploy.triton.hosted.{module}", name=name)
    (folder / "model.py").write_text(text, encoding="utf-8")
    return [folder / "model.py"]
