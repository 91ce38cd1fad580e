"""`stoker chat`: a conversation with a model in the terminal."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from stoker.base.config import RuntimeConfig
from stoker.base.errors import RequestError
from stoker.base.types import SamplingParams
from stoker.cli.engines import Model, running_llm
from stoker.cli.options import build_options, runtime_options, sampling_options
from stoker.deploy.build_settings import BuildSettings

if TYPE_CHECKING:
    from stoker.frontend.llm import LLM

HELP = "An empty line or Ctrl-D ends the conversation, /reset starts it anew, Ctrl-C stops an answer."
Messages = list[dict[str, Any]]


@build_options
@runtime_options
@sampling_options(max_tokens=512)
def chat(
    model: Model,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    *,
    params: SamplingParams,
    runtime: RuntimeConfig,
    build: BuildSettings,
) -> None:
    """Chat with a model. Answers stream, and each message is sent with the conversation so far.

    An empty line or Ctrl-D ends the conversation, /reset starts it anew, Ctrl-C stops an answer. Messages are read from standard input,
    one a line, when it is not a terminal.

    Examples:

      stoker chat engine

      stoker chat engine --system "You answer in one sentence." --temperature 0.7
    """
    if params.n != 1:
        raise RequestError("n", params.n, "a conversation has one answer")
    with running_llm(model, runtime, build) as llm:
        llm.chat_prompt([{"role": "user", "content": "Hello"}])  # raises here when the model has no chat template
        if _is_terminal():
            typer.echo(HELP, err=True)
        _converse(llm, [] if system is None else [{"role": "system", "content": system}], params)


def _converse(llm: LLM, initial: Messages, params: SamplingParams) -> None:
    """Answer messages until the input ends. A rejected message is reported and dropped from the conversation."""
    messages = list(initial)
    while line := _read_message():
        if line == "/reset":
            messages = list(initial)
            continue
        messages.append({"role": "user", "content": line})
        try:
            messages.append({"role": "assistant", "content": _print_answer(llm, messages, params)})
        except RequestError as error:
            messages.pop()
            typer.echo(f"stoker: {error}", err=True)


def _read_message() -> str:
    """The next line of input; empty at its end."""
    try:
        return input("> " if _is_terminal() else "").strip()
    except (EOFError, RuntimeError):  # RuntimeError: standard input is closed
        return ""


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _print_answer(llm: LLM, messages: Messages, params: SamplingParams) -> str:
    """Print the answer as it is generated, and return it. Ctrl-C stops it and keeps the text so far. Raises RequestError."""
    texts: list[str] = []

    async def stream() -> None:
        async for delta in llm.stream(llm.chat_prompt(messages), _limit_max_tokens(llm, messages, params)):
            typer.echo(delta.text, nl=False)
            texts.append(delta.text)
            if delta.error is not None:
                raise RequestError("messages", messages, delta.error)

    try:
        asyncio.run(stream())
    except KeyboardInterrupt:
        typer.echo(" …", nl=False)
    typer.echo()
    return "".join(texts)


def _limit_max_tokens(llm: LLM, messages: Messages, params: SamplingParams) -> SamplingParams:
    """`params` with max_tokens reduced to the engine's max_output_len and to what is left of its sequence length."""
    info = llm.service.info
    available = min(info.limits.max_output_len, info.max_seq_len - len(llm.chat_prompt(messages)))
    return msgspec.structs.replace(params, max_tokens=max(1, min(params.max_tokens, available)))
