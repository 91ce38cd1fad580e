"""The common part of the three models that generate: rows to requests, and deltas or completions to responses."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec

from stoker.base.errors import RequestError
from stoker.base.types import Delta, FinishReason, GenerationRequest, SamplingParams
from stoker.frontend.service import Choice, Completion, Service
from stoker.server.errors import sequence_error
from stoker.server.protocols.kserve.errors import TritonError
from stoker.server.protocols.kserve.in_flight import InFlight
from stoker.server.protocols.kserve.inference import MAX_CACHED, TEXT, Inference, Parameters, Response, Responses, Tensors
from stoker.server.protocols.kserve.model_config import QueuePolicy, TritonOptions
from stoker.server.protocols.kserve.models import stop_sequences as stop_ids
from stoker.server.protocols.kserve.models.request_parameters import priority, timeout_s
from stoker.server.protocols.kserve.models.results import Scores, SequencePart, common_outputs
from stoker.server.protocols.kserve.models.row_responses import gather_responses, merge_responses
from stoker.server.protocols.kserve.tensors.input_row import InputRow, input_rows
from stoker.server.settings import ServerSettings

NO_PARAMETERS: Parameters = {}  # shared by all responses without parameters, so that encoders recognize it

_request_numbers = itertools.count()
_COMMON_OUTPUTS = frozenset(("cum_log_probs", "output_log_probs", "context_logits", "generation_logits", "batch_index", "sequence_index"))


class PlannedRow(msgspec.Struct, kw_only=True):
    """One row of an inference, checked and ready to run."""

    row: int
    request: GenerationRequest
    stop_words: list[tuple[int, ...]]  # those with several tokens
    streaming: bool
    excludes_input: bool  # a whole answer does not contain the prompt
    names: tuple[str, ...]  # outputs of each response
    texts: dict[int, str] = {}  # text so far by sequence, with accumulate_tokens

    @property
    def scored(self) -> bool:
        """Whether responses contain log-probabilities."""
        return self.request.params.logprobs is not None


class GeneratingModel(ABC):
    """A model that generates. `service` returns the generation service, or raises UnavailableError."""

    own_outputs: tuple[str, ...]  # outputs other than those of all three models

    def __init__(self, service: Callable[[], Service], options: TritonOptions, settings: ServerSettings, in_flight: InFlight) -> None:
        self._service = service
        self._options = options
        self._settings = settings
        self._in_flight = in_flight
        self._default_names: tuple[str, ...] = ()
        self._cached: dict[tuple[tuple[str, ...], int, int], Tensors] = {}

    @abstractmethod
    def plan(self, row: InputRow, service: Service) -> tuple[str | list[int], SamplingParams, list[tuple[int, ...]]]:
        """(prompt, sampling parameters, stop words with several tokens) of a row. Raises RequestError."""

    @abstractmethod
    def tensors(self, planned: PlannedRow, parts: list[SequencePart], prompt_ids: list[int], service: Service) -> Tensors:
        """The outputs `own_outputs` for the sequences or beams of one row. `prompt_ids` precede each; a delta has none."""

    def text(self, planned: PlannedRow, part: SequencePart, prompt_ids: list[int], service: Service) -> str:
        """The text of one sequence, for models whose last output is text_output."""
        raise NotImplementedError

    async def run(self, inference: Inference) -> Responses:
        """Generate. Streaming returns one response per delta, otherwise one per row and sequence.

        A caller that accepts only one response receives all rows and sequences in one.
        """
        service, names = self._service(), self._names(inference)
        if "stop" in inference.inputs and inference.inputs["stop"].any():
            self._in_flight.cancel(inference.request_id)
            yield [Response(final=True)]
            return
        planned = [self._planned(row, inference, service, names) for row in input_rows(inference)]
        with self._in_flight.running(inference.request_id, lambda: [service.cancel(row.request.request_id) for row in planned]):
            async with aclosing(self._run_rows(planned, inference, service)) as responses:
                async for batch in responses:
                    yield batch

    async def complete(self, inference: Inference) -> list[Response]:
        """The first responses of `run`, at most two. A single row without streaming uses no generators, each of which costs 5 µs."""
        service, names = self._service(), self._names(inference)
        if "stop" not in inference.inputs and len(batch_rows := input_rows(inference)) == 1:
            planned = self._planned(batch_rows[0], inference, service, names)
            if not planned.streaming and planned.request.params.n == 1:
                with self._in_flight.running(inference.request_id, lambda: service.cancel(planned.request.request_id)):
                    return await self._whole(planned, service)
        responses: list[Response] = []
        async with aclosing(self.run(inference)) as batches:
            async for batch in batches:
                responses += batch
                if len(responses) > 1:
                    break
        return responses

    def _run_rows(self, planned: list[PlannedRow], inference: Inference, service: Service) -> Responses:
        stream = merge_responses([self._row(row, service) for row in planned]) if len(planned) > 1 else self._row(planned[0], service)
        whole = not any(row.streaming for row in planned) and (inference.single or not inference.model.decoupled)
        multiple = len(planned) > 1 or planned[0].request.params.n > 1
        return gather_responses(stream, self._pad_id(inference)) if whole and multiple else stream

    def _names(self, inference: Inference) -> tuple[str, ...]:
        """The outputs of each response, in declared order. Raises RequestError for a requested output that is not served."""
        if not inference.outputs and self._default_names:
            return self._default_names
        produced = _COMMON_OUTPUTS.union(self.own_outputs)
        if missing := next((name for name in inference.outputs if name not in produced), None):
            raise RequestError("outputs", missing, f"the served outputs are {', '.join(sorted(produced))}", cure="Leave it out.")
        requested = inference.outputs or produced
        names = tuple([tensor.name for tensor in inference.model.outputs if tensor.name in produced and tensor.name in requested])
        if not inference.outputs:
            self._default_names = names
        return names

    def _planned(self, row: InputRow, inference: Inference, service: Service, names: tuple[str, ...]) -> PlannedRow:
        """Check a row and build its request. Raises TritonError or RequestError."""
        prompt, params, stop_words = self.plan(row, service)
        streaming = row.value("streaming", row.value("stream", False))
        if streaming and not inference.model.decoupled:
            raise TritonError("Streaming is only supported if model is deployed using decoupled mode.")
        if streaming and params.beam_width > 1:
            raise RequestError("beam_width", params.beam_width, "beams are not streamed", cure="Set streaming to false.")
        if stop_words and params.beam_width > 1:
            raise RequestError(
                "stop_words_list",
                stop_words[0],
                "with beam search, a stop word must have one token",
                cure="Use stop_words of the ensemble.",
            )
        excludes = row.value("exclude_input_in_output", self._options.exclude_input_in_output)
        request = self._request(prompt, params, inference)
        return PlannedRow(row=row.index, request=request, stop_words=stop_words, streaming=streaming, excludes_input=excludes, names=names)

    def _request(self, prompt: str | list[int], params: SamplingParams, inference: Inference) -> GenerationRequest:
        queue = inference.model.queue or QueuePolicy()
        return GenerationRequest(
            request_id=f"kserve-{next(_request_numbers)}",
            prompt=prompt,
            params=params,
            add_special_tokens=self._settings.add_special_tokens,
            priority=priority(inference.parameters, queue),
            timeout_s=timeout_s(inference.parameters, self._settings.request_timeout_s),
        )

    def _row(self, planned: PlannedRow, service: Service) -> Responses:
        return self._streamed(planned, service) if planned.streaming else self._completed(planned, service)

    async def _streamed(self, planned: PlannedRow, service: Service) -> Responses:
        """One response per delta that has something to show."""
        scores = [Scores(normalized=self._options.normalize_log_probs) for _ in range(planned.request.params.n)]
        left = len(scores)
        async with aclosing(_stream(planned, service)) as batches:
            async for deltas in batches:
                responses = []
                for delta in deltas:
                    left -= delta.finish_reason is not None
                    _check_ending(delta, service, delta.token_ids or scores[delta.index].length)
                    part = scores[delta.index].part(delta.index, delta.text, delta.token_ids, delta.logprobs)
                    if self.is_shown(delta) or planned.scored:
                        responses.append(self._response(planned, [part], [], service, delta.finish_reason, final=not left))
                if responses:
                    yield responses

    async def _completed(self, planned: PlannedRow, service: Service) -> Responses:
        yield await self._whole(planned, service)

    async def _whole(self, planned: PlannedRow, service: Service) -> list[Response]:
        """The responses of a completion: one for all beams, or one per sequence."""
        completion = await _complete(planned, service)
        prompt_ids = [] if planned.excludes_input else completion.prompt_token_ids
        choices = completion.choices
        for choice in choices:
            _check_ending(choice, service, choice.token_ids)
        groups = [choices] if planned.request.params.beam_width > 1 else [[choice] for choice in choices]
        return [
            self._response(
                planned, [self._part(choice) for choice in group], prompt_ids, service, group[0].finish_reason, final=group is groups[-1]
            )
            for group in groups
        ]

    def _part(self, choice: Choice) -> SequencePart:
        scores = Scores(normalized=self._options.normalize_log_probs)
        part = scores.part(choice.index, choice.text, choice.token_ids, choice.logprobs)
        part.stopped = choice.finish_reason is FinishReason.STOP
        return part

    def _response(
        self,
        planned: PlannedRow,
        parts: list[SequencePart],
        prompt_ids: list[int],
        service: Service,
        reason: FinishReason | None,
        *,
        final: bool,
    ) -> Response:
        """The response for these parts. If the text is the only new tensor, the other tensors are shared objects."""
        parameters = NO_PARAMETERS if reason is None else {"finish_reason": str(reason)}
        if planned.names[-1:] == (TEXT,) and len(parts) == 1 and not planned.scored:
            text = self.text(planned, parts[0], prompt_ids, service)
            others = self._other_outputs(planned, parts)
            return Response(outputs=others, text=text, parameters=parameters, final=final, row=planned.row, index=parts[0].index)
        outputs = common_outputs(planned.row, parts, scored=planned.scored) | self.tensors(planned, parts, prompt_ids, service)
        selected = {name: outputs[name] for name in planned.names}
        return Response(outputs=selected, parameters=parameters, final=final, row=planned.row, index=parts[0].index)

    def _other_outputs(self, planned: PlannedRow, parts: list[SequencePart]) -> Tensors:
        """The outputs other than the text of one sequence without scores. The objects are cached, so that encoders recognize them."""
        key = (planned.names, planned.row, parts[0].index)
        if (cached := self._cached.get(key)) is None:
            if len(self._cached) >= MAX_CACHED:
                self._cached.clear()
            outputs = common_outputs(planned.row, parts, scored=False)
            cached = self._cached[key] = {name: outputs[name] for name in planned.names[:-1]}
        return cached

    def is_shown(self, delta: Delta) -> bool:
        """Whether a delta becomes a response: it has new tokens, or is the last of its sequence."""
        return bool(delta.token_ids) or delta.finish_reason is not None

    def _pad_id(self, inference: Inference) -> int:
        ids = inference.inputs.get("pad_id", inference.inputs.get("end_id"))
        return int(ids.flat[0]) if ids is not None and ids.size else 0


def _stream(planned: PlannedRow, service: Service) -> AsyncGenerator[list[Delta], None]:
    """The stream of a row, which ends at stop words with several tokens; the service checks only single tokens."""
    if planned.stop_words:
        return stop_ids.stream(service, planned.request, planned.stop_words)
    return service.stream(planned.request)


async def _complete(planned: PlannedRow, service: Service) -> Completion:
    """The whole answer to a row, which ends at stop words with several tokens; the service checks only single tokens."""
    if planned.stop_words:
        return await stop_ids.complete(service, planned.request, planned.stop_words)
    return await service.complete(planned.request)


def _check_ending(ended: Delta | Choice, service: Service, has_tokens: object) -> None:
    """Raise the error that ended a sequence. A deadline is an error only if the sequence has no tokens."""
    if ended.finish_reason is FinishReason.ERROR:
        raise sequence_error(ended.error, ready=service.ready)
    if ended.finish_reason is FinishReason.DEADLINE and not has_tokens:
        raise TritonError("Request timeout expired", 503)
