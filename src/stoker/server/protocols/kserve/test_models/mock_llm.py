"""`mock_llm`: a decoupled model that repeats its prompt, for tests of the generate endpoints.

Parameters of the request: REPETITION (number of responses with STREAM, default 1), DELAY (seconds before each), FAIL_LAST (the last
response with STREAM is an error).
"""

from __future__ import annotations

import asyncio

from stoker.server.errors import GenerationError
from stoker.server.protocols.kserve.errors import TritonError
from stoker.server.protocols.kserve.inference import Inference, Response, Responses
from stoker.server.protocols.kserve.model_config import Tensor, TritonModel

MAX_REPETITION = 1 << 16
MAX_DELAY_S = 60


async def _repeat_prompt(inference: Inference) -> Responses:
    """Respond with the prompt: once, or REPETITION times with STREAM. Raises TritonError for parameters outside their ranges."""
    outputs = {"TEXT": inference.inputs["PROMPT"]}
    if not inference.inputs["STREAM"].any():
        yield [Response(outputs=outputs, final=True)]
        return
    repetition, delay_s = inference.parameters.get("REPETITION", 1), inference.parameters.get("DELAY", 0)
    if type(repetition) is not int or not 0 <= repetition <= MAX_REPETITION:
        raise TritonError(f"REPETITION must be a whole number from 0 to {MAX_REPETITION}")
    if type(delay_s) not in (int, float) or not 0 <= delay_s <= MAX_DELAY_S:
        raise TritonError(f"DELAY must be a number of seconds from 0 to {MAX_DELAY_S}")
    for _ in range(repetition):
        await asyncio.sleep(delay_s)
        yield [Response(outputs=outputs)]
    if inference.parameters.get("FAIL_LAST") is True:
        raise GenerationError("An Error Occurred")
    yield [Response(final=True)]


MODELS = (
    (
        TritonModel(
            name="mock_llm",
            kind="test",
            backend="python",
            decoupled=True,
            inputs=(Tensor(name="PROMPT", dtype="STRING", dims=(1, 1)), Tensor(name="STREAM", dtype="BOOL", dims=(1, 1))),
            outputs=(Tensor(name="TEXT", dtype="STRING", dims=(1, -1)),),
        ),
        _repeat_prompt,
    ),
)
