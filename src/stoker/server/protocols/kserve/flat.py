"""The flat JSON of Triton's generate extension: inputs by name as scalars or lists, typed by the model's declaration.

The messages are Triton's own, followed by the input's name and value; where Triton answers 500 for a client's mistake, this is 400.
"""

from __future__ import annotations

from typing import Any

from stoker.base.errors import RequestError, StokerError
from stoker.server.schemas.triton_models import Tensor


class InputError(StokerError):
    """An input that Triton would refuse."""

    status = 400
    code = "bad_input"


_CHECKS: dict[str, tuple[tuple[type, ...], str]] = {
    "STRING": ((str,), "Unable to parse JSON bytes array: attempt to access JSON non-string as string"),
    "BOOL": ((bool,), "Unable to parse 'data': attempt to access JSON non-boolean as boolean"),
    "INT32": ((int,), "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"),
    "UINT64": ((int,), "Unable to parse 'data': attempt to access JSON non-unsigned-integer as unsigned-integer"),
    "FP32": ((int, float), "Unable to parse 'data': attempt to access JSON non-number as double"),
}
_RANGES = {"INT32": (-(1 << 31), (1 << 31) - 1), "UINT64": (0, (1 << 64) - 1), "FP32": (-3.4e38, 3.4e38)}


def read_inputs(body: dict[str, Any], inputs: tuple[Tensor, ...], model: str) -> tuple[dict[str, Any], str | None]:
    """The declared inputs of a request by their role, lists as lists, and its id. Raises InputError."""
    declared = {tensor.name: tensor for tensor in inputs}
    request_id = body.get("id")
    nested = body.get("parameters")
    flat = {**(nested if isinstance(nested, dict) else {}), **{k: v for k, v in body.items() if k not in ("id", "parameters")}}
    values = {}
    for name, value in flat.items():
        if (tensor := declared.get(name)) is not None:
            values[tensor.role or name] = _value(tensor, value)
        elif not isinstance(value, (bool, int, str)):
            raise InputError(f"parameter '{name[:80]}' has invalid type. It should be either 'int', 'bool', or 'string'.")
    _check_present(flat, inputs, model, request_id)
    return values, None if request_id is None else str(request_id)


def _check_present(given: dict[str, Any], inputs: tuple[Tensor, ...], model: str, request_id: Any) -> None:
    required = [tensor.name for tensor in inputs if not tensor.optional]
    found = [tensor.name for tensor in inputs if tensor.name in given]
    if missing := [name for name in required if name not in given]:
        raise InputError(
            f"[request id: {'<id_unknown>' if request_id is None else request_id}] expected number of inputs between {len(required)} and "
            f"{len(inputs)} but got {len(found)} inputs for model '{model}'. Got input(s) {_names(found)}, but missing required input(s) "
            f"{_names(missing)}. Please provide all required input(s)."
        )


def _value(tensor: Tensor, value: Any) -> Any:
    """A scalar, or a list for a tensor of any length; a scalar stands for a list of one."""
    if tensor.dims == (-1,):
        return [_item(tensor, item) for item in (value if isinstance(value, list) else [value])]
    if isinstance(value, list):
        if len(value) != 1:
            raise InputError(f"The schema can not convert input '{tensor.name}' to tensor with proper shape")
        value = value[0]
    return _item(tensor, value)


def _item(tensor: Tensor, value: Any) -> Any:
    if tensor.dtype not in _CHECKS:
        raise RequestError(tensor.name, value, f"{tensor.dtype} tensors are not read from JSON")
    types, message = _CHECKS[tensor.dtype]
    low, high = _RANGES.get(tensor.dtype, (None, None))
    if type(value) not in types or (low is not None and not low <= value <= high):
        raise InputError(f"{message} (input '{tensor.name}': {str(value)[:80]!r})")
    return value


def _names(names: list[str]) -> str:
    return "[" + ",".join(f"'{name}'" for name in names) + "]"
