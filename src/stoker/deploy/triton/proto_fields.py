"""Fields of a config.pbtxt at every depth: read, without effect for a reason, or rejected. Names are those of model_config.proto."""

from __future__ import annotations

from typing import Any

from stoker.deploy.deployment import Note
from stoker.deploy.syntax.pbtxt import Message, MessageField
from stoker.deploy.triton.repository import ModelFile
from stoker.deploy.triton.scalars import did_you_mean, flag_field

_TENSOR = {"name": None, "data_type": None, "dims": None, "reshape": {"shape": None}, "is_shape_tensor": None}
_PAIR = {"key": None, "value": None}
# Field → None for a value, or the fields of a message.
READ: dict[str, Any] = {
    "name": None,
    "platform": None,
    "backend": None,
    "max_batch_size": None,
    "input": _TENSOR | {"format": None, "allow_ragged_batch": None, "optional": None},
    "output": _TENSOR | {"label_filename": None},
    "parameters": {"key": None, "value": {"string_value": None}},
    "instance_group": {"name": None, "kind": None, "count": None},
    "model_transaction_policy": {"decoupled": None},
    "dynamic_batching": {
        "preferred_batch_size": None,
        "max_queue_delay_microseconds": None,
        "priority_levels": None,
        "default_priority_level": None,
        "default_queue_policy": {
            "max_queue_size": None,
            "default_timeout_microseconds": None,
            "allow_timeout_override": None,
            "timeout_action": None,
        },
    },
    "ensemble_scheduling": {"step": {"model_name": None, "model_version": None, "input_map": _PAIR, "output_map": _PAIR}},
}
# Field → why it has no effect.
NO_EFFECT = {
    "version_policy": "the only version of the repository is served",
    "optimization": "the engine of Stoker has no such options",
    "default_model_filename": "no model file is loaded",
    "cc_model_filenames": "no model file is loaded",
    "runtime": "no backend library is loaded",
    "metric_tags": "metrics have labels for model and version",
    "model_metrics": "Stoker has its own metrics",
    "model_warmup": "Stoker warms up the engine itself",
}
# Field → the cure.
REJECTED = {
    "sequence_batching": "Remove it; requests to a language model are independent.",
    "response_cache": "Remove it; responses are not cached. For prefix reuse, set the parameter enable_kv_cache_reuse.",
    "batch_input": "Remove it; Stoker makes its own batches.",
    "batch_output": "Remove it; Stoker makes its own batches.",
    "model_operations": "Remove it; Stoker loads no operator libraries.",
    "model_repository_agents": "Remove it; Stoker reads the repository itself.",
    "gpus": "Set the devices in the parameter gpu_device_ids.",
}


def check_field(file: ModelFile, field: MessageField, notes: list[Note]) -> None:
    """Check a top-level field. Adds to `notes`. Raises PlacedError."""
    if field.name in NO_EFFECT:
        notes.append(Note(severity="info", key=field.name, text=NO_EFFECT[field.name], origin=file.origin(field.line)))
    elif field.name != "response_cache" or flag_field(file, field.value, "enable", notes):
        _check(file, field, READ)


def _check(file: ModelFile, field: MessageField, known: dict[str, Any]) -> None:
    """Raise PlacedError for a field that is not in the table `known`, or a message in it with such a field."""
    if field.name not in known:
        if field.name in REJECTED:
            raise file.error(field.line, f"{field.name} is refused.", REJECTED[field.name])
        raise file.error(field.line, f"unknown field {field.name!r}.", did_you_mean(field.name, [*known, *NO_EFFECT]))
    inner = known[field.name]
    if isinstance(field.value, Message) != (inner is not None):
        raise file.error(field.line, f"{field.name} must be {'one value' if inner is None else 'a message'}.", _spelling(field.name, inner))
    if isinstance(field.value, Message):
        for nested in field.value.fields:
            _check(file, nested, inner)


def _spelling(name: str, inner: Any) -> str:
    """A hint how the field is written."""
    return f"Write {name}: value." if inner is None else f"Write {name} {{ {next(iter(inner))}: … }}."
