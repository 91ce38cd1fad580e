"""Triton's request parameters `priority` and `timeout`."""

from __future__ import annotations

from stoker.base.errors import RequestError
from stoker.base.fields.errors import InvalidValueError
from stoker.base.fields.values import Whole
from stoker.server.protocols.kserve.inference import Parameters
from stoker.server.protocols.kserve.model_config import QueuePolicy

_PRIORITY = Whole(0, (1 << 31) - 1)
_TIMEOUT_US = Whole(0, (1 << 63) - 1)


def priority(parameters: Parameters, queue: QueuePolicy) -> int:
    """Stoker's priority (lower is served first, default 0) of Triton's parameter `priority` (1 is the highest, 0 the model's default)."""
    level = _parameter("priority", parameters, _PRIORITY)
    if queue.priority_levels and level > queue.priority_levels:
        raise RequestError("priority", level, f"the model has {queue.priority_levels} levels", cure="0 is the default level.")
    return level - queue.default_priority_level if level else 0


def timeout_s(parameters: Parameters, default: float | None) -> float | None:
    """The deadline of a request: Triton's parameter `timeout` in microseconds, or `default` if that is shorter."""
    timeout_us = _parameter("timeout", parameters, _TIMEOUT_US)
    if not timeout_us:
        return default
    return min(timeout_us / 1e6, default) if default is not None else timeout_us / 1e6


def _parameter(name: str, parameters: Parameters, type: Whole) -> int:
    """The value of a request parameter, or 0 if absent. Raises RequestError."""
    try:
        value: int = type.check(parameters.get(name, 0))
    except InvalidValueError as error:
        raise error.request_error(name) from None
    return value
