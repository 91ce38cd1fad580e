"""Responses to requests of the schema {"inputs", "parameters"}, whole or streamed."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from stoker.base.types import Delta, FinishReason, TokenLogprobs
from stoker.frontend.service import Choice, Completion, Service
from stoker.server.errors import sequence_error
from stoker.server.protocols.common.concurrency import gather
from stoker.server.protocols.common.logprobs import finite
from stoker.server.protocols.common.ranking import mean_logprob
from stoker.server.protocols.common.streams import merge_streams
from stoker.server.protocols.sagemaker.dialects import RecordBuilder, encode
from stoker.server.protocols.sagemaker.options import LMIOptions
from stoker.server.protocols.sagemaker.reply import JSON_LINES, SSE, Reply
from stoker.server.protocols.sagemaker.request import InvocationCall
from stoker.server.protocols.sagemaker.tokens import NO_TOKEN, Token, finish_name, output_tokens, prompt_tokens
from stoker.server.threads import LONG_TOKENS, compute


async def generate(reply: Reply, service: Service, call: InvocationCall, options: LMIOptions) -> None:
    """Generate and respond. Raises StokerError before the first byte of the response; a later error is written into the stream."""
    builder = RecordBuilder(options, call, service)
    if not call.stream:
        await reply.whole(await _whole(service, call, builder, options))
    elif len(call.requests) > 1 or not options.rolling_batch:
        await _BatchStream(reply, service, call).run()
    else:
        await _Stream(reply, service, call, builder, options).run()


async def _whole(service: Service, call: InvocationCall, builder: RecordBuilder, options: LMIOptions) -> bytes:
    """Generate for all inputs. The encoded response."""
    completions = await gather([service.complete(request) for request in call.requests])
    num_prompt = sum(len(completion.prompt_token_ids) for completion in completions) if call.prompt_details else 0
    return await compute(_body, service, call, builder, options, completions, long=num_prompt > LONG_TOKENS)


def _body(service: Service, call: InvocationCall, builder: RecordBuilder, options: LMIOptions, completions: list[Completion]) -> bytes:
    """The encoded response."""
    pairs = zip(call.inputs, completions, strict=True)
    return builder.body([_answer(service, call, builder, options, prompt, completion) for prompt, completion in pairs])


def _answer(
    service: Service, call: InvocationCall, builder: RecordBuilder, options: LMIOptions, prompt: str, completion: Completion
) -> dict[str, Any]:
    """The answer to one input."""
    for choice in completion.choices:
        if choice.finish_reason is FinishReason.ERROR:
            raise sequence_error(choice.error, ready=service.ready)
    best = sorted(completion.choices, key=mean_logprob, reverse=True) if call.multiple else completion.choices
    choices = best[: call.num_choices]
    finish_reasons = [_finish_reason(options, choice) for choice in choices]
    if call.formatter == "3p":
        return builder.third_party(choices[0].text, finish_reasons[0], len(completion.prompt_token_ids), len(choices[0].token_ids))
    tokens = [output_tokens(service, choice) for choice in choices]
    before = prompt_tokens(service, completion.prompt_token_ids, completion.prompt_logprobs) if call.prompt_details else []
    return builder.answer(prompt, [choice.text for choice in choices], finish_reasons, tokens, before)


def _finish_reason(options: LMIOptions, ended: Delta | Choice) -> str:
    """The finish reason in LMI's words; in the dialect async, stop or length."""
    assert ended.finish_reason is not None
    if options.dialect == "async":
        return "stop" if ended.finish_reason is FinishReason.STOP else "length"
    return finish_name(ended.finish_reason, ended.stop_reason)


class _Stream:
    """The streamed response to one input: one record per token."""

    def __init__(self, reply: Reply, service: Service, call: InvocationCall, builder: RecordBuilder, options: LMIOptions) -> None:
        self._reply, self._service, self._call, self._builder, self._options = reply, service, call, builder, options
        self._type = SSE if call.formatter == "sse" else JSON_LINES
        self._prefix, self._suffix = ("data: ", "\n\n") if self._type == SSE else ("", "\n")
        self._end_ids = frozenset(service.end_ids)
        self._tokens: list[Token] = []
        self._texts: list[str] = []
        self._prompt_scores: list[TokenLogprobs | None] | None = None

    async def run(self) -> None:
        """Generate, and send records as deltas arrive.

        A failure before the first record is raised; a later one ends the stream with an error.
        """
        async with aclosing(self._service.stream(self._call.requests[0])) as batches:
            async for deltas in batches:
                if self._reply.http.started and all(map(self._is_plain, deltas)):
                    await self._reply.send("".join(map(self._plain_line, deltas)).encode())
                    continue
                failed = next((delta for delta in deltas if delta.finish_reason is FinishReason.ERROR), None)
                records = await compute(self._all_records, [delta for delta in deltas if delta is not failed], long=self._is_long)
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
        """Whether the delta is one ordinary token in the middle of the answer."""
        ids = delta.token_ids
        return len(ids) == 1 and delta.finish_reason is None and ids[0] not in self._end_ids and self._call.formatter != "3p_stream"

    def _plain_line(self, delta: Delta) -> str:
        """The encoded record of a delta for which `_is_plain` is true."""
        score = delta.logprobs[0] if delta.logprobs else None
        top = [(other_id, finite(logprob)) for other_id, logprob in score.top] if score else []
        token = Token(delta.token_ids[0], delta.text, finite(score.logprob) if score else None, False, top)
        self._tokens.append(token)
        self._texts.append(delta.text)
        return f"{self._prefix}{self._builder.token_line(token.id, token.text, token.logprob)}{self._suffix}"

    @property
    def _is_long(self) -> bool:
        """Whether the last record has the details of a long prompt."""
        return self._call.prompt_details and len(self._call.requests[0].prompt) > LONG_TOKENS

    def _all_records(self, deltas: list[Delta]) -> list[dict[str, Any]]:
        """The records of these deltas."""
        return [record for delta in deltas for record in self._records(delta)]

    async def _send(self, records: list[dict[str, Any]]) -> None:
        """Open the stream if this is its first part, and send the records."""
        if not self._reply.http.started:
            await self._reply.open(self._type)
        if records:
            await self._reply.send("".join([self._prefix + encode(record) + self._suffix for record in records]).encode())

    def _records(self, delta: Delta) -> list[dict[str, Any]]:
        """The records of one delta, one per token."""
        self._prompt_scores = delta.prompt_logprobs or self._prompt_scores
        new = output_tokens(self._service, delta)
        if delta.finish_reason is not None and not new:  # ended by a deadline or cancellation; a record must carry the finish reason
            new = [Token(NO_TOKEN, delta.text, None, True)]
        self._texts.append(delta.text)
        if self._call.formatter == "3p_stream":
            return [self._third_party(token, delta, last=token is new[-1]) for token in new]
        records = []
        for token in new:
            self._tokens.append(token)
            last = delta.finish_reason is not None and token is new[-1]
            records.append(self._last(delta) if last else self._builder.token_record(token))
        return records

    def _last(self, delta: Delta) -> dict[str, Any]:
        """The record of the last token, with the whole text and, if requested, details of all tokens."""
        prompt = self._call.requests[0].prompt
        assert isinstance(prompt, list)
        before = prompt_tokens(self._service, prompt, self._prompt_scores) if self._call.prompt_details else []
        return self._builder.last_record(
            self._call.inputs[0], "".join(self._texts), _finish_reason(self._options, delta), self._tokens, before
        )

    def _third_party(self, token: Token, delta: Delta, *, last: bool) -> dict[str, Any]:
        """One record of the formatter 3p_stream."""
        self._tokens.append(token)
        finish_reason = _finish_reason(self._options, delta) if last and delta.finish_reason is not None else None
        num_prompt = len(self._call.requests[0].prompt) if len(self._tokens) == 1 else None
        return self._builder.third_party_part(token.text, finish_reason, num_prompt, len(self._tokens))


class _BatchStream:
    """The streamed response to a dynamic batch. Each record has the new text of every input."""

    def __init__(self, reply: Reply, service: Service, call: InvocationCall) -> None:
        self._reply, self._service, self._call = reply, service, call

    async def run(self) -> None:
        """Generate for all inputs, and send records as deltas arrive.

        A failure before the first record is raised; a later one ends the stream.
        """
        async with aclosing(merge_streams(self._service, self._call.requests)) as batches:
            async for index, deltas in batches:
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
                    texts = ["" if i != index else text for i in range(len(self._call.requests))]
                    await self._reply.send((encode({"outputs": texts}) + "\n").encode())
        await self._reply.close()
