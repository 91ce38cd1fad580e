"""Metadata and config of models, with the members and the order of Triton's JSON."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from stoker.server.protocols.kserve.inference import ServedModel
from stoker.server.protocols.kserve.model_config import QueuePolicy, Tensor, TritonModel
from stoker.server.protocols.kserve.tensors.dtypes import kserve_name
from stoker.server.protocols.kserve.tensors.signature import expected_shape

EXTENSIONS = (
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
    "generate",
    "system_shared_memory",
    "cuda_shared_memory",
)


def server(name: str) -> dict[str, Any]:
    """The object of GET /v2. `name` is the server's name."""
    return {"name": name, "version": importlib.metadata.version("stoker"), "extensions": list(EXTENSIONS)}


def metadata(served: ServedModel) -> dict[str, Any]:
    """The object of GET /v2/models/{model}."""
    model = served.model
    return {
        "name": model.name,
        "versions": [served.version],
        "platform": model.platform or model.backend,
        "inputs": [_metadata(model, tensor) for tensor in model.inputs],
        "outputs": [_metadata(model, tensor) for tensor in model.outputs],
    }


def _metadata(model: TritonModel, tensor: Tensor) -> dict[str, Any]:
    """An input or output in the metadata of a model. -1: any size."""
    return {"name": tensor.name, "datatype": kserve_name(tensor.dtype), "shape": expected_shape(model, tensor)}


def config(model: TritonModel) -> dict[str, Any]:
    """The model config, which is model_config.proto as JSON."""
    ensemble = bool(model.steps) or model.platform == "ensemble"
    result: dict[str, Any] = {
        "name": model.name,
        "platform": model.platform,
        "backend": model.backend,
        "runtime": "",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": model.max_batch_size,
        "input": [_input(tensor) for tensor in model.inputs],
        "output": [_output(tensor) for tensor in model.outputs],
        "batch_input": [],
        "batch_output": [],
    }
    if not ensemble:
        result["optimization"] = {
            "priority": "PRIORITY_DEFAULT",
            "input_pinned_memory": {"enable": True},
            "output_pinned_memory": {"enable": True},
            "gather_kernel_buffer_threshold": 0,
            "eager_batching": False,
        }
    if model.queue is not None:
        result["dynamic_batching"] = _batching(model.queue)
    if ensemble:
        result["ensemble_scheduling"] = {"step": [_step(step) for step in model.steps]}
    return result | {
        "instance_group": [] if ensemble else [_instances(model)],
        "default_model_filename": "" if ensemble else "model.py",
        "cc_model_filenames": {},
        "metric_tags": {},
        "parameters": {key: {"string_value": value} for key, value in model.parameters.items()},
        "model_warmup": [],
        "model_transaction_policy": {"decoupled": model.decoupled},
    }


def _input(tensor: Tensor) -> dict[str, Any]:
    """An input in the config of a model."""
    return {
        "name": tensor.name,
        "data_type": tensor.data_type,
        "format": "FORMAT_NONE",
        "dims": list(tensor.dims),
        **({"reshape": {"shape": []}} if tensor.scalar else {}),
        "is_shape_tensor": False,
        "allow_ragged_batch": tensor.ragged,
        "optional": tensor.optional,
        "is_non_linear_format_io": False,
    }


def _output(tensor: Tensor) -> dict[str, Any]:
    """An output in the config of a model."""
    return {
        "name": tensor.name,
        "data_type": tensor.data_type,
        "dims": list(tensor.dims),
        "label_filename": "",
        "is_shape_tensor": False,
        "is_non_linear_format_io": False,
    }


def _batching(queue: QueuePolicy) -> dict[str, Any]:
    """`dynamic_batching` in the config of a model."""
    return {
        "preferred_batch_size": list(queue.preferred_batch_sizes),
        "max_queue_delay_microseconds": queue.max_queue_delay_us,
        "preserve_ordering": False,
        "priority_levels": queue.priority_levels,
        "default_priority_level": queue.default_priority_level,
        "default_queue_policy": {
            "timeout_action": "REJECT",
            "default_timeout_microseconds": queue.timeout_us,
            "allow_timeout_override": queue.allow_timeout_override,
            "max_queue_size": queue.max_queue_size,
        },
        "priority_queue_policy": {},
    }


def _step(step: Any) -> dict[str, Any]:
    """A step of an ensemble in its config."""
    return {
        "model_name": step.model_name,
        "model_version": step.model_version,
        "input_map": step.input_map,
        "output_map": step.output_map,
        "model_namespace": "",
    }


def _instances(model: TritonModel) -> dict[str, Any]:
    """`instance_group` in the config of a model."""
    return {
        "name": f"{model.name}_0",
        "kind": "KIND_CPU",
        "count": model.instance_count,
        "gpus": [],
        "secondary_devices": [],
        "profile": [],
        "passive": False,
        "host_policy": "",
    }
