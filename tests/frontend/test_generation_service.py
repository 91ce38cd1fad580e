"""The generation service with a scripted executor: text, stop strings, limits, usage, cancellation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from fake_executor import FakeExecutor, Script, info

from stoker.base.config import RequestLimits
from stoker.base.errors import QueueFullError, RequestError, StokerError, UnavailableError
from stoker.base.types import AdmissionRecord, Delta, FinishReason, GenerationRequest, SamplingParams, Timings
from stoker.frontend.generation import GenerationService
from stoker.frontend.stopwatch import Stopwatch
from stoker.frontend.tokenizer import Tokenizer
from stoker.runtime.request import ErrorInfo
from stoker.runtime.transport.in_process import InProcessClient, InProcessMailbox

TEXT = "The quick brown fox 你好 🎉 stop here"
ServiceAndExecutor = tuple[GenerationService, FakeExecutor]


def make_request(prompt: Any = "The dog", request_id: str = "r", **values: Any) -> GenerationRequest:
    own = {name: values.pop(name) for name in ("timeout_s", "truncate_prompt_tokens", "add_special_tokens") if name in values}
    return GenerationRequest(request_id=request_id, prompt=prompt, params=SamplingParams(**{"max_tokens": 60, **values}), **own)


@asynccontextmanager
async def serving(tokenizer: Tokenizer, script: Script, *, group: int = 1, step_s: float = 0.0) -> AsyncIterator[ServiceAndExecutor]:
    mailbox = InProcessMailbox(info(tokenizer.vocab_size, max_input_len=32))
    executor = FakeExecutor(mailbox, script, group=group, step_s=step_s)
    service = GenerationService("m", tokenizer, InProcessClient(mailbox))
    try:
        yield service, executor
    finally:
        await service.close()
        executor.stop()


def answer_with(tokenizer: Tokenizer, text: str = TEXT) -> Script:
    return lambda request, index: [*tokenizer.encode(text, add_special_tokens=False), 2]


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


async def collect(service: GenerationService, request: GenerationRequest) -> list[Delta]:
    return [delta async for deltas in service.stream(request) for delta in deltas]


@pytest.mark.parametrize("group", [1, 3, 100])
async def test_joined_stream_equals_the_completion(tokenizer: Tokenizer, group: int) -> None:
    async with serving(tokenizer, answer_with(tokenizer), group=group) as (service, _):
        deltas = await collect(service, make_request(n=2, logprobs=0, prompt_logprobs=0))
        whole = await service.complete(make_request(n=2, logprobs=0, prompt_logprobs=0))
    for index, choice in enumerate(whole.choices):
        mine = [delta for delta in deltas if delta.index == index]
        assert "".join(delta.text for delta in mine) == choice.text == TEXT
        assert [token for delta in mine for token in delta.token_ids] == choice.token_ids
        assert [entry.token_id for delta in mine for entry in delta.logprobs] == choice.token_ids
        assert [delta.finish_reason for delta in mine if delta.finish_reason] == [choice.finish_reason] == [FinishReason.STOP]
        assert choice.stop_reason == 2
    size = len(whole.prompt_token_ids)
    assert deltas[0].usage is not None
    assert (deltas[0].usage.prompt_tokens, deltas[0].usage.cached_tokens) == (size, size // 2)
    assert deltas[-1].usage == whole.usage
    assert whole.timings is not None and [delta.timings is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert whole.usage.completion_tokens == sum(len(choice.token_ids) for choice in whole.choices)
    assert whole.prompt_logprobs == [None]


async def test_timings(tokenizer: Tokenizer) -> None:
    """`queue_s` is the executor's; the rest is consistent with the usage."""
    async with serving(tokenizer, answer_with(tokenizer), step_s=0.002) as (service, _):
        for values in ({"n": 2}, {"max_tokens": 1}):
            completion = await service.complete(make_request(**values))
            timings, count = completion.timings, completion.usage.completion_tokens
            assert timings is not None and timings.queue_s == 0.25
            assert 0 < timings.time_to_first_token_s <= timings.total_s
            assert timings.tokens_per_s == pytest.approx(count / timings.total_s)
            gaps = max(len(choice.token_ids) for choice in completion.choices) - 1
            assert timings.time_per_output_token_s * gaps == pytest.approx(timings.total_s - timings.time_to_first_token_s if gaps else 0)


def test_the_clock_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Submitted at 100 s; the first token after 2 s, the last one after 10 s."""
    now = [100.0]
    monkeypatch.setattr("stoker.frontend.stopwatch.time", SimpleNamespace(monotonic=lambda: now[0]))
    stopwatch = Stopwatch()
    for now[0], queue_s in ((102.0, 0.5), (106.0, 9.0)):
        stopwatch.token(AdmissionRecord(queue_s, 0, 1, 1))
    now[0] = 110.0
    assert stopwatch.timings([5, 3]) == Timings(0.5, 2.0, 10.0, 0.8, 2.0)
    assert Stopwatch().timings([0]) == Timings(0.0, 0.0, 0.0, 0.0, 0.0)


async def test_bad_words_that_are_strings_become_token_ids(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, answer_with(tokenizer)) as (service, executor):
        await service.complete(make_request(bad_words=["fox", (5, 6)]))
        with pytest.raises(RequestError, match="bad_words="):
            await service.complete(make_request(bad_words=[""]))
    expected = {(5, 6), *(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in ("fox", " fox"))}
    assert set(executor.requests[0].params.bad_word_ids) == expected


@pytest.mark.parametrize("group", [1, 2, 7, 100])
async def test_stop_string_result_does_not_depend_on_grouping(tokenizer: Tokenizer, group: int) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    needed = next(n for n in range(len(ids)) if "fox 你" in tokenizer.decode(ids[:n]))
    async with serving(tokenizer, lambda request, index: ids * 3, group=group) as (service, executor):
        whole = await service.complete(make_request(stop=("x 你", "never")))
        included = await service.complete(make_request(stop=("x 你",), include_stop=True))
        await until(lambda: not executor.running)
    assert (whole.choices[0].text, included.choices[0].text) == ("The quick brown fo", "The quick brown fox 你")
    assert (whole.choices[0].finish_reason, whole.choices[0].stop_reason) == (FinishReason.STOP, "x 你")
    assert whole.choices[0].token_ids == ids[:needed]
    assert whole.usage.completion_tokens == needed


async def test_stop_string_of_one_sequence_cancels_that_one(tokenizer: Tokenizer) -> None:
    texts = ["aa STOP bb", "a b c d e f g h i j k l m n o p q r s t"]
    script = lambda request, index: tokenizer.encode(texts[index] * (1 + 9 * (1 - index)), add_special_tokens=False)  # noqa: E731
    async with serving(tokenizer, script, step_s=0.002) as (service, executor):
        whole = await service.complete(make_request(n=2, stop=("STOP",)))
    assert [choice.text for choice in whole.choices] == ["aa ", texts[1]]
    assert [index for _, index in executor.cancelled][:1] == [0]


async def test_min_tokens_outlasts_a_stop_string(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("stop stop", add_special_tokens=False)
    first = next(n for n in range(len(ids) + 1) if "stop" in tokenizer.decode(ids[:n]))
    async with serving(tokenizer, lambda request, index: ids, group=9) as (service, _):
        assert (await service.complete(make_request(stop=("stop",)))).choices[0].text == ""
        assert (await service.complete(make_request(stop=("stop",), min_tokens=first))).choices[0].text == "stop "


async def test_text_of_the_end_id(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, answer_with(tokenizer, "fox")) as (service, executor):
        assert (await service.complete(make_request(skip_special_tokens=False))).choices[0].text == "fox"
        assert (await service.complete(make_request(skip_special_tokens=False, include_stop=True))).choices[0].text == "fox</s>"
        assert (await service.complete(make_request(skip_special_tokens=False, ignore_eos=True))).choices[0].text == "fox</s>"
    assert [request.end_ids for request in executor.requests] == [(2, 3), (2, 3), ()]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request(""), None),  # with <s>, the prompt has one token
        (make_request("", add_special_tokens=False), "prompt='' is refused|prompt=.* it is empty"),
        (make_request([]), "it is empty"),
        (make_request([1] * 33), "it has 33 tokens and the engine's max_input_len is 32"),
        (make_request([1] * 32, max_tokens=64), None),
        (make_request([1], max_tokens=65), "max_tokens=65 is refused: the engine's max_output_len is 64"),
        (make_request([1, 10**6]), "prompt=1000000 is refused: a token id is a whole number from 0 to"),
        (make_request([-1]), "prompt=-1"),
        (make_request([True]), "prompt=True"),
        (make_request([1.5]), "prompt=1.5"),
        (make_request({"a": 1}), "a string or a list of token ids"),
        (make_request("x" * 10_000_000), "10000000 characters, and the limit is 32 tokens"),
        (make_request(logit_bias={10**6: 1.0}), "logit_bias=1000000"),
        (make_request(allowed_token_ids=(1, 10**6)), "allowed_token_ids=1000000"),
        (make_request(stop_token_ids=(-5,)), "stop_token_ids=-5"),
        (make_request(bad_words=((),)), "bad_words"),
        (make_request(beam_width=5), "max_beam_width is 4"),
        (make_request(beam_width=2, n=3), "n=3"),
        (make_request(beam_width=2, temperature=0.5), "temperature=0.5"),
        (make_request(beam_width=2, presence_penalty=0.5), "presence_penalty=0.5"),
        (make_request(beam_width=2, allowed_token_ids=(1,)), "allowed_token_ids="),
        (make_request(timeout_s=-1.0), "timeout_s=-1.0"),
        (make_request(truncate_prompt_tokens=0), "truncate_prompt_tokens=0"),
        (make_request(request_id=""), "request_id"),
    ],
)
async def test_limits(tokenizer: Tokenizer, request_: GenerationRequest, message: str | None) -> None:
    async with serving(tokenizer, answer_with(tokenizer, "ok")) as (service, executor):
        if message is None:
            assert (await service.complete(request_)).choices[0].text == "ok"
            return
        with pytest.raises(RequestError, match=message):
            await service.complete(request_)
        assert executor.requests == []


async def test_lower_limits_than_those_of_the_engine(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, answer_with(tokenizer)) as (service, _):
        limits = RequestLimits(max_input_len=8, max_output_len=20, max_total_len=25, max_beam_width=1)
        lowered = GenerationService("tiny", tokenizer, service._client, limits)
        assert (lowered.max_seq_len, service.max_seq_len) == (25, 96)
        assert (await lowered.complete(make_request([1] * 8, max_tokens=17))).choices[0].token_ids
        for request, message in (
            (make_request([1] * 9, max_tokens=1), "max_input_len is 8"),
            (make_request([1], max_tokens=21), "max_output_len is 20"),
            (make_request([1] * 8, max_tokens=18), "make 26, and the limit of a sequence is 25"),
            (make_request([1], beam_width=2, max_tokens=1), "max_beam_width is 1"),
        ):
            with pytest.raises(RequestError, match=message):
                await lowered.complete(request)


async def test_sequence_limit_names_the_numbers(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, answer_with(tokenizer)) as (service, _):
        service.info.max_seq_len = 20
        with pytest.raises(RequestError, match=r"its 10 tokens and max_tokens=15 make 25, and the limit of a sequence is 20.*at most 10"):
            await service.complete(make_request([1] * 10, max_tokens=15))
        with pytest.raises(RequestError, match=r"limit of a sequence is 20\. Shorten it\.$"):
            await service.complete(make_request([1] * 22, max_tokens=2))


async def test_truncation_keeps_the_end(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, answer_with(tokenizer)) as (service, executor):
        await service.complete(make_request([*range(4, 204)], truncate_prompt_tokens=8))
    assert executor.requests[0].prompt_ids == [*range(196, 204)]


async def test_streamed_beams_are_refused(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, answer_with(tokenizer)) as (service, _):
        with pytest.raises(RequestError, match="beams are not streamed"):
            await collect(service, make_request(beam_width=2))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ErrorInfo("queue_full", "full", 429, 7.0), QueueFullError),
        (ErrorInfo("bad_request", "no", 400), RequestError),
        (ErrorInfo("unavailable", "gone", 503), UnavailableError),
        (ErrorInfo("step_failed", "bang", 500), StokerError),
    ],
)
async def test_refusals_of_the_executor_are_raised(tokenizer: Tokenizer, error: ErrorInfo, kind: type[StokerError]) -> None:
    async with serving(tokenizer, lambda request, index: error) as (service, _):
        with pytest.raises(kind, match=error.message) as caught:
            await service.complete(make_request(n=2))
    assert (caught.value.status, caught.value.code) == (error.status, error.code)
    assert getattr(caught.value, "retry_after_s", 7.0) == 7.0


async def test_one_failing_sequence_leaves_the_other(tokenizer: Tokenizer) -> None:
    script = lambda request, index: ErrorInfo("step_failed", "bang") if index else answer_with(tokenizer)(request, index)  # noqa: E731
    async with serving(tokenizer, script) as (service, _):
        good, bad = (await service.complete(make_request(n=2))).choices
    assert (good.text, good.error, bad.finish_reason, bad.error) == (TEXT, None, FinishReason.ERROR, "bang")


async def test_executor_that_dies_midway_ends_the_stream(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, lambda request, index: [5] * 60, step_s=0.01) as (service, executor):
        deltas = []
        async for batch in service.stream(make_request()):
            if not deltas:
                executor.mailbox.close("it broke")
            deltas += batch
        assert deltas[-1].finish_reason is FinishReason.ERROR
        assert "it broke" in (deltas[-1].error or "")
        assert not service.ready
        with pytest.raises(UnavailableError, match="it broke"):
            await service.complete(make_request())


async def test_leaving_early_cancels(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, lambda request, index: [5] * 60, step_s=0.005) as (service, executor):
        stream = service.stream(make_request())
        await anext(stream)
        await stream.aclose()
        await until(lambda: not executor.running and bool(executor.cancelled))
        task = asyncio.create_task(service.complete(make_request()))
        await until(lambda: bool(executor.running))
        task.cancel()
        await until(lambda: not executor.running)
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_cancel_by_id_and_duplicate_ids(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, lambda request, index: [5] * 60, step_s=0.005) as (service, executor):
        task = asyncio.create_task(service.complete(make_request()))
        await until(lambda: bool(executor.running))
        with pytest.raises(RequestError, match="in flight"):
            await service.complete(make_request())
        service.cancel("r")
        assert (await task).choices[0].finish_reason is FinishReason.CANCELLED


async def test_drain_waits_and_refuses(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, answer_with(tokenizer), step_s=0.002) as (service, executor):
        task = asyncio.create_task(service.complete(make_request()))
        await until(lambda: bool(executor.running))
        draining = asyncio.create_task(service.drain())
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="draining"):
            await service.complete(make_request(request_id="2"))
        await draining
        assert task.done() or (await task).choices[0].text == TEXT
        assert not service.ready


async def test_long_prompts_do_not_stall_the_loop(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop continues to run while a thread, which releases the global interpreter lock, tokenizes a long prompt."""
    async with serving(tokenizer, answer_with(tokenizer)) as (service, executor):
        monkeypatch.setattr(tokenizer, "max_token_chars", 100_000)  # so that the length check accepts it
        slow = asyncio.create_task(service.complete(make_request("fox " * 250_000)))
        iterations = 0
        while not slow.done():
            await asyncio.sleep(0.001)
            iterations += 1
        with pytest.raises(RequestError, match="max_input_len is 32"):
            await slow
        assert iterations > 20
        assert executor.requests == []


async def test_encode_decode_and_stats(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, answer_with(tokenizer)) as (service, _):
        assert service.decode(service.encode(TEXT)) == TEXT
        with pytest.raises(RequestError, match="token_ids"):
            service.decode([10**9])
        with pytest.raises(RequestError, match="no chat template"):
            await service.render_chat([{"role": "user", "content": "x"}])
        await service.complete(make_request())
        assert (await service.stats()).num_steps > 0
