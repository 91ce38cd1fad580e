"""`repeat_int32`: a decoupled model with one response per element of IN.

DELAY[i] are the milliseconds before response i, and WAIT those before the request ends. OUT is the element, and IDX its index.
"""

from __future__ import annotations

import asyncio

import numpy as np

from stoker.server.protocols.kserve.errors import TritonError
from stoker.server.protocols.kserve.inference import Inference, Response, Responses
from stoker.server.protocols.kserve.model_config import Tensor, TritonModel

MAX_DELAY_MS = 60_000


async def _repeat(inference: Inference) -> Responses:
    """Respond with each element of IN after its DELAY, and end after WAIT. Both are in milliseconds. Raises TritonError for long times."""
    values, delays_ms, wait_ms = (inference.inputs[name] for name in ("IN", "DELAY", "WAIT"))
    if len(values) != len(delays_ms):
        raise TritonError(f"expected IN and DELAY shape to match, got {list(values.shape)} and {list(delays_ms.shape)}")
    if int(wait_ms[0]) > MAX_DELAY_MS or (len(delays_ms) and int(delays_ms.max()) > MAX_DELAY_MS):
        raise TritonError(f"DELAY and WAIT are milliseconds, at most {MAX_DELAY_MS}")
    for index, (value, delay_ms) in enumerate(zip(values, delays_ms, strict=True)):
        await asyncio.sleep(int(delay_ms) / 1e3)
        outputs = {"OUT": np.array([value], np.int32), "IDX": np.array([index], np.uint32)}
        yield [Response(outputs={name: array for name, array in outputs.items() if name in (inference.outputs or outputs)})]
    await asyncio.sleep(int(wait_ms[0]) / 1e3)
    yield [Response(final=True)]


MODELS = (
    (
        TritonModel(
            name="repeat_int32",
            kind="test",
            backend="python",
            decoupled=True,
            inputs=(
                Tensor(name="IN", dtype="INT32", dims=(-1,)),
                Tensor(name="DELAY", dtype="UINT32", dims=(-1,)),
                Tensor(name="WAIT", dtype="UINT32", dims=(1,)),
            ),
            outputs=(Tensor(name="OUT", dtype="INT32", dims=(1,)), Tensor(name="IDX", dtype="UINT32", dims=(1,))),
        ),
        _repeat,
    ),
)
