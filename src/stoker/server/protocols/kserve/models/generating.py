"""The common part of the three models that generate: rows to requests, and deltas or completions to responses."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeAlias

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
from stoker.server.protocols.kserve.models.draft_logits import draft_logits
from stoker.server.protocols.kserve.models.metrics import RequestedMetrics, SequenceClock, metric_outputs, requested_metrics
from stoker.server.protocols.kserve.models.request_parameters import priority, timeout_s
from stoker.server.protocols.kserve.models.results import Scores, SequencePart, common_outputs
from stoker.server.protocols.kserve.models.row_responses import gather_responses, merge_responses
from stoker.server.protocols.kserve.tensors.input_row import InputRow, input_rows
from stoker.server.settings import ServerSettings
from stoker.server.threads import LONG_TOKENS, compute

NO_PARAMETERS: Parameters = {}  # shared by all responses without parameters, so that encoders recognize it

Outputs: TypeAlias = tuple[tuple[str, str], ...]  # (name, role) of each
_WHOLE_TEXT = (TEXT, TEXT)
LONG_ROW_BYTES = 16 << 10  # of the inputs of a row
PADDING = -1  # of beams, as in TensorRT-LLM; models without the output sequence_length (release 0.5) pad with the pad id

_request_numbers = itertools.count()


class PlannedRow(msgspec.Struct, kw_only=True):
    """One row of an inference, checked and ready to run."""

    row: int
    request: GenerationRequest
    stop_words: list[tuple[int, ...]]  # those with several tokens
    streaming: bool
    excludes_input: bool  # a whole answer does not contain the prompt
    outputs: Outputs  # requested ones, in declared order; a response has those of them that the model produces
    prompt: str | list[int]  # as the client sent it; ids beyond the vocabulary are replaced in `request`
    padding: int  # after the last token of a shorter beam
    metrics: RequestedMetrics | None  # None: none are requested
    arrival_s: float  # monotonic time
    num_prompt: int = 0  # tokens; set when the first answer arrives
    texts: dict[int, str] = {}  # text so far by sequence, with accumulate_tokens

    @property
    def scored(self) -> bool:
        """Whether responses contain log-probabilities."""
        return self.request.params.logprobs is not None

    @property
    def num_answers(self) -> int:
        """Number of whole answers. All beams of a row are in one."""
        return 1 if self.request.params.beam_width > 1 else self.request.params.n


class GeneratingModel(ABC):
    """A model that generates. `service` returns the generation service, or raises UnavailableError."""

    def __init__(self, service: Callable[[], Service], options: TritonOptions, settings: ServerSettings, in_flight: InFlight) -> None:
        self._service = service
        self._options = options
        self._settings = settings
        self._in_flight = in_flight
        self._all_outputs: Outputs = ()
        self._has_lengths = False  # clients can distinguish padding from tokens
        self._cached: dict[tuple[Outputs, int, int], Tensors] = {}

    @abstractmethod
    def plan(self, row: InputRow, service: Service) -> tuple[str | list[int], SamplingParams, list[tuple[int, ...]]]:
        """(prompt, sampling parameters, stop words with several tokens) of a row. Raises RequestError."""

    @abstractmethod
    def tensors(self, planned: PlannedRow, parts: list[SequencePart], prompt_ids: list[int], service: Service) -> Tensors:
        """The outputs that only this model has, for the sequences or beams of one row. `prompt_ids` precede each; a delta has none."""

    def text(self, planned: PlannedRow, part: SequencePart, prompt_ids: list[int], service: Service) -> str:
        """The text of one sequence, for models whose last output is text_output."""
        raise NotImplementedError

    async def run(self, inference: Inference) -> Responses:
        """Generate. Streaming returns one response per delta, otherwise one per row and sequence.

        A caller that accepts only one response receives all rows and sequences in one.
        """
        service, outputs = self._service(), self._outputs(inference)
        if "stop" in inference.inputs and inference.inputs["stop"].any():
            await self._in_flight.cancel(inference.request_id)
            yield [Response(final=True)]
            return
        planned = [await self._plan_row(row, inference, service, outputs) for row in input_rows(inference)]
        with self._in_flight.running(inference.request_id, lambda: [service.cancel(row.request.request_id) for row in planned]):
            async with aclosing(self._run_rows(planned, inference, service)) as responses:
                async for batch in responses:
                    yield batch

    async def complete(self, inference: Inference) -> list[Response]:
        """The first responses of `run`, at most two. A single row without streaming uses no generators, each of which costs 5 µs."""
        service, outputs = self._service(), self._outputs(inference)
        if "stop" not in inference.inputs and len(batch_rows := input_rows(inference)) == 1:
            planned = await self._plan_row(batch_rows[0], inference, service, outputs)
            if not planned.streaming and planned.num_answers == 1:
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
        """Run all rows at once. Responses are combined if nothing is streamed and the caller or the model allows only one response."""
        stream = merge_responses([self._row(row, service) for row in planned]) if len(planned) > 1 else self._row(planned[0], service)
        whole = not any(row.streaming for row in planned) and (inference.single or not inference.model.decoupled)
        multiple = len(planned) > 1 or planned[0].num_answers > 1
        return gather_responses(stream, self._pad_id(inference)) if whole and multiple else stream

    def _outputs(self, inference: Inference) -> Outputs:
        """The requested outputs in declared order; by default all."""
        if not self._all_outputs:
            self._all_outputs = tuple([(tensor.name, tensor.role or tensor.name) for tensor in inference.model.outputs])
            self._has_lengths = any(role == "sequence_length" for _, role in self._all_outputs)
        if not inference.outputs:
            return self._all_outputs
        return tuple([output for output in self._all_outputs if output[0] in inference.outputs])

    async def _plan_row(self, row: InputRow, inference: Inference, service: Service, outputs: Outputs) -> PlannedRow:
        """`_planned`, in a thread if the row is large."""
        return await compute(self._planned, row, inference, service, outputs, long=row.num_bytes > LONG_ROW_BYTES)

    def _planned(self, row: InputRow, inference: Inference, service: Service, outputs: Outputs) -> PlannedRow:
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
        logits = draft_logits(row, service.info.vocab_size)
        excludes = row.value("exclude_input_in_output", self._options.exclude_input_in_output)
        return PlannedRow(
            row=row.index,
            request=self._request(prompt, params, inference, service, row, logits),
            stop_words=stop_words,
            streaming=streaming,
            excludes_input=excludes,
            outputs=outputs,
            prompt=prompt,
            padding=PADDING if self._has_lengths else self._pad_id(inference),
            metrics=requested_metrics(row),
            arrival_s=time.monotonic(),
        )

    def _request(
        self, prompt: str | list[int], params: SamplingParams, inference: Inference, service: Service, row: InputRow, logits: bytes
    ) -> GenerationRequest:
        """The request to the service. Raises RequestError for an unknown token id, and for a bad priority, timeout or number of drafts."""
        queue = inference.model.queue or QueuePolicy()
        num_drafts: int | None = row.value("num_draft_tokens")
        if num_drafts is not None and num_drafts < 0:
            raise RequestError("num_draft_tokens", num_drafts, "it must be at least 0")
        return GenerationRequest(
            request_id=f"kserve-{next(_request_numbers)}",
            prompt=prompt if isinstance(prompt, str) else _known_ids(prompt, service.info.vocab_size),
            params=params,
            prediction=row.ids("draft_input_ids", row.size("draft_input_ids")),
            draft_logits=logits,
            draft_tokens=num_drafts,
            add_special_tokens=self._settings.add_special_tokens,
            priority=priority(inference.parameters, queue),
            timeout_s=timeout_s(inference.parameters, self._settings.request_timeout_s),
        )

    def _row(self, planned: PlannedRow, service: Service) -> Responses:
        """The responses of one row, streamed or at its end."""
        return self._streamed(planned, service) if planned.streaming else self._completed(planned, service)

    async def _streamed(self, planned: PlannedRow, service: Service) -> Responses:
        """One response per delta that has something to show."""
        scores = [Scores(normalized=self._options.normalize_log_probs) for _ in range(planned.request.params.n)]
        clocks = [SequenceClock() for _ in scores] if planned.metrics is not None else []
        left = len(scores)
        async with aclosing(_stream(planned, service)) as batches:
            async for deltas in batches:
                responses = []
                for delta in deltas:
                    left -= delta.finish_reason is not None
                    _check_ending(delta, service, delta.token_ids or scores[delta.index].length)
                    part = scores[delta.index].part(delta.index, delta.text, delta.token_ids, delta.logprobs)
                    if clocks:
                        planned.num_prompt = delta.usage.prompt_tokens if delta.usage is not None else planned.num_prompt
                        clocks[delta.index].measure(delta, part)
                    if self.is_shown(delta) or planned.scored:
                        responses.append(self._response(planned, [part], [], service, delta.finish_reason, final=not left))
                if responses:
                    yield responses

    async def _completed(self, planned: PlannedRow, service: Service) -> Responses:
        """The responses of a row that is not streamed."""
        yield await self._whole(planned, service)

    async def _whole(self, planned: PlannedRow, service: Service) -> list[Response]:
        """The responses of a completion: one for all beams, or one per sequence."""
        completion = await _complete(planned, service)
        planned.num_prompt = len(completion.prompt_token_ids)
        prompt_ids = planned.prompt if isinstance(planned.prompt, list) else completion.prompt_token_ids
        if planned.excludes_input:
            prompt_ids = []
        return await compute(self._answers, planned, completion, prompt_ids, service, long=len(prompt_ids) > LONG_TOKENS)

    def _answers(self, planned: PlannedRow, completion: Completion, prompt_ids: list[int], service: Service) -> list[Response]:
        """The responses of a completion. `prompt_ids` precede each answer. Raises the error of a failed sequence."""
        choices = completion.choices
        for choice in choices:
            _check_ending(choice, service, choice.token_ids)
        groups = [choices] if planned.request.params.beam_width > 1 else [[choice] for choice in choices]
        return [
            self._response(
                planned,
                [self._part(choice, completion) for choice in group],
                prompt_ids,
                service,
                group[0].finish_reason,
                final=group is groups[-1],
            )
            for group in groups
        ]

    def _part(self, choice: Choice, completion: Completion) -> SequencePart:
        """One sequence of a completion."""
        scores = Scores(normalized=self._options.normalize_log_probs)
        part = scores.part(choice.index, choice.text, choice.token_ids, choice.logprobs)
        part.stopped = choice.finish_reason is FinishReason.STOP
        part.admission, part.timings = choice.admission, completion.timings
        part.num_drafts, part.num_accepted = choice.draft_tokens, choice.accepted_draft_tokens
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
        metrics = planned.metrics
        if planned.outputs[-1:] == (_WHOLE_TEXT,) and len(parts) == 1 and not planned.scored and metrics is None:
            text = self.text(planned, parts[0], prompt_ids, service)
            others = self._other_outputs(planned, parts)
            return Response(outputs=others, text=text, parameters=parameters, final=final, row=planned.row, index=parts[0].index)
        outputs = common_outputs(planned.row, parts, scored=planned.scored) | self.tensors(planned, parts, prompt_ids, service)
        if metrics is not None:
            outputs |= metric_outputs(metrics, parts, arrival_s=planned.arrival_s, num_prompt=planned.num_prompt)
        selected = {name: outputs[role] for name, role in planned.outputs if role in outputs}
        return Response(outputs=selected, parameters=parameters, final=final, row=planned.row, index=parts[0].index)

    def _other_outputs(self, planned: PlannedRow, parts: list[SequencePart]) -> Tensors:
        """The outputs other than the text of one sequence without scores. The objects are cached, so that encoders recognize them."""
        key = (planned.outputs, planned.row, parts[0].index)
        if (cached := self._cached.get(key)) is None:
            if len(self._cached) >= MAX_CACHED:
                self._cached.clear()
            outputs = common_outputs(planned.row, parts, scored=False)
            cached = self._cached[key] = {name: outputs[role] for name, role in planned.outputs[:-1] if role in outputs}
        return cached

    def is_shown(self, delta: Delta) -> bool:
        """Whether a delta becomes a response: it has new tokens, or is the last of its sequence."""
        return bool(delta.token_ids) or delta.finish_reason is not None

    def _pad_id(self, inference: Inference) -> int:
        """The id that pads token arrays: the input pad_id of the first row, or else its end_id, or else 0."""
        ids = inference.inputs.get("pad_id", inference.inputs.get("end_id"))
        return int(ids.flat[0]) if ids is not None and ids.size else 0


def _known_ids(ids: list[int], vocab_size: int) -> list[int]:
    """The ids of a prompt. Those beyond the vocabulary, which benchmarks send, stand for the last id, because they have no embedding."""
    last = vocab_size - 1
    return ids if max(ids, default=0) <= last else [min(token, last) for token in ids]


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
