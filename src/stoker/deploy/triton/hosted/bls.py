"""tensorrt_llm_bls inside Triton's Python backend. It calls preprocessing, tensorrt_llm and postprocessing through Triton."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from stoker.base.errors import RequestError
from stoker.deploy.triton.ensemble import steps
from stoker.deploy.triton.hosted.model import HostedModel
from stoker.server.errors import GenerationError
from stoker.server.protocols.kserve.inference import Inference, Response, Responses, Tensors
from stoker.server.protocols.kserve.tensors.dtypes import text_array

INCOMPLETE = "\ufffd"  # the output of postprocessing for bytes of an incomplete character
_PRE, _LLM, _ = steps()
_RENAMED = {source: target for target, source in _LLM.input_map.items() if not source.startswith("_")}
_TEXT = {source: target for target, source in _PRE.input_map.items()}
_BETWEEN = {target: name for target, private in _LLM.input_map.items() for name, internal in _PRE.output_map.items() if internal == private}
# Outputs of each step. Those that a step does not produce for a request are left out of its response.
_OUTPUTS = {
    "preprocessing": set(_PRE.output_map) - {"OUT_PROMPT_TABLE_EXTRA_IDS"},
    "tensorrt_llm": set(_LLM.output_map),
    "postprocessing": {"OUTPUT"},
}


class BLSModel(HostedModel):
    """Calls the other models for each request, and decodes all tokens so far for every response.

    No character is split then, and no space is lost. With accumulate_tokens a response contains the whole text, otherwise the text since
    the previous response.
    """

    async def run(self, inference: Inference) -> Responses:
        """The responses to one request. Raises RequestError for an input that the other models do not have."""
        names = {tensor.name for tensor in self.model.inputs if tensor.name not in _TEXT and tensor.name not in _RENAMED}
        if unknown := names.intersection(inference.inputs):
            raise RequestError(min(unknown), "a tensor", "the BLS model has no use for this input", cure="Leave it out.")
        preprocessed = await self._call(
            "preprocessing", {_TEXT[n]: a for n, a in inference.inputs.items() if n in _TEXT}, inference.request_id
        )
        tokens = {target: preprocessed[name] for target, name in _BETWEEN.items() if name in preprocessed}
        # Triton passes [rows] for inputs with `reshape: { shape: [ ] }`, and expects [rows, 1] from this model.
        direct = {name: array[:, None] if array.ndim == 1 else array for name, array in inference.inputs.items() if name in _RENAMED}
        tokens |= {_RENAMED[name]: array for name, array in direct.items()}
        streaming = "stream" in inference.inputs and bool(inference.inputs["stream"].any())
        ids: list[int] = []
        previous = ""
        async for result in self._stream("tensorrt_llm", tokens, inference.request_id):
            texts = await self._decode(result, ids if streaming else None)
            whole = self.options.accumulate_tokens or not streaming
            yield [self._response(result, texts if whole else [texts[0][len(previous) :]])]
            previous = texts[0]

    def _response(self, result: Tensors, texts: list[str]) -> Response:
        """The response with the texts of all beams and the other declared outputs."""
        declared = [tensor.name for tensor in self.model.outputs]
        outputs = {name: result[name] for name in declared if name in result}
        return Response(outputs=outputs | {"text_output": text_array([text.encode() for text in texts], (len(texts),))})

    async def _decode(self, result: Tensors, previous_ids: list[int] | None) -> list[str]:
        """The text of each beam. When streaming, the ids are appended to `previous_ids`, and all of them are decoded."""
        ids, lengths = result["output_ids"], result["sequence_length"]
        if previous_ids is not None:
            previous_ids += ids[0, 0, : int(lengths.flat[0])].tolist()
            ids, lengths = np.array([[previous_ids]], np.int32), np.array([[len(previous_ids)]], np.int32)
        decoded = await self._call("postprocessing", {"TOKENS_BATCH": ids, "SEQUENCE_LENGTH": lengths}, "")
        texts = [item.decode() for item in decoded["OUTPUT"].flat]
        return texts if previous_ids is None else [texts[0].rstrip(INCOMPLETE)]

    async def _call(self, kind: str, inputs: Tensors, request_id: str) -> Tensors:
        """The outputs of another model for one request with one response."""
        return self._tensors(await self._request(kind, inputs, request_id).async_exec())

    async def _stream(self, kind: str, inputs: Tensors, request_id: str) -> Any:
        """Yield the outputs of each response of another model."""
        request = self._request(kind, inputs, request_id)
        if not self.model.decoupled:
            yield self._tensors(await request.async_exec())
            return
        responses = iter(await request.async_exec(decoupled=True))
        while (response := await asyncio.to_thread(next, responses, None)) is not None:
            if tensors := self._tensors(response):
                yield tensors

    def _request(self, kind: str, inputs: Tensors, request_id: str) -> Any:
        """A request to another model."""
        model = self.options.of_kind(kind)
        assert model is not None
        outputs = [tensor.name for tensor in model.outputs if tensor.name in _OUTPUTS[kind]]
        tensors = [self.backend.Tensor(name, np.ascontiguousarray(array)) for name, array in inputs.items()]
        return self.backend.InferenceRequest(model_name=model.name, request_id=request_id, inputs=tensors, requested_output_names=outputs)

    def _tensors(self, response: Any) -> Tensors:
        """The output tensors of a response. Raises GenerationError if it is an error."""
        if response.has_error():
            raise GenerationError(response.error().message())
        return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
