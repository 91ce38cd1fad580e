"""`simple`, `simple_int8` and `simple_string`: OUTPUT0 = INPUT0 + INPUT1 and OUTPUT1 = INPUT0 - INPUT1, of shape [16]."""

from __future__ import annotations

import numpy as np

from stoker.server.protocols.kserve.errors import TritonError
from stoker.server.protocols.kserve.inference import Inference, Response, Responses
from stoker.server.protocols.kserve.model_config import Tensor, TritonModel
from stoker.server.protocols.kserve.tensors.dtypes import text_array

_LENGTH = 16


def _model(name: str, dtype: str) -> TritonModel:
    """A model with two inputs and two outputs of this type."""
    inputs = tuple(Tensor(name=f"INPUT{i}", dtype=dtype, dims=(_LENGTH,)) for i in range(2))
    outputs = tuple(Tensor(name=f"OUTPUT{i}", dtype=dtype, dims=(_LENGTH,)) for i in range(2))
    return TritonModel(name=name, kind="test", backend="python", max_batch_size=8, inputs=inputs, outputs=outputs)


async def _add_and_subtract(inference: Inference) -> Responses:
    """Add and subtract the inputs. Strings are converted to numbers and back."""
    left, right = inference.inputs["INPUT0"], inference.inputs["INPUT1"]
    strings = left.dtype == object
    if strings:
        left, right = _numbers(left), _numbers(right)
    with np.errstate(over="ignore"):  # int8 wraps around, as in Triton's model
        results = {"OUTPUT0": left + right, "OUTPUT1": left - right}
    names = inference.outputs or tuple(results)
    outputs = {name: _strings(array) if strings else array for name, array in results.items() if name in names}
    yield [Response(outputs=outputs, final=True)]


def _numbers(array: np.ndarray) -> np.ndarray:
    """The whole numbers that BYTES elements spell, as int64. Raises TritonError."""
    try:
        return np.array([int(item) for item in array.flat], np.int64).reshape(array.shape)
    except (ValueError, OverflowError):
        raise TritonError("simple_string: each element must be a whole number of 64 bits, as text") from None


def _strings(array: np.ndarray) -> np.ndarray:
    """The numbers as strings."""
    return text_array([b"%d" % item for item in array.flat], array.shape)


MODELS = tuple(
    (_model(name, dtype), _add_and_subtract) for name, dtype in (("simple", "INT32"), ("simple_int8", "INT8"), ("simple_string", "STRING"))
)
