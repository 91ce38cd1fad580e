"""The fields a config.pbtxt may have, at every depth: read, without effect for a known reason, or refused with the cure.

Names follow Triton's model_config.proto.
"""

from __future__ import annotations

from typing import Any

from stoker.deploy.deployment import Note
from stoker.deploy.pbtxt import Field, Message
from stoker.deploy.triton.repository import ModelFile
from stoker.deploy.triton.scalars import did_you_mean, flag

_TENSOR = {"name": None, "data_type": None, "dims": None, "reshape": {"shape": None}, "is_shape_tensor": None}
_PAIR = {"key": None, "value": None}
# Field → None for a leaf, or the fields of the message.
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
IGNORED = {
    "version_policy": "the repository's one version is served",
    "optimization": "Stoker's engine has no such options",
    "default_model_filename": "no model file is loaded",
    "cc_model_filenames": "no model file is loaded",
    "runtime": "no backend library is loaded",
    "metric_tags": "metrics carry model and version",
    "model_metrics": "metrics are Stoker's own",
    "model_warmup": "Stoker warms the engine up itself",
}
REFUSED = {
    "sequence_batching": "A request of a language model stands alone; remove it.",
    "response_cache": "Stoker answers each request anew; remove it, prefix reuse is enable_kv_cache_reuse.",
    "batch_input": "Stoker makes its own batches; remove it.",
    "batch_output": "Stoker makes its own batches; remove it.",
    "model_operations": "Stoker loads no operator libraries; remove it.",
    "model_repository_agents": "Stoker reads the repository itself; remove it.",
    "gpus": "Name devices by the parameter gpu_device_ids.",
}


def check_field(file: ModelFile, field: Field, notes: list[Note]) -> None:
    """One top-level field. Appends to `notes`; raises PlacedError."""
    if field.name in IGNORED:
        notes.append(Note(severity="info", key=field.name, text=IGNORED[field.name], origin=file.origin(field.line)))
    elif field.name != "response_cache" or flag(file, field.value, "enable", notes):
        _check(file, field, READ)


def _check(file: ModelFile, field: Field, known: dict[str, Any]) -> None:
    if field.name not in known:
        if field.name in REFUSED:
            raise file.error(field.line, f"{field.name} is refused.", REFUSED[field.name])
        raise file.error(field.line, f"unknown field {field.name!r}.", did_you_mean(field.name, [*known, *IGNORED]))
    inner = known[field.name]
    if isinstance(field.value, Message) != (inner is not None):
        raise file.error(field.line, f"{field.name} is {'one value' if inner is None else 'a message'}.", _spelling(field.name, inner))
    if isinstance(field.value, Message):
        for part in field.value.fields:
            _check(file, part, inner)


def _spelling(name: str, inner: Any) -> str:
    return f"Write {name}: value." if inner is None else f"Write {name} {{ {next(iter(inner))}: … }}."
