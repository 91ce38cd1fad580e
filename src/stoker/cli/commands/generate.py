"""`stoker generate`: completes prompts in this process."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from stoker.base.config import RuntimeConfig
from stoker.base.errors import ConfigError, RequestError
from stoker.base.types import FinishReason, SamplingParams
from stoker.cli.engines import Model, running_llm
from stoker.cli.options import build_options, read_lines, runtime_options, sampling_options
from stoker.deploy.build_settings import BuildSettings

if TYPE_CHECKING:
    from stoker.api.llm import LLM
    from stoker.api.prompts import Prompt
    from stoker.frontend.service import Completion


@build_options
@runtime_options
@sampling_options(max_tokens=64)
def generate(
    model: Model,
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts. Several are batched.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="A file with one prompt a line.")] = None,
    as_chat: Annotated[bool, typer.Option("--chat", help="Send each prompt as a user message through the chat template.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per prompt: text, token ids, finish reason and usage.")
    ] = False,
    *,
    params: SamplingParams,
    runtime: RuntimeConfig,
    build: BuildSettings,
) -> None:
    """Complete prompts and print the answers. The answer to a single prompt streams.

    Without prompts and --file, standard input is one prompt.

    Examples:

      stoker generate engine "Once upon a time"

      stoker generate engine "The capital of Japan is" --max-tokens 8

      stoker generate engine --chat "What is the capital of Japan?"

      stoker generate engine --file prompts.txt --json > answers.jsonl

      stoker generate engine --chat < question.txt
    """
    texts = [*(prompts or []), *(read_lines(file, "prompt") if file is not None else [])] or _read_standard_input()
    if not texts:
        raise typer.BadParameter("give at least one, --file, or text on standard input", param_hint="PROMPTS")
    with running_llm(model, runtime, build) as llm:
        inputs: list[Prompt] = [llm.chat_prompt([{"role": "user", "content": text}]) if as_chat else text for text in texts]
        if len(inputs) == 1 and params.n == 1 and not as_json:
            asyncio.run(_print_stream(llm, inputs[0], params))
        else:
            _print_batch(llm, texts, inputs, params, as_json)


def _read_standard_input() -> list[str]:
    """The text of standard input as one prompt, without its last line break. Empty for a terminal or an empty text."""
    if sys.stdin is None or sys.stdin.isatty():
        return []
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input cannot be read: {error}.", cure="Send text in UTF-8.") from None
    except OSError:  # it is closed
        return []
    return [text.removesuffix("\n")] if text.strip() else []


async def _print_stream(llm: LLM, prompt: Prompt, params: SamplingParams) -> None:
    """Print an answer while it is generated. Raises RequestError when the sequence fails."""
    async for delta in llm.stream(prompt, params):
        typer.echo(delta.text, nl=False)
        if delta.finish_reason is FinishReason.ERROR:
            raise RequestError("prompt", prompt, delta.error or "it failed")
    typer.echo()


def _print_batch(llm: LLM, texts: list[str], inputs: list[Prompt], params: SamplingParams, as_json: bool) -> None:
    """Generate all answers with a progress bar, and print each when it is complete."""
    from rich.console import Console

    from stoker.api.progress import ProgressBars

    num_done = 0
    with ProgressBars(Console(stderr=True)) as bars:

        def on_answer(answer: Completion) -> None:
            nonlocal num_done
            num_done += 1
            bars("answers", num_done, len(inputs))

        bars("answers", 0, len(inputs))
        answers = llm.generate(inputs, params, on_answer)
    for text, answer in zip(texts, answers, strict=True):
        typer.echo(_format_json(text, answer) if as_json else _format_text(text, answer))


def _format_json(prompt: str, answer: Completion) -> bytes:
    """One line of JSON with a prompt and its answer."""
    return msgspec.json.encode({"prompt": prompt, "choices": answer.choices, "usage": answer.usage})


def _format_text(prompt: str, answer: Completion) -> str:
    """A prompt and its answers as text."""
    return "\n".join(f"> {prompt}\n{choice.text}\n" for choice in answer.choices)
