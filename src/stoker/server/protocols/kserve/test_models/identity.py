"""`simple_identity`: OUTPUT0 = INPUT0, strings of shape [n]."""

from __future__ import annotations

from stoker.server.protocols.kserve.inference import Inference, Response, Responses
from stoker.server.protocols.kserve.model_config import Tensor, TritonModel


async def _return_input(inference: Inference) -> Responses:
    """The response is the input."""
    yield [Response(outputs={"OUTPUT0": inference.inputs["INPUT0"]}, final=True)]


MODELS = (
    (
        TritonModel(
            name="simple_identity",
            kind="test",
            backend="python",
            max_batch_size=8,
            inputs=(Tensor(name="INPUT0", dtype="STRING", dims=(-1,)),),
            outputs=(Tensor(name="OUTPUT0", dtype="STRING", dims=(-1,)),),
        ),
        _return_input,
    ),
)
