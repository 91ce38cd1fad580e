"""Checks the tensors of a request against the declaration of its model. Errors have Triton's text."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from stoker.server.protocols.kserve.errors import TritonError
from stoker.server.protocols.kserve.inference import Inference, Tensors
from stoker.server.protocols.kserve.model_config import Tensor, TritonModel
from stoker.server.protocols.kserve.tensors.dtypes import kserve_name

BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each input shape. If you "
    "want to specify the full shape including the batch dim in your input dims config, try setting max_batch_size to zero. See the model "
    "configuration docs for more info on max_batch_size."
)


def check_tensors(inference: Inference, tensors: Tensors, dtypes: dict[str, str]) -> None:
    """Check the inputs of a request and set `inference.inputs`. `tensors` and `dtypes`, which the client sent, are by declared name.

    `inference.inputs` are by role. Raises TritonError for missing, unknown and wrong inputs.
    """
    model = inference.model
    declared = {tensor.name: tensor for tensor in model.inputs}
    for name in tensors:
        if name not in declared:
            raise TritonError(f"unexpected inference input '{name[:200]}' for model '{model.name}'")
    check_outputs(inference)
    check_present(inference, tensors)
    for name, array in tensors.items():
        _check_tensor(inference, declared[name], array, dtypes[name])
    _check_rows(inference, tensors)
    inference.inputs = by_role(model, declared, tensors)


def by_role(model: TritonModel, declared: Mapping[str, Tensor], tensors: Tensors) -> Tensors:
    """The tensors by role. Raises TritonError for two with the same role, such as random_seed and seed."""
    names: dict[str, str] = {}
    for name in tensors:
        if (other := names.setdefault(declared[name].role or name, name)) != name:
            raise TritonError(f"inputs '{other}' and '{name}' of model '{model.name}' are the same. Send one of them.")
    return {role: tensors[name] for role, name in names.items()}


def check_outputs(inference: Inference) -> None:
    """Raise TritonError for a requested output that the model does not declare."""
    known = {tensor.name for tensor in inference.model.outputs}
    for name in inference.outputs:
        if name not in known:
            raise TritonError(f"unexpected inference output '{name[:200]}' for model '{inference.model.name}'")


def expected_shape(model: TritonModel, tensor: Tensor) -> list[int]:
    """The declared shape with the batch axis. -1: any size."""
    return [*([-1] if model.max_batch_size else []), *tensor.dims]


def check_present(inference: Inference, tensors: Tensors) -> None:
    """Raise TritonError with the names of missing required inputs."""
    model = inference.model
    required = [tensor.name for tensor in model.inputs if not tensor.optional]
    missing = [name for name in required if name not in tensors]
    if not missing:
        return
    total = len(model.inputs)
    expected_range = f"expected number of inputs between {len(required)} and {total}"
    expected = expected_range if len(required) < total else f"expected {total} inputs"
    raise TritonError(
        f"[request id: {inference.shown_id}] {expected} but got {len(tensors)} inputs for model '{model.name}'. Got input(s) "
        f"{_names(sorted(tensors))}, but missing required input(s) {_names(sorted(missing))}. Please provide all required input(s)."
    )


def _check_tensor(inference: Inference, tensor: Tensor, array: np.ndarray, dtype: str) -> None:
    """Raise TritonError if type or shape of an input differ from its declaration."""
    model, prefix = inference.model, f"[request id: {inference.shown_id}] "
    if dtype != kserve_name(tensor.dtype):
        message = f"inference input '{tensor.name}' data-type is '{dtype}', but model '{model.name}' expects '{kserve_name(tensor.dtype)}'"
        raise TritonError(prefix + message)
    expected = expected_shape(model, tensor)
    shape = array.shape
    if len(shape) != len(expected) or any(dim not in (-1, size) for dim, size in zip(expected, shape, strict=True)):
        note = BATCH_NOTE if model.max_batch_size else ""
        message = f"unexpected shape for input '{tensor.name}' for model '{model.name}'."
        raise TritonError(f"{prefix}{message} Expected {_dims(expected)}, got {_dims(shape)}. {note}")


def _check_rows(inference: Inference, tensors: Tensors) -> None:
    """Raise TritonError if inputs have different numbers of rows, or more than the model's max_batch_size."""
    model, prefix = inference.model, f"[request id: {inference.shown_id}] "
    if not model.max_batch_size or not tensors:
        return
    counts = {name: len(array) for name, array in tensors.items()}
    rows = next(iter(counts.values()))
    if different := next((name for name, count in counts.items() if count != rows), None):
        raise TritonError(f"{prefix}input '{different}' batch size does not match other inputs for '{model.name}'")
    if rows > model.max_batch_size:
        raise TritonError(f"{prefix}inference request batch-size must be <= {model.max_batch_size} for '{model.name}'")
    if rows == 0:
        raise TritonError(f"{prefix}inference request batch-size must be > 0 for '{model.name}'")


def _dims(shape: list[int] | tuple[int, ...]) -> str:
    """A shape in Triton's format: [1,2]."""
    return "[" + ",".join(map(str, shape)) + "]"


def _names(names: list[str]) -> str:
    """Names in Triton's format: ['a','b']."""
    return "[" + ",".join(f"'{name}'" for name in names) + "]"
