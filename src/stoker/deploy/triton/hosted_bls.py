"""tensorrt_llm_bls inside a real Triton server: asks preprocessing, tensorrt_llm and postprocessing by Triton's own calls."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from stoker.base.errors import RequestError
from stoker.deploy.triton.ensemble import steps
from stoker.deploy.triton.hosting import Hosted
from stoker.server.errors import GenerationError
from stoker.server.protocols.kserve.inference import Inference, Response, Responses, Tensors
from stoker.server.protocols.kserve.tensors.dtypes import text_array

UNFINISHED = "\ufffd"  # what postprocessing writes for the bytes of a character that is not whole yet
_PRE, _LLM, _ = steps()
_RENAMED = {source: target for target, source in _LLM.input_map.items() if not source.startswith("_")}
_TEXT = {source: target for target, source in _PRE.input_map.items()}
_BETWEEN = {target: name for target, private in _LLM.input_map.items() for name, made in _PRE.output_map.items() if made == private}
# What each step answers; declared outputs beyond these are never sent.
_PRODUCED = {
    "preprocessing": set(_PRE.output_map) - {"OUT_PROMPT_TABLE_EXTRA_IDS"},
    "tensorrt_llm": {
        "output_ids", "sequence_length", "cum_log_probs", "output_log_probs", "context_logits", "generation_logits", "batch_index",
        "sequence_index",
    },
    "postprocessing": {"OUTPUT"},
}  # fmt: skip


class BLSModel(Hosted):
    """All tokens so far are decoded at every response: no character is split and no space lost. With accumulate_tokens a response
    shows that whole text, otherwise what it adds to the one before."""

    async def run(self, inference: Inference) -> Responses:
        names = {tensor.name for tensor in self.model.inputs if tensor.name not in _TEXT and tensor.name not in _RENAMED}
        if unknown := names.intersection(inference.inputs):
            raise RequestError(min(unknown), "a tensor", "the BLS model passes no such input on", cure="Leave it out.")
        before = await self._one("preprocessing", {_TEXT[n]: a for n, a in inference.inputs.items() if n in _TEXT}, inference.request_id)
        tokens = {target: before[name] for target, name in _BETWEEN.items() if name in before}
        tokens |= {_RENAMED[name]: array for name, array in inference.inputs.items() if name in _RENAMED}
        streaming = "stream" in inference.inputs and bool(inference.inputs["stream"].any())
        seen: list[int] = []
        shown = ""
        async for answer in self._many("tensorrt_llm", tokens, inference.request_id):
            text = await self._text(answer, seen if streaming else None)
            yield [self._shown(answer, text if self.options.accumulate_tokens or not streaming else [text[0][len(shown) :]])]
            shown = text[0]

    def _shown(self, answer: Tensors, texts: list[str]) -> Response:
        declared = [tensor.name for tensor in self.model.outputs]
        passed = {name: answer[name] for name in declared if name in answer}
        return Response(outputs=passed | {"text_output": text_array([text.encode() for text in texts], (1, len(texts)))})

    async def _text(self, answer: Tensors, seen: list[int] | None) -> list[str]:
        """The text of each beam, with the tokens before it when streaming."""
        ids, lengths = answer["output_ids"], answer["sequence_length"]
        if seen is not None:
            seen += ids[0, 0, : int(lengths.flat[0])].tolist()
            ids, lengths = np.array([[seen]], np.int32), np.array([[len(seen)]], np.int32)
        found = await self._one("postprocessing", {"TOKENS_BATCH": ids, "SEQUENCE_LENGTH": lengths}, "")
        texts = [item.decode() for item in found["OUTPUT"].flat]
        return texts if seen is None else [texts[0].rstrip(UNFINISHED)]

    async def _one(self, kind: str, inputs: Tensors, request_id: str) -> Tensors:
        return self._tensors(await self._request(kind, inputs, request_id).async_exec())

    async def _many(self, kind: str, inputs: Tensors, request_id: str) -> Any:
        request = self._request(kind, inputs, request_id)
        if not self.model.decoupled:
            yield self._tensors(await request.async_exec())
            return
        answers = iter(await request.async_exec(decoupled=True))
        while (answer := await asyncio.to_thread(next, answers, None)) is not None:
            if tensors := self._tensors(answer):
                yield tensors

    def _request(self, kind: str, inputs: Tensors, request_id: str) -> Any:
        model = self.options.of_kind(kind)
        assert model is not None
        outputs = [tensor.name for tensor in model.outputs if tensor.name in _PRODUCED[kind]]
        tensors = [self.backend.Tensor(name, np.ascontiguousarray(array)) for name, array in inputs.items()]
        return self.backend.InferenceRequest(model_name=model.name, request_id=request_id, inputs=tensors, requested_output_names=outputs)

    def _tensors(self, answer: Any) -> Tensors:
        if answer.has_error():
            raise GenerationError(answer.error().message())
        return {tensor.name(): tensor.as_numpy() for tensor in answer.output_tensors()}
