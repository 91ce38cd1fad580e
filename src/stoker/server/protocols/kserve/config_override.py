"""The config that a client sends when it loads a model, in place of the one in the repository."""

from __future__ import annotations

from typing import Any

import msgspec

from stoker.server.protocols.kserve.errors import TritonError
from stoker.server.protocols.kserve.metadata import config as config_of
from stoker.server.protocols.kserve.model_config import MAX_BATCH_SIZE, TritonModel

CONFIG = "config"  # parameter of a load request: the config as JSON


def read_batch_size(model: TritonModel, text: Any) -> int:
    """The max_batch_size of a config. Fields other than it must have the values that the model has, as get_model_config returns them.

    Raises TritonError.
    """
    try:
        fields = msgspec.json.decode(text)
    except (msgspec.DecodeError, TypeError) as error:
        raise _failed(model, f"the config is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise _failed(model, "the config is not a JSON object")
    present = config_of(model)
    for name, value in fields.items():
        if name != "max_batch_size" and (name not in present or present[name] != value):
            raise _failed(model, f"only max_batch_size can be replaced, and the config has another {name[:80]!r}. Change config.pbtxt")
    size = fields.get("max_batch_size", model.max_batch_size)
    number = int(size) if isinstance(size, str) and size.isascii() and size.isdigit() and len(size) < 10 else size
    if type(number) is not int or not 1 <= number <= MAX_BATCH_SIZE or not model.max_batch_size:
        limit = f"from 1 to {MAX_BATCH_SIZE}" if model.max_batch_size else "0, as in config.pbtxt, because its tensors have no batch axis"
        raise _failed(model, f"max_batch_size is {str(size)[:40]}, and it must be {limit}")
    return number


def _failed(model: TritonModel, reason: str) -> TritonError:
    """The error of a load, with Triton's text."""
    return TritonError(f"failed to load '{model.name}', {reason}")
