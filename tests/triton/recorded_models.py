"""The models of the recorded Triton server, reconstructed from their responses."""

from __future__ import annotations

from typing import Any

import numpy as np

from stoker.server.errors import GenerationError
from stoker.server.protocols.kserve.inference import Inference, Response, Responses, ServedModel
from stoker.server.protocols.kserve.model_config import Step, Tensor, TritonModel
from stoker.server.protocols.kserve.models.catalogue import Catalogue
from stoker.server.protocols.kserve.tensors.dtypes import text_array

_INPUTS = (
    Tensor(name="text_input", dtype="STRING", dims=(1,)),
    Tensor(name="max_tokens", dtype="INT32", dims=(1,)),
    Tensor(name="stream", dtype="BOOL", dims=(1,), optional=True),
    Tensor(name="stop_words", dtype="STRING", dims=(-1,), optional=True),
    Tensor(name="bad_words", dtype="STRING", dims=(-1,), optional=True),
    Tensor(name="temperature", dtype="FP32", dims=(1,), optional=True),
)
_OUTPUTS = (
    Tensor(name="text_output", dtype="STRING", dims=(-1,)),
    Tensor(name="cum_log_probs", dtype="FP32", dims=(-1,)),
    Tensor(name="output_ids", dtype="INT32", dims=(-1, -1)),
    Tensor(name="finished", dtype="BOOL", dims=(-1,)),
)
_STEPS = (
    Step(
        model_name="preprocessing",
        input_map={"text_input": "text_input", "max_tokens": "max_tokens"},
        output_map={"request_output_len": "_len", "input_ids": "_ids"},
    ),
    Step(model_name="llm_decoupled", input_map={"input_ids": "_ids", "request_output_len": "_len"}, output_map={"output_ids": "_out"}),
    Step(model_name="postprocessing", input_map={"output_ids": "_out"}, output_map={"text_output": "text_output"}),
)


def _generated(text: str, *, finished: bool, inference: Inference) -> Response:
    outputs = {
        "text_output": text_array([text.encode()], (1,)),
        "cum_log_probs": np.array([-0.5], np.float32),
        "output_ids": np.array([[1, 2, 3]], np.int32),
        "finished": np.array([finished]),
    }
    return Response(outputs={n: v for n, v in outputs.items() if n in (inference.outputs or outputs)}, final=finished)


async def generate(inference: Inference) -> Responses:
    text, count = inference.inputs["text_input"].flat[0].decode(), int(inference.inputs["max_tokens"].flat[0])
    if text == "ERR":
        raise GenerationError("boom from model")
    if not inference.inputs.get("stream", np.array([False])).any() or not inference.model.decoupled:
        yield [_generated(" ".join([text, *(f"t{i}" for i in range(count))]), finished=True, inference=inference)]
        return
    for i in range(count):
        if text == "MIDERR" and i == 2:
            raise GenerationError("mid-stream boom")
        yield [_generated(f' t{i} "q" é\n/', finished=i == count - 1, inference=inference)]


async def repeat_letters(inference: Inference) -> Responses:
    """The letters of the prompt, repeated. A decoupled model returns one letter per response."""
    text, count = inference.inputs["text_input"].flat[0].decode(), int(inference.inputs["max_tokens"].flat[0])
    letters = [text[i % len(text)] for i in range(count)]
    for i, part in enumerate(letters if inference.model.decoupled else ["".join(letters)]):
        yield [Response(outputs={"text_output": text_array([part.encode()], (1, 1))}, final=inference.model.decoupled and i == count - 1)]


def _model(name: str, *, decoupled: bool = False, **more: Any) -> TritonModel:
    return TritonModel(name=name, kind="tensorrt_llm", **{"backend": "python", "decoupled": decoupled, **more})


def catalogue() -> Catalogue:
    text = {"inputs": _INPUTS[:2], "outputs": (Tensor(name="text_output", dtype="STRING", dims=(1,)),), "max_batch_size": 8}
    ensemble = {**text, "platform": "ensemble", "backend": "", "steps": _STEPS}
    models = [
        (_model("gen", inputs=_INPUTS, outputs=_OUTPUTS), generate),
        (_model("gen_decoupled", decoupled=True, inputs=_INPUTS, outputs=_OUTPUTS), generate),
        (_model("ensemble", **ensemble), repeat_letters),
        (_model("ensemble_decoupled", decoupled=True, **ensemble), repeat_letters),
        (_model("bls", **text), repeat_letters),
        (_model("bls_decoupled", decoupled=True, **text), repeat_letters),
        *((_model(name), generate) for name in ("llm", "llm_decoupled", "postprocessing", "preprocessing", "repeat", "simple")),
    ]
    return Catalogue([ServedModel(model=model, run=run, ready=lambda: True) for model, run in models])
