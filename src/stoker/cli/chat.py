"""`stoker chat`: a conversation in the terminal."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from stoker.base.config import RuntimeConfig
from stoker.base.errors import RequestError
from stoker.base.types import SamplingParams
from stoker.cli.options import runtime_options, sampling_options

if TYPE_CHECKING:
    from stoker.frontend.llm import LLM

HELP = "An empty line or Ctrl-D ends; /reset forgets the conversation; Ctrl-C stops an answer."


@runtime_options
@sampling_options(max_tokens=512)
def chat(
    engine: Annotated[Path, typer.Argument(help="An engine directory.")],
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    *,
    params: SamplingParams,
    runtime: RuntimeConfig,
) -> None:
    """Talk with a model: it remembers the conversation, and the answer streams.

    An empty line or Ctrl-D ends; /reset forgets the conversation; Ctrl-C stops an answer. Messages may also be piped in, one a line.

    Example:

      stoker chat engine --system "You answer in one sentence." --temperature 0.7
    """
    if params.n != 1:
        raise RequestError("n", params.n, "a conversation has one answer")
    from stoker.frontend.llm import LLM

    with LLM(engine, **msgspec.structs.asdict(runtime)) as llm:
        llm.chat_prompt([{"role": "user", "content": "Hello"}])  # a model without a chat template is refused here
        if _is_terminal():
            typer.echo(HELP, err=True)
        _converse(llm, [] if system is None else [{"role": "system", "content": system}], params)


def _converse(llm: LLM, opening: list[dict[str, Any]], params: SamplingParams) -> None:
    messages = list(opening)
    while line := _read():
        if line == "/reset":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": line})
        try:
            messages.append({"role": "assistant", "content": _answer(llm, messages, params)})
        except RequestError as error:
            messages.pop()
            typer.echo(f"stoker: {error}", err=True)


def _read() -> str:
    """The next message; empty at the end."""
    try:
        return input("> " if _is_terminal() else "").strip()
    except (EOFError, RuntimeError):  # RuntimeError: there is no standard input at all
        return ""


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _answer(llm: LLM, messages: list[dict[str, Any]], params: SamplingParams) -> str:
    """Stream the answer. Ctrl-C ends it early, and what came stays in the conversation. Raises RequestError."""
    pieces: list[str] = []

    async def stream() -> None:
        async for delta in llm.stream(llm.chat_prompt(messages), fitting(llm, messages, params)):
            typer.echo(delta.text, nl=False)
            pieces.append(delta.text)
            if delta.error is not None:
                raise RequestError("messages", messages, delta.error)

    try:
        asyncio.run(stream())
    except KeyboardInterrupt:
        typer.echo(" …", nl=False)
    typer.echo()
    return "".join(pieces)


def fitting(llm: LLM, messages: list[dict[str, Any]], params: SamplingParams) -> SamplingParams:
    """`params` with max_tokens lowered to what the engine and the rest of the sequence allow."""
    info = llm.service.info
    left = min(info.limits.max_output_len, info.max_seq_len - len(llm.chat_prompt(messages)))
    return msgspec.structs.replace(params, max_tokens=max(1, min(params.max_tokens, left)))
