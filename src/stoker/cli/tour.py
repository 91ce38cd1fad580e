"""What the demo asks a server, and what it tells of the answers."""

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

from stoker.cli.http import events
from stoker.cli.scrape import scrape
from stoker.cli.tables import rows

QUESTION = "What is the capital of Japan?"
# Long enough to fill KV blocks that all the questions share.
SYSTEM = (
    "You are a guide who answers travellers' questions about the countries of the world. Answer in two short sentences. Name one place "
    "in the country, and tell why a visitor should go there. Do not repeat the question, do not make lists, do not ask anything back, "
    "and do not apologise."
)
COUNTRIES = ("France", "Italy", "Egypt", "Canada", "Peru", "Kenya", "Norway", "India")
MAX_TOKENS = 64
SAMPLE_S = 0.05  # how often the server's numbers are read while it works


@dataclass(slots=True)
class Answer:
    """One streamed chat answer; times in seconds from when it was asked."""

    question: str
    text: str = ""
    num_tokens: int = 0
    started: float = field(default_factory=time.perf_counter)
    first_s: float = 0.0
    last_s: float = 0.0


@dataclass(slots=True)
class Batch:
    """Answers that were asked for at once, and the server's numbers before, after and, of KV blocks, at the most."""

    answers: list[Answer]
    took_s: float
    before: dict[str, float]
    after: dict[str, float]
    peak_blocks: float


async def tour(console: Console, url: str, model: str) -> None:
    """One streamed answer, then a batch, then a table."""
    console.print(f"[bold]> {QUESTION}[/]")
    single = await ask(url, model, [{"role": "user", "content": QUESTION}], show=True)
    print("\n")
    batch = await ask_at_once(url, model, [f"What should I see in {country}?" for country in COUNTRIES])
    for answer in batch.answers:
        console.print(f"[bold]> {answer.question}[/]\n{escape(answer.text.strip())}", highlight=False)
    console.print()
    console.print(table(single, batch))


def table(single: Answer, batch: Batch) -> Table:
    """What the answers took."""
    return rows("What it took", [*_single_rows(single), *_batch_rows(batch)])


async def ask(url: str, model: str, messages: list[dict[str, str]], *, max_tokens: int = MAX_TOKENS, show: bool = False) -> Answer:
    """Stream one answer over HTTP; `show` prints it as it comes. Raises UnavailableError or StokerError."""
    answer = Answer(messages[-1]["content"])
    body: dict[str, Any] = {
        "model": model, "messages": messages, "temperature": 0, "max_tokens": max_tokens, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    async with aclosing(events(url, "/v1/chat/completions", body)) as arriving:
        async for at, data in arriving:
            piece = _read(answer, json.loads(data))
            if piece:
                answer.last_s = at - answer.started
                answer.first_s = answer.first_s or answer.last_s
            if show:
                print(piece, end="", flush=True)
    return answer


async def ask_at_once(url: str, model: str, questions: list[str], max_tokens: int = MAX_TOKENS) -> Batch:
    """Ask all questions together, under instructions that they share."""
    conversations = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}] for question in questions]
    await ask(url, model, conversations[0], max_tokens=1)  # the shared instructions are computed here, once
    before = await scrape(url)
    watching = asyncio.create_task(_peak_blocks(url, stop := asyncio.Event()))
    started = time.perf_counter()
    answers = await asyncio.gather(*(ask(url, model, messages, max_tokens=max_tokens) for messages in conversations))
    took_s = time.perf_counter() - started
    stop.set()
    return Batch(answers, took_s, before, await scrape(url), await watching)


def _read(answer: Answer, chunk: dict[str, Any]) -> str:
    """Take a chunk's text and usage; returns the text."""
    if chunk.get("usage"):
        answer.num_tokens = chunk["usage"]["completion_tokens"]
    piece = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    answer.text += piece
    return piece


async def _peak_blocks(url: str, stop: asyncio.Event) -> float:
    """The most KV blocks in use, sampled until told to stop."""
    most = 0.0
    while not stop.is_set():
        most = max(most, (await scrape(url))["num_used_blocks"])
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), SAMPLE_S)
    return most


def _single_rows(answer: Answer) -> list[tuple[str, str]]:
    decoding_s = answer.last_s - answer.first_s
    speed = f"{(answer.num_tokens - 1) / decoding_s:.1f}" if decoding_s > 0 else "-"
    return [("one stream: time to first token", f"{answer.first_s * 1e3:.0f} ms"), ("one stream: tokens/s", speed)]


def _batch_rows(batch: Batch) -> list[tuple[str, str]]:
    gained = {name: batch.after[name] - batch.before[name] for name in ("num_steps", "row_steps", "num_reused_tokens")}
    count = f"{len(batch.answers)} streams"
    return [
        (f"{count}: time to first token, mean", f"{statistics.mean(answer.first_s for answer in batch.answers) * 1e3:.0f} ms"),
        (f"{count}: tokens/s", f"{sum(answer.num_tokens for answer in batch.answers) / batch.took_s:.1f}"),
        (f"{count}: batch occupancy", f"{gained['row_steps'] / gained['num_steps']:.1f} rows a step, of {len(batch.answers)}"),
        (f"{count}: KV blocks used, at the most", f"{batch.peak_blocks:.0f} of {batch.after['num_blocks']:.0f}"),
        (f"{count}: prefix tokens reused", f"{gained['num_reused_tokens']:.0f}"),
    ]
