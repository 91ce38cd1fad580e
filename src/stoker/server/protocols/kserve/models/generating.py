"""What the three generating models have in common: rows to requests, and deltas or completions to responses."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

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
from stoker.server.protocols.kserve.models.results import Part, Scores, results
from stoker.server.protocols.kserve.models.row_responses import gather, merged
from stoker.server.protocols.kserve.tensors.row import Row, rows
from stoker.server.settings import ServerSettings

NO_PARAMETERS: Parameters = {}  # of nearly every streamed response

_numbers = itertools.count()
_RESULTS = frozenset({
    "cum_log_probs", "output_log_probs", "context_logits", "generation_logits", "batch_index", "sequence_index",
})  # fmt: skip


class Planned(msgspec.Struct, kw_only=True):
    """One row, ready to run."""

    row: int
    request: GenerationRequest
    stop_words: list[tuple[int, ...]]  # of several tokens
    streaming: bool
    excludes_input: bool  # a whole answer leaves the prompt out
    names: tuple[str, ...]  # of the outputs that are sent
    texts: dict[int, str] = {}  # of streamed sequences so far, where responses accumulate

    @property
    def scored(self) -> bool:
        return self.request.params.logprobs is not None


class Generating(ABC):
    """A model whose rows generate. `service` gives the engine's service, or raises UnavailableError."""

    own: tuple[str, ...]  # outputs beside the results that all three have

    def __init__(self, service: Callable[[], Service], options: TritonOptions, settings: ServerSettings, in_flight: InFlight) -> None:
        self._service = service
        self._options = options
        self._settings = settings
        self._in_flight = in_flight
        self._names_of_all: tuple[str, ...] = ()
        self._cached: dict[tuple[tuple[str, ...], int, int], Tensors] = {}

    @abstractmethod
    def plan(self, row: Row, service: Service) -> tuple[str | list[int], SamplingParams, list[tuple[int, ...]]]:
        """(prompt, parameters, stop words of several tokens) of a row. Raises RequestError."""

    @abstractmethod
    def tensors(self, planned: Planned, parts: list[Part], prompt_ids: list[int], service: Service) -> Tensors:
        """The model's own outputs for the sequences or beams of one row, with `prompt_ids` in front of each; none for a delta."""

    def text(self, planned: Planned, part: Part, prompt_ids: list[int], service: Service) -> str:
        """The text of one sequence, for models whose last output it is."""
        raise NotImplementedError

    async def run(self, inference: Inference) -> Responses:
        """Streaming: a response a delta. Otherwise one a row and sequence; or one in all, for a caller that takes only one."""
        service, names = self._service(), self._names(inference)
        if "stop" in inference.inputs and inference.inputs["stop"].any():
            self._in_flight.cancel(inference.request_id)
            yield [Response(final=True)]
            return
        planned = [self._planned(row, inference, service, names) for row in rows(inference)]
        with self._in_flight.running(inference.request_id, lambda: [service.cancel(row.request.request_id) for row in planned]):
            async with aclosing(self._side_by_side(planned, inference, service)) as responses:
                async for batch in responses:
                    yield batch

    async def answer(self, inference: Inference) -> list[Response]:
        """What `run` gives, up to a second response. One row that does not stream takes no generators, each of which costs 5 µs."""
        service, names = self._service(), self._names(inference)
        if "stop" not in inference.inputs and len(given := rows(inference)) == 1:
            planned = self._planned(given[0], inference, service, names)
            if not planned.streaming and planned.request.params.n == 1:
                with self._in_flight.running(inference.request_id, lambda: service.cancel(planned.request.request_id)):
                    return await self._whole(planned, service)
        found: list[Response] = []
        async with aclosing(self.run(inference)) as batches:
            async for batch in batches:
                found += batch
                if len(found) > 1:
                    break
        return found

    def _side_by_side(self, planned: list[Planned], inference: Inference, service: Service) -> Responses:
        stream = merged([self._row(row, service) for row in planned]) if len(planned) > 1 else self._row(planned[0], service)
        whole = not any(row.streaming for row in planned) and (inference.single or not inference.model.decoupled)
        several = len(planned) > 1 or planned[0].request.params.n > 1
        return gather(stream, self._pad_id(inference)) if whole and several else stream

    def _names(self, inference: Inference) -> tuple[str, ...]:
        """Outputs to send, in declared order."""
        if not inference.outputs and self._names_of_all:
            return self._names_of_all
        produced = _RESULTS.union(self.own)
        if missing := next((name for name in inference.outputs if name not in produced), None):
            raise RequestError("outputs", missing, f"the served outputs are {', '.join(sorted(produced))}", cure="Leave it out.")
        wanted = inference.outputs or produced
        names = tuple([tensor.name for tensor in inference.model.outputs if tensor.name in produced and tensor.name in wanted])
        if not inference.outputs:
            self._names_of_all = names
        return names

    def _planned(self, row: Row, inference: Inference, service: Service, names: tuple[str, ...]) -> Planned:
        prompt, params, stop_words = self.plan(row, service)
        streaming = row.value("streaming", row.value("stream", False))
        if streaming and not inference.model.decoupled:
            raise TritonError("Streaming is only supported if model is deployed using decoupled mode.")
        if streaming and params.beam_width > 1:
            raise RequestError("beam_width", params.beam_width, "beams are not streamed", cure="Ask for the whole answer at once.")
        if stop_words and params.beam_width > 1:
            raise RequestError(
                "stop_words_list", stop_words[0], "with beams, a stop word has one token", cure="Use stop_words of the ensemble."
            )
        excludes = row.value("exclude_input_in_output", self._options.exclude_input_in_output)
        request = self._request(prompt, params, inference)
        return Planned(
            row=row.index, request=request, stop_words=stop_words, streaming=streaming, excludes_input=excludes, names=names
        )  # fmt: skip

    def _request(self, prompt: str | list[int], params: SamplingParams, inference: Inference) -> GenerationRequest:
        queue = inference.model.queue or QueuePolicy()
        return GenerationRequest(
            request_id=f"kserve-{next(_numbers)}",
            prompt=prompt,
            params=params,
            add_special_tokens=self._settings.add_special_tokens,
            priority=priority(inference.parameters, queue),
            timeout_s=timeout_s(inference.parameters, self._settings.request_timeout_s),
        )

    def _row(self, planned: Planned, service: Service) -> Responses:
        return self._streamed(planned, service) if planned.streaming else self._completed(planned, service)

    async def _streamed(self, planned: Planned, service: Service) -> Responses:
        scores = [Scores(normalized=self._options.normalize_log_probs) for _ in range(planned.request.params.n)]
        left = len(scores)
        async with aclosing(_stream(planned, service)) as batches:
            async for deltas in batches:
                found = []
                for delta in deltas:
                    left -= delta.finish_reason is not None
                    _check_ending(delta, service, delta.token_ids or scores[delta.index].length)
                    part = scores[delta.index].part(delta.index, delta.text, delta.token_ids, delta.logprobs)
                    if self.shows(delta) or planned.scored:
                        found.append(self._response(planned, [part], [], service, delta.finish_reason, final=not left))
                if found:
                    yield found

    async def _completed(self, planned: Planned, service: Service) -> Responses:
        yield await self._whole(planned, service)

    async def _whole(self, planned: Planned, service: Service) -> list[Response]:
        """Beams make one response, the sequences of n one each."""
        completion = await _complete(planned, service)
        prompt_ids = [] if planned.excludes_input else completion.prompt_token_ids
        choices = completion.choices
        for choice in choices:
            _check_ending(choice, service, choice.token_ids)
        groups = [choices] if planned.request.params.beam_width > 1 else [[choice] for choice in choices]
        shown = [(group, [self._part(choice) for choice in group]) for group in groups]
        return [
            self._response(planned, parts, prompt_ids, service, group[0].finish_reason, final=group is groups[-1]) for group, parts in shown
        ]

    def _part(self, choice: Choice) -> Part:
        scores = Scores(normalized=self._options.normalize_log_probs)
        part = scores.part(choice.index, choice.text, choice.token_ids, choice.logprobs)
        part.stopped = choice.finish_reason is FinishReason.STOP
        return part

    def _response(self, planned: Planned, parts: list[Part], prompt_ids: list[int], service: Service, reason: FinishReason | None, *,
                  final: bool) -> Response:  # fmt: skip
        parameters = NO_PARAMETERS if reason is None else {"finish_reason": str(reason)}
        if planned.names[-1:] == (TEXT,) and len(parts) == 1 and not planned.scored:
            text = self.text(planned, parts[0], prompt_ids, service)
            around = self._around(planned, parts)
            return Response(outputs=around, text=text, parameters=parameters, final=final, row=planned.row, index=parts[0].index)
        made = results(planned.row, parts, scored=planned.scored) | self.tensors(planned, parts, prompt_ids, service)
        named = {name: made[name] for name in planned.names}
        return Response(outputs=named, parameters=parameters, final=final, row=planned.row, index=parts[0].index)

    def _around(self, planned: Planned, parts: list[Part]) -> Tensors:
        """The tensors beside the text of one sequence without scores: the same objects each time, so that encoders know them again."""
        key = (planned.names, planned.row, parts[0].index)
        if (cached := self._cached.get(key)) is None:
            if len(self._cached) >= MAX_CACHED:
                self._cached.clear()
            made = results(planned.row, parts, scored=False)
            cached = self._cached[key] = {name: made[name] for name in planned.names[:-1]}
        return cached

    def shows(self, delta: Delta) -> bool:
        """Whether a delta is worth a response: it has something new, or is a sequence's last."""
        return bool(delta.token_ids) or delta.finish_reason is not None

    def _pad_id(self, inference: Inference) -> int:
        given = inference.inputs.get("pad_id", inference.inputs.get("end_id"))
        return int(given.flat[0]) if given is not None and given.size else 0


def _stream(planned: Planned, service: Service) -> AsyncGenerator[list[Delta], None]:
    if planned.stop_words:
        return stop_ids.stream(service, planned.request, planned.stop_words)
    return service.stream(planned.request)


async def _complete(planned: Planned, service: Service) -> Completion:
    if planned.stop_words:
        return await stop_ids.complete(service, planned.request, planned.stop_words)
    return await service.complete(planned.request)


def _check_ending(ended: Delta | Choice, service: Service, got: object) -> None:
    """Raise the error that a sequence ended with. One that ran out of time keeps the tokens it has."""
    if ended.finish_reason is FinishReason.ERROR:
        raise sequence_error(ended.error, ready=service.ready)
    if ended.finish_reason is FinishReason.DEADLINE and not got:
        raise TritonError("Request timeout expired", 503)


def priority(parameters: dict[str, Any], queue: QueuePolicy) -> int:
    """Triton's `priority`, 1 the most urgent and 0 the model's default, as Stoker's: lower is sooner, the default is 0."""
    given = parameters.get("priority", 0)
    if type(given) is not int or not 0 <= given < 1 << 31:
        raise RequestError("priority", given, "it must be a whole number from 0")
    if queue.priority_levels and given > queue.priority_levels:
        raise RequestError("priority", given, f"the model has {queue.priority_levels} levels", cure="0 is the default level.")
    return given - queue.default_priority_level if given else 0


def timeout_s(parameters: dict[str, Any], default: float | None) -> float | None:
    """Triton's `timeout` in microseconds; the shorter of it and the server's own counts."""
    given = parameters.get("timeout", 0)
    if type(given) is not int or not 0 <= given < 1 << 63:
        raise RequestError("timeout", given, "it must be a whole number of microseconds from 0")
    if not given:
        return default
    return min(given / 1e6, default) if default is not None else given / 1e6
