"""The requests of `stoker demo`: one streamed answer, then eight concurrent ones, and a table of their times."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stoker.cli.clients.http import events
from stoker.cli.clients.metrics import read_metrics
from stoker.cli.output.tables import name_value_table

QUESTION = "What is the capital of Japan?"
# Long enough to fill several KV blocks, which all requests of the batch then share.
SYSTEM_MESSAGE = (
    "You are a guide who answers travellers' questions about the countries of the world. Answer in two short sentences. Name one place "
    "in the country, and tell why a visitor should go there. Do not repeat the question, do not make lists, do not end with a question, "
    "and do not apologise."
)
COUNTRIES = ("France", "Italy", "Egypt", "Canada", "Peru", "Kenya", "Norway", "India")
MAX_TOKENS = 64
SAMPLE_INTERVAL_S = 0.05  # between two readings of the server's metrics


@dataclass(slots=True)
class Answer:
    """One streamed chat answer. Times are in seconds since the request was sent."""

    question: str
    text: str = ""
    num_tokens: int = 0
    started: float = field(default_factory=time.perf_counter)
    first_s: float = 0.0
    last_s: float = 0.0


@dataclass(slots=True)
class BatchResult:
    """The answers to concurrent requests, the server's metrics before and after them, and the peak of KV cache blocks in use."""

    answers: list[Answer]
    total_s: float
    before: dict[str, float]
    after: dict[str, float]
    peak_blocks: float


async def run_demo_requests(console: Console, url: str, model: str) -> None:
    """Stream one answer, then request eight concurrently, and print the answers and the table."""
    console.print(f"[bold]> {QUESTION}[/]")
    single = await stream_answer(url, model, [{"role": "user", "content": QUESTION}], echo=True)
    print("\n")
    batch = await request_batch(url, model, [f"What should I see in {country}?" for country in COUNTRIES])
    for answer in batch.answers:
        console.print(f"[bold]> {answer.question}[/]\n{escape(answer.text.strip())}", highlight=False)
    console.print()
    console.print(result_table(single, batch))


def result_table(single: Answer, batch: BatchResult) -> Table:
    """A table of latencies, throughput, batch occupancy and KV cache use."""
    return name_value_table("What it took", [*_single_rows(single), *_batch_rows(batch)])


async def stream_answer(
    url: str, model: str, messages: list[dict[str, str]], *, max_tokens: int = MAX_TOKENS, echo: bool = False
) -> Answer:  # fmt: skip
    """Stream one chat answer over HTTP; `echo` prints its text as it arrives. Raises UnavailableError or StokerError."""
    answer = Answer(messages[-1]["content"])
    body: dict[str, Any] = {
        "model": model, "messages": messages, "temperature": 0, "max_tokens": max_tokens, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    async with aclosing(events(url, "/v1/chat/completions", body)) as stream:
        async for at, data in stream:
            text = _add_chunk(answer, json.loads(data))
            if text:
                answer.last_s = at - answer.started
                answer.first_s = answer.first_s or answer.last_s
            if echo:
                print(text, end="", flush=True)
    return answer


async def request_batch(url: str, model: str, questions: list[str], max_tokens: int = MAX_TOKENS) -> BatchResult:
    """Send all questions concurrently, each after the same system message."""
    conversations = [[{"role": "system", "content": SYSTEM_MESSAGE}, {"role": "user", "content": question}] for question in questions]
    await stream_answer(url, model, conversations[0], max_tokens=1)  # computes the shared prefix once
    before = await read_metrics(url)
    sampling = asyncio.create_task(_sample_peak_blocks(url, stop := asyncio.Event()))
    started = time.perf_counter()
    answers = await asyncio.gather(*(stream_answer(url, model, messages, max_tokens=max_tokens) for messages in conversations))
    total_s = time.perf_counter() - started
    stop.set()
    return BatchResult(answers, total_s, before, await read_metrics(url), await sampling)


def _add_chunk(answer: Answer, chunk: dict[str, Any]) -> str:
    """Add a chunk's text and token count to `answer`. Returns the text."""
    if chunk.get("usage"):
        answer.num_tokens = chunk["usage"]["completion_tokens"]
    text = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    answer.text += text
    return text


async def _sample_peak_blocks(url: str, stop: asyncio.Event) -> float:
    """The largest number of KV cache blocks in use, sampled until `stop` is set."""
    peak = 0.0
    while not stop.is_set():
        peak = max(peak, (await read_metrics(url))["num_used_blocks"])
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), SAMPLE_INTERVAL_S)
    return peak


def _single_rows(answer: Answer) -> list[tuple[str, str]]:
    """The rows of the table for the single answer."""
    decode_s = answer.last_s - answer.first_s
    speed = f"{(answer.num_tokens - 1) / decode_s:.1f}" if decode_s > 0 else "-"
    return [("one stream: time to first token", f"{answer.first_s * 1e3:.0f} ms"), ("one stream: tokens/s", speed)]


def _batch_rows(batch: BatchResult) -> list[tuple[str, str]]:
    """The rows of the table for the concurrent answers."""
    gained = {name: batch.after[name] - batch.before[name] for name in ("num_steps", "row_steps", "num_reused_tokens")}
    count = f"{len(batch.answers)} streams"
    return [
        (f"{count}: mean time to first token", f"{statistics.mean(answer.first_s for answer in batch.answers) * 1e3:.0f} ms"),
        (f"{count}: tokens/s", f"{sum(answer.num_tokens for answer in batch.answers) / batch.total_s:.1f}"),
        (f"{count}: batch occupancy", f"{gained['row_steps'] / gained['num_steps']:.1f} rows per step, of {len(batch.answers)}"),
        (f"{count}: peak KV blocks in use", f"{batch.peak_blocks:.0f} of {batch.after['num_blocks']:.0f}"),
        (f"{count}: prefix tokens reused", f"{gained['num_reused_tokens']:.0f}"),
    ]
