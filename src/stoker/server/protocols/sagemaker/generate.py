"""{"inputs", "parameters"}, answered whole or streamed."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from stoker.base.types import Delta, FinishReason, TokenLogprobs
from stoker.frontend.service import Choice, Completion, Service
from stoker.server.errors import sequence_error
from stoker.server.protocols.common.concurrency import gather
from stoker.server.protocols.common.streams import streams
from stoker.server.protocols.openai.response_json import finite
from stoker.server.protocols.sagemaker import tokens as spelling
from stoker.server.protocols.sagemaker.dialects import Shapes, encode
from stoker.server.protocols.sagemaker.options import LMIOptions
from stoker.server.protocols.sagemaker.reply import JSON_LINES, SSE, Reply
from stoker.server.protocols.sagemaker.request import Asked
from stoker.server.protocols.sagemaker.tokens import NO_TOKEN, Token


async def generate(reply: Reply, service: Service, asked: Asked, options: LMIOptions) -> None:
    """Answer a checked request. Raises StokerError before the first byte; later failures are told in the stream."""
    shapes = Shapes(options, asked, service)
    if not asked.stream:
        await reply.whole(await _whole(service, asked, shapes, options))
    elif len(asked.requests) > 1 or not options.rolling_batch:
        await _Batch(reply, service, asked).run()
    else:
        await _Stream(reply, service, asked, shapes, options).run()


async def _whole(service: Service, asked: Asked, shapes: Shapes, options: LMIOptions) -> bytes:
    completions = await gather([service.complete(request) for request in asked.requests])
    pairs = zip(asked.inputs, completions, strict=True)
    return shapes.whole([_answer(service, asked, shapes, options, prompt, completion) for prompt, completion in pairs])


def _answer(
    service: Service, asked: Asked, shapes: Shapes, options: LMIOptions, prompt: str, completion: Completion
) -> dict[str, Any]:  # fmt: skip
    for choice in completion.choices:
        if choice.finish_reason is FinishReason.ERROR:
            raise sequence_error(choice.error, ready=service.ready)
    best = sorted(completion.choices, key=_mean_logprob, reverse=True) if asked.several else completion.choices
    kept = best[: asked.num_choices]
    ends = [_end(options, choice) for choice in kept]
    if asked.formatter == "3p":
        return shapes.third_party(kept[0].text, ends[0], len(completion.prompt_token_ids), len(kept[0].token_ids))
    tokens = [spelling.spelled(service, choice) for choice in kept]
    before = spelling.prefill(service, completion.prompt_token_ids, completion.prompt_logprobs) if asked.prefill else []
    return shapes.answer(prompt, [choice.text for choice in kept], ends, tokens, before)


def _mean_logprob(choice: Choice) -> float:
    return sum(entry.logprob for entry in choice.logprobs) / max(1, len(choice.logprobs))


def _end(options: LMIOptions, ended: Delta | Choice) -> str:
    assert ended.finish_reason is not None
    if options.dialect == "async":
        return "stop" if ended.finish_reason is FinishReason.STOP else "length"
    return spelling.finish_name(ended.finish_reason, ended.stop_reason)


class _Stream:
    """One input's answer, a record a token."""

    def __init__(self, reply: Reply, service: Service, asked: Asked, shapes: Shapes, options: LMIOptions) -> None:
        self._reply, self._service, self._asked, self._shapes, self._options = reply, service, asked, shapes, options
        self._type = SSE if asked.formatter == "sse" else JSON_LINES
        self._begin, self._end = ("data: ", "\n\n") if self._type == SSE else ("", "\n")
        self._special = frozenset(service.end_ids)
        self._tokens: list[Token] = []
        self._texts: list[str] = []
        self._prompt_scores: list[TokenLogprobs | None] | None = None

    async def run(self) -> None:
        async with aclosing(self._service.stream(self._asked.requests[0])) as batches:
            async for deltas in batches:
                if self._reply.http.started and all(map(self._is_plain, deltas)):
                    await self._reply.send("".join(map(self._plain, deltas)).encode())
                    continue
                failed = next((delta for delta in deltas if delta.finish_reason is FinishReason.ERROR), None)
                records = [record for delta in deltas if delta is not failed for record in self._records(delta)]
                if failed is not None and not self._reply.http.started and not records:
                    raise sequence_error(failed.error, ready=self._service.ready)
                await self._send(records)
                if failed is not None:
                    await self._reply.fail(sequence_error(failed.error, ready=self._service.ready), self._type)
                    return
        if self._options.dialect == "async":
            await self._reply.send(b"\n\n")
        await self._reply.close()

    def _is_plain(self, delta: Delta) -> bool:
        """One token in the middle of the answer."""
        ids = delta.token_ids
        return len(ids) == 1 and delta.finish_reason is None and ids[0] not in self._special and self._asked.formatter != "3p_stream"

    def _plain(self, delta: Delta) -> str:
        score = delta.logprobs[0] if delta.logprobs else None
        top = [(other, finite(logprob)) for other, logprob in score.top] if score else []
        token = Token(delta.token_ids[0], delta.text, finite(score.logprob) if score else None, False, top)
        self._tokens.append(token)
        self._texts.append(delta.text)
        return f"{self._begin}{self._shapes.plain_line(token.id, token.text, token.logprob)}{self._end}"

    async def _send(self, records: list[dict[str, Any]]) -> None:
        if not self._reply.http.started:
            await self._reply.open(self._type)
        if records:
            await self._reply.send("".join([self._begin + encode(record) + self._end for record in records]).encode())

    def _records(self, delta: Delta) -> list[dict[str, Any]]:
        self._prompt_scores = delta.prompt_logprobs or self._prompt_scores
        new = spelling.spelled(self._service, delta)
        if delta.finish_reason is not None and not new:  # cut from outside: something must carry the end
            new = [Token(NO_TOKEN, delta.text, None, True)]
        self._texts.append(delta.text)
        if self._asked.formatter == "3p_stream":
            return [self._third_party(token, delta, last=token is new[-1]) for token in new]
        records = []
        for token in new:
            self._tokens.append(token)
            last = delta.finish_reason is not None and token is new[-1]
            records.append(self._last(delta) if last else self._shapes.line(token))
        return records

    def _last(self, delta: Delta) -> dict[str, Any]:
        prompt = self._asked.requests[0].prompt
        assert isinstance(prompt, list)
        before = spelling.prefill(self._service, prompt, self._prompt_scores) if self._asked.prefill else []
        return self._shapes.last_line(self._asked.inputs[0], "".join(self._texts), _end(self._options, delta), self._tokens, before)

    def _third_party(self, token: Token, delta: Delta, *, last: bool) -> dict[str, Any]:
        self._tokens.append(token)
        end = _end(self._options, delta) if last and delta.finish_reason is not None else None
        num_prompt = len(self._asked.requests[0].prompt) if len(self._tokens) == 1 else None
        return self._shapes.third_party_part(token.text, end, num_prompt, len(self._tokens))


class _Batch:
    """A dynamic batch's answers: each record holds a piece for every input."""

    def __init__(self, reply: Reply, service: Service, asked: Asked) -> None:
        self._reply, self._service, self._asked = reply, service, asked

    async def run(self) -> None:
        async with aclosing(streams(self._service, self._asked.requests)) as batches:
            async for number, deltas in batches:
                failed = next((delta for delta in deltas if delta.finish_reason is FinishReason.ERROR), None)
                if failed is not None:
                    error = sequence_error(failed.error, ready=self._service.ready)
                    if not self._reply.http.started:
                        raise error
                    await self._reply.fail(error, JSON_LINES)
                    return
                if not self._reply.http.started:
                    await self._reply.open(JSON_LINES)
                if text := "".join(delta.text for delta in deltas):
                    pieces = ["" if i != number else text for i in range(len(self._asked.requests))]
                    await self._reply.send((encode({"outputs": pieces}) + "\n").encode())
        await self._reply.close()
