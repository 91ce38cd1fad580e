"""`stoker chat`: a conversation with a model in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from stoker.base.config import RuntimeConfig
from stoker.base.errors import ConfigError, RequestError
from stoker.base.types import SamplingParams
from stoker.cli.conversation import Conversation, Messages
from stoker.cli.engines import Model, running_llm
from stoker.cli.options import build_options, runtime_options, sampling_options
from stoker.deploy.build_settings import BuildSettings

if TYPE_CHECKING:
    from stoker.api.llm import LLM

GREETING = "/help lists the commands. An empty line or Ctrl-D ends the conversation, Ctrl-C stops an answer."
QUOTES = '"""'  # around a message of several lines


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

    Commands: /help, /exit, /reset, /set NAME VALUE (a sampling parameter), /save FILE. An empty line or Ctrl-D ends the conversation,
    Ctrl-C stops an answer. Three quotes begin and end a message of several lines. Messages are read from standard input, one a line, when
    it is not a terminal.

    Examples:

      stoker chat engine

      stoker chat engine --system "You answer in one sentence." --temperature 0.7
    """
    if params.n != 1:
        raise RequestError("n", params.n, "a conversation has one answer")
    with running_llm(model, runtime, build) as llm:
        llm.chat_prompt([{"role": "user", "content": "Hello"}])  # raises here when the model has no chat template
        if _is_terminal():
            typer.echo(GREETING, err=True)
        _converse(llm, Conversation(model, system, params))


def _converse(llm: LLM, conversation: Conversation) -> None:
    """Run commands and answer messages until the input ends. An error is printed, and its message is dropped from the conversation."""
    while not conversation.is_ended and (line := _read_message()):
        try:
            if line.startswith("/") and not line.startswith("//") and "\n" not in line:
                if output := conversation.run_command(line):
                    typer.echo(output, err=True)
            else:
                _answer(llm, conversation, line.removeprefix("/") if line.startswith("//") else line)
        except (RequestError, ConfigError) as error:
            typer.echo(f"stoker: {error}", err=True)


def _answer(llm: LLM, conversation: Conversation, message: str) -> None:
    """Add a message and its answer to the conversation. Raises RequestError, and then leaves the conversation unchanged."""
    messages = [*conversation.messages, {"role": "user", "content": message}]
    answer = _print_answer(llm, messages, conversation.params)
    conversation.messages = [*messages, {"role": "assistant", "content": answer}]


def _read_message() -> str:
    """The next message from the input: a line, or the lines between two QUOTES. Empty at the end of the input."""
    line = _read_line("> ").strip()
    if not line.startswith(QUOTES):
        return line
    lines, rest = [], line.removeprefix(QUOTES)
    while not rest.rstrip().endswith(QUOTES):
        lines.append(rest)
        try:
            rest = _input("... ")
        except EOFError:
            return "\n".join(lines).strip()
    return "\n".join([*lines, rest.rstrip().removesuffix(QUOTES)]).strip()


def _read_line(prompt: str) -> str:
    """The next line of input; empty at its end."""
    try:
        return _input(prompt)
    except (EOFError, RuntimeError):  # RuntimeError: standard input is closed
        return ""


def _input(prompt: str) -> str:
    """The next line of input. In a terminal, it can be edited with readline, which has a history."""
    if not _is_terminal():
        return input()
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() uses it when it is imported
    return input(prompt)


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _print_answer(llm: LLM, messages: Messages, params: SamplingParams) -> str:
    """Print an answer while it is generated, and return it. Ctrl-C stops it and leaves the text so far. Raises RequestError."""
    texts: list[str] = []

    async def stream() -> None:
        """Generate the answer, print each delta, and collect the texts."""
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
    """`params` with max_tokens reduced to the engine's max_output_len and to the remaining length of its sequences."""
    info = llm.service.info
    available = min(info.limits.max_output_len, info.max_seq_len - len(llm.chat_prompt(messages)))
    return msgspec.structs.replace(params, max_tokens=max(1, min(params.max_tokens, available)))
