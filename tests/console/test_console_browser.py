"""The console in headless Chromium: chat, live view, timeline, models and log, with the keyboard, on a phone, and checked with axe-core."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from console_server import ANSWER, console_context
from live_http import live_app
from stub_runner import StubRunner

from stoker.server.application import make_app
from stoker.server.protocol import Context

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
KEY = "secret-key-1"
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@contextlib.asynccontextmanager
async def browser_page(url: str, **options: Any) -> AsyncIterator[Any]:
    """A page of headless Chromium at `url`. Errors of its scripts, its console and its content policy fail the test."""
    playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
    problems: list[str] = []
    async with playwright.async_playwright() as driver:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=arguments)
        page = await browser.new_page(**options)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.set_default_timeout(30_000)
        await page.goto(url)
        yield page
        await browser.close()
    assert [problem for problem in problems if "status of 401" not in problem] == []


@pytest.fixture
async def context(tmp_path: Path) -> AsyncIterator[Context]:
    """A server with an API key, whose model needs 5 ms per step."""
    async with console_context(tmp_path, step_s=0.005, api_keys=(KEY,)) as context:
        yield context


@pytest.fixture
async def url(context: Context) -> AsyncIterator[str]:
    async with live_app(make_app(context), context.settings) as port:
        yield f"http://127.0.0.1:{port}/"


async def test_the_console_works(context: Context, url: str) -> None:
    async with browser_page(url, viewport={"width": 1200, "height": 800}) as page:
        await enter_key(page)
        await chat(page, context.shared["runner"])
        await guided_output_and_tools(page)
        await live_and_timeline(page)
        await models_and_log(page)
        await no_key_in_addresses(page)


async def enter_key(page: Any) -> None:
    """The server refuses requests until the key is entered. It remains for this tab."""
    await page.get_by_role("alert").filter(has_text="requires an API key").wait_for()
    await page.get_by_label("API key", exact=True).fill(KEY)
    await page.keyboard.press("Enter")
    await page.get_by_label("API key", exact=True).wait_for(state="hidden")
    assert await page.evaluate("sessionStorage.getItem('stoker-api-key')") == KEY
    assert await page.evaluate("Object.keys(localStorage).filter((name) => /key/.test(name))") == []


async def chat(page: Any, runner: StubRunner) -> None:
    await page.get_by_label("Token probabilities").check()
    await page.get_by_label("Seed").fill("7")
    await page.get_by_label("Message", exact=True).fill("Hello <b>there</b>")
    async with page.expect_request("**/v1/chat/completions") as sent:
        await page.keyboard.press("Enter")
    body = json.loads((await sent.value).post_data)
    assert body["seed"] == 7 and body["logprobs"] is True and body["messages"] == [{"role": "user", "content": "Hello <b>there</b>"}]
    answer = page.get_by_label("Model", exact=True)
    await answer.get_by_text("stop:").wait_for()
    tokens = answer.get_by_role("group")
    assert await tokens.inner_text() == ANSWER + "</s>"  # tokens that are parts of a character are joined
    await tokens.locator("span").nth(2).hover()
    detail = answer.get_by_role("status")
    assert "78 %" in await detail.inner_text() and "17 %" in await detail.inner_text()  # exp(-0.25), exp(-1.75)
    await tokens.focus()
    await page.keyboard.press("ArrowRight")
    assert await tokens.locator("span.selected").count() == 1
    # Stop, regenerate and edit.
    await page.get_by_label("Maximum new tokens").fill("3")
    await answer.get_by_role("button", name="Regenerate").click()
    await answer.get_by_text("length:").wait_for()
    await page.get_by_label("Maximum new tokens").fill("")
    await page.get_by_role("button", name="Edit").click()
    await page.get_by_label("Edited message").fill("Another message")
    runner.step_s = 1.0  # so that the answer has not ended
    await page.get_by_role("button", name="Send again").click()
    await page.get_by_role("button", name="Stop").click()
    await answer.get_by_text("stopped").wait_for()
    runner.step_s = 0.005
    assert await page.get_by_label("You", exact=True).inner_text() == "You\nAnother message\nEdit"
    await page.get_by_role("button", name="Reset parameters").click()


async def guided_output_and_tools(page: Any) -> None:
    """The fields of the request; the answers of guided and tool requests are scripted."""
    await page.get_by_role("button", name="New conversation").click()
    await page.get_by_label("Guided output").fill("{")
    await page.get_by_label("Message", exact=True).fill("x")
    await page.keyboard.press("Enter")
    await page.get_by_role("alert").filter(has_text="JSON parameter is invalid").wait_for()
    await page.get_by_label("Guided output").fill(json.dumps(SCHEMA))
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    await page.get_by_label("Tools").fill(json.dumps([tool]))
    chunks = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "weather", "arguments": ""}}]}}]},
        {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": "Oslo"}'}}]}}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
    ]
    events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    bodies: list[Any] = []

    async def answer(route: Any) -> None:
        bodies.append(json.loads(route.request.post_data))
        await route.fulfill(content_type="text/event-stream", body=events)

    await page.route("**/v1/chat/completions", answer)
    await page.get_by_label("Message", exact=True).fill("weather?")
    await page.keyboard.press("Enter")
    await page.get_by_label("Result of weather").fill("sunny")
    await page.get_by_role("button", name="Send the result").click()
    await page.get_by_label("Tool result", exact=True).wait_for()
    await page.get_by_role("button", name="Send the result").wait_for()  # of the second call
    await page.unroute("**/v1/chat/completions")
    assert bodies[0]["response_format"]["json_schema"]["schema"] == SCHEMA and bodies[0]["tools"] == [tool]
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    assert bodies[1]["messages"][-2]["tool_calls"] == [call]
    assert bodies[1]["messages"][-1] == {"role": "tool", "content": "sunny", "tool_call_id": "c1"}
    await page.get_by_role("button", name="Reset parameters").click()


async def live_and_timeline(page: Any) -> None:
    await page.get_by_role("tab", name="Chat").focus()
    await page.keyboard.press("ArrowRight")
    assert await page.evaluate("document.activeElement.id") == "tab-live"
    panel = page.get_by_role("tabpanel", name="Live")
    await panel.get_by_role("img", name="device: 256 blocks of 16 tokens").wait_for()
    assert "Time to first token" in await panel.inner_text() and "ms" in await panel.inner_text()
    await page.keyboard.press("ArrowRight")
    chart = page.get_by_role("application")
    await chart.focus()
    await page.keyboard.press("ArrowLeft")
    detail = page.get_by_role("tabpanel", name="Timeline").locator(".step-detail")
    await detail.get_by_text(re.compile(r"^Step \d+: .*, 1 row, \d+ tokens?$")).wait_for()
    newest = int((await detail.inner_text()).split(":")[0].removeprefix("Step "))
    await page.keyboard.press("ArrowLeft")
    await detail.get_by_text(f"Step {newest - 1}: ").wait_for()
    assert re.search(r": (decode|prefill), \d+ tokens?", await detail.inner_text())
    await page.get_by_label("Table").check()
    assert await page.get_by_role("region", name="Steps").get_by_role("row").count() > 20


async def models_and_log(page: Any) -> None:
    await page.get_by_role("tab", name="Models").click()
    panel = page.get_by_role("tabpanel", name="Models")
    await panel.get_by_text("12.250 before, 12.500 after quantization (+2.04 %), on 1,024 tokens").wait_for()
    text = await panel.inner_text()
    assert "Memory of the cpu device: 8.0 GiB" in text and "INT4_AWQ" in text and "77.5 MiB" in text
    await page.get_by_role("tab", name="Log").click()
    await page.get_by_role("log", name="Log").wait_for()


async def no_key_in_addresses(page: Any) -> None:
    addresses = await page.evaluate("performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert len(addresses) > 5 and not any(KEY in address for address in [*addresses, page.url])


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_no_problem(url: str, node_modules: Path, scheme: str) -> None:
    """The rules of WCAG 2 A and AA, in both themes and at the width of a phone."""
    viewport = {"width": 390 if scheme == "dark" else 1200, "height": 800}
    async with browser_page(url, viewport=viewport, color_scheme=scheme, bypass_csp=True, reduced_motion="reduce") as page:
        await enter_key(page)
        await page.add_script_tag(path=node_modules / "axe-core" / "axe.min.js")
        for tab in ("Chat", "Live", "Timeline", "Models", "Log"):
            await page.get_by_role("tab", name=tab).click()
            if tab == "Chat":
                await page.get_by_label("Message", exact=True).fill("Hello")
                await page.keyboard.press("Enter")
                await page.get_by_label("Model", exact=True).get_by_text("stop:").wait_for()
            if tab in ("Live", "Timeline"):
                await page.get_by_role("img" if tab == "Live" else "application").first.wait_for()
            found = await page.evaluate("axe.run(document, {resultTypes: ['violations']})")
            problems = [(rule["id"], [node["html"][:200] for node in rule["nodes"]]) for rule in found["violations"]]
            assert problems == [], tab
            assert await page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), f"{tab} is too wide"


async def test_the_page_is_interactive_soon(url: str) -> None:
    """The number of bytes and of requests bounds the time on any machine; the time itself is measured in the browser."""
    async with browser_page(url) as page:
        await page.get_by_role("tab", name="Chat").wait_for()
        timing = await page.evaluate("performance.getEntriesByType('navigation')[0].toJSON()")
        resources = await page.evaluate("performance.getEntriesByType('resource').map((entry) => [entry.name, entry.decodedBodySize])")
        static = [size for name, size in resources if name.endswith((".js", ".css"))]
        assert len(static) == 2 and sum(static) < 250_000
        assert 0 < timing["domInteractive"] < 10_000
