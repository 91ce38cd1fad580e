"""Chat templates are rendered in a process with limits of time and memory, and one that exceeds them fails only its own request."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvloop

from stoker.base.errors import RequestError, UnavailableError
from stoker.frontend.rendering.renderer import ChatRenderer

CHAT = [{"role": "user", "content": "Hi"}]
FAILING = {
    "{{ raise_exception('roles must alternate') }}": "roles must alternate",
    "{{ messages.__class__.__mro__ }}": "unsafe",
    "{{ messages.append(1) }}": "unsafe",
    "{{ messages[0].content + none }}": "concatenate",
    "{{ range(99999999) }}": "Range too big",
    "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}": "more than 10000 characters",
    "{{ 'x' * 100000 }}": "more than 10000 characters",
    "{{ messages[0].content * 10 ** 10 }}": "memory",
    "{{ ('%' ~ messages[0].content | length ~ '0000000000d') % 1 }}": "memory",
    "{{ messages[0].content | center(10 ** 10) }}": "memory",
}
ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "one long operation": "{{ (messages[0].content | length + 5) ** (10 ** 9) > 0 }}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
}


@contextlib.asynccontextmanager
async def renderer(source: str, **arguments: Any) -> AsyncIterator[ChatRenderer]:
    """A renderer whose process has ended after the test."""
    made = ChatRenderer(source, {"bos_token": "<s>"}, **arguments)
    try:
        yield made
    finally:
        await made.close()
        assert made._process is None


def cases(sources: Any) -> str:
    """One template that renders the source whose number is `case`."""
    parts = (f"{{% if case == {i} %}}{source}{{% endif %}}" for i, source in enumerate(sources))
    return "".join(parts) + "{% if case is not defined %}{{ bos_token }}{{ messages[0].content }}{% endif %}"


async def test_failing_templates_refuse_the_request() -> None:
    async with renderer(cases(FAILING)) as chat:
        for case, reason in enumerate(FAILING.values()):
            with pytest.raises(RequestError, match=f"messages.*{reason}"):
                await chat.render(CHAT, max_chars=10_000, case=case)
            assert await chat.render(CHAT, max_chars=100) == "<s>Hi"


@pytest.mark.parametrize("source", ENDLESS.values(), ids=list(ENDLESS))
async def test_a_template_without_end_fails_only_its_own_request(source: str) -> None:
    """The event loop is free in the meantime, and requests that wait behind it are rendered in a new process."""
    async with renderer("{% if endless %}" + source + "{% endif %}{{ messages[0].content }}", cpu_s=0.3) as chat:
        assert await chat.render(CHAT, max_chars=100) == "Hi"
        endless = asyncio.create_task(chat.render(CHAT, max_chars=100, endless=True))
        others = [asyncio.create_task(chat.render(CHAT, max_chars=100)) for _ in range(3)]
        iterations = 0
        while not endless.done():
            await asyncio.sleep(0.01)
            iterations += 1
        with pytest.raises(RequestError, match=r"needs more than 0\.3 s"):
            await endless
        assert iterations > 5
        assert await asyncio.gather(*others) == ["Hi"] * 3


async def test_the_compilation_of_a_template_is_limited_too() -> None:
    """Jinja evaluates constant expressions when it compiles a template."""
    async with renderer("{{ 7 ** (10 ** 9) > 0 }}", cpu_s=0.3) as chat:
        with pytest.raises(RequestError, match=r"needs more than 0\.3 s"):
            await chat.render(CHAT, max_chars=100)


async def test_values_arrive_as_they_are() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 2**70}}}
    messages = [{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    source = "{{ messages[0].content }}{{ messages[1].content is none }}{{ messages[1].tool_calls[0].function.arguments.x }}{{ values }}"
    async with renderer(source) as chat:
        text = await chat.render(messages, max_chars=1000, values=(1, "é"))
        assert text == f"\ud800True{2**70}(1, 'é')"
        with pytest.raises(RequestError, match="plain data"):
            await chat.render(CHAT, max_chars=100, values=lambda: 1)
        assert await chat.render([{"role": "user", "content": "x"}, *messages[1:]], max_chars=1000, values=0) == f"xTrue{2**70}0"


async def test_a_process_that_was_killed_is_replaced() -> None:
    async with renderer("{{ messages[0].content }}") as chat:
        for _ in range(2):
            assert await chat.render(CHAT, max_chars=100) == "Hi"
            os.kill(chat._process._process.pid, signal.SIGKILL)  # type: ignore[union-attr]
            assert await chat.render(CHAT, max_chars=100) == "Hi"


async def test_closing_fails_requests_in_progress() -> None:
    async with renderer("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}") as chat:
        rendering = asyncio.create_task(chat.render(CHAT, max_chars=100))
        await asyncio.sleep(0)
    with pytest.raises(UnavailableError):
        await rendering


def test_a_request_before_the_end_of_a_process_is_reported() -> None:
    """The loop of the server, uvloop, refuses to write to a closed connection. The request is sent to the next process."""

    async def run() -> str:
        async with renderer("{{ messages[0].content }}") as chat:
            await chat.render(CHAT, max_chars=100)
            process = chat._process
            assert process is not None and process._transport is not None
            may_report, report = asyncio.Event(), process._report_end

            async def report_late() -> None:
                await may_report.wait()
                await report()

            process._report_end = report_late  # type: ignore[method-assign]
            os.kill(process._process.pid, signal.SIGKILL)
            while not hasattr(process, "_reporting"):
                await asyncio.sleep(0.001)
            rendering = asyncio.create_task(chat.render(CHAT, max_chars=100))
            while not chat._waiting and not rendering.done():
                await asyncio.sleep(0)
            may_report.set()
            return await rendering

    assert uvloop.run(run()) == "Hi"
