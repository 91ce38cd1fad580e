"""One row of a request's input tensors, read by role as Python values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from stoker.base.fields.errors import InvalidValueError
from stoker.server.protocols.kserve.errors import TritonError
from stoker.server.protocols.kserve.inference import Inference
from stoker.server.protocols.kserve.tensors.fields import REJECTED

_DECIMALS = 5  # of floats that are compared with harmless values: TensorRT-LLM's default for runtime_top_p_min is 1e-6


class InputRow:
    """Row `index` of the inputs of an inference. The methods return the default, or an empty list, for an absent input."""

    def __init__(self, inference: Inference, index: int) -> None:
        self.index = index
        batched = inference.model.max_batch_size > 0
        self._arrays = {role: array[index] if batched else array for role, array in inference.inputs.items()}

    @property
    def roles(self) -> Iterable[str]:
        """The roles of the inputs that the request has."""
        return self._arrays.keys()

    @property
    def num_bytes(self) -> int:
        """The size of the inputs in this row, without that of texts."""
        return sum(array.nbytes for array in self._arrays.values())

    def check_rejected(self) -> None:
        """Raise RequestError for an input that requests something Stoker does not support."""
        for role, array in self._arrays.items():
            if role in REJECTED and (value := _requested(array)) is not None:
                try:
                    REJECTED[role].check(value)
                except InvalidValueError as error:
                    raise error.request_error(role) from None

    def value(self, role: str, default: Any = None) -> Any:
        """A scalar as a Python value; bytes are decoded to text."""
        array = self._arrays.get(role)
        if array is None or not array.size:
            return default
        item = array.flat[0]
        return _text(role, item) if isinstance(item, bytes) else item.item()

    def array(self, role: str) -> np.ndarray | None:
        """The elements of the input in this row. None if absent."""
        return self._arrays.get(role)

    def size(self, role: str) -> int:
        """The number of elements of the input in this row."""
        array = self._arrays.get(role)
        return 0 if array is None else array.size

    def ids(self, role: str, count: int) -> list[int]:
        """The first `count` token ids of the input in this row."""
        array = self._arrays.get(role)
        return [] if array is None else array.ravel()[:count].tolist()

    def texts(self, role: str) -> list[str]:
        """The strings of a list, without empty ones, which templates of clients send."""
        array = self._arrays.get(role)
        return [] if array is None else [text for item in array.flat if (text := _text(role, item))]


def input_rows(inference: Inference) -> list[InputRow]:
    """The rows of an inference. A model without a batch axis has one."""
    count = len(next(iter(inference.inputs.values()))) if inference.model.max_batch_size else 1
    return [InputRow(inference, index) for index in range(count)]


def _requested(array: np.ndarray) -> Any:
    """The value of a rejected input: a scalar, or a description of a larger tensor. None if it requests nothing.

    An empty tensor, false and an empty string request nothing. A number does, also 0: there may be an adapter 0.
    """
    if not array.size or (array.dtype in (bool, object) and not any(bool(item) for item in array.flat)):
        return None
    if array.size > 1:
        return f"a tensor of shape {list(array.shape)}"
    item = array.flat[0]
    if isinstance(item, bytes):
        return item.decode(errors="replace")
    return round(item.item(), _DECIMALS) if array.dtype.kind == "f" else item.item()


def _text(role: str, item: bytes) -> str:
    """Decode an element. Raises TritonError if it is not UTF-8."""
    try:
        return item.decode()
    except UnicodeDecodeError as error:
        raise TritonError(f"input '{role}' is not UTF-8 at byte {error.start}") from None
