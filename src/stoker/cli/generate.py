"""`stoker generate`: answers to prompts, in this process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from stoker.base.config import RuntimeConfig
from stoker.base.errors import RequestError
from stoker.base.types import FinishReason, SamplingParams
from stoker.cli.options import lines_of, runtime_options, sampling_options

if TYPE_CHECKING:
    from stoker.frontend.llm import LLM, Prompt
    from stoker.frontend.service import Completion


@runtime_options
@sampling_options(max_tokens=64)
def generate(
    engine: Annotated[Path, typer.Argument(help="An engine directory.")],
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; several are batched in flight.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="A file with one prompt a line.")] = None,
    as_chat: Annotated[bool, typer.Option("--chat", help="Send each prompt as a user's message, through the chat template.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object an answer: text, token ids, finish reason, usage.")
    ] = False,
    *,
    params: SamplingParams,
    runtime: RuntimeConfig,
) -> None:
    """Continue prompts and print the answers; a single one streams.

    Examples:

      stoker generate engine "The capital of Japan is" --max-tokens 8

      stoker generate engine --chat "What is the capital of Japan?"

      stoker generate engine --file prompts.txt --json > answers.jsonl
    """
    asked = [*(prompts or []), *(lines_of(file, "prompt") if file is not None else [])]
    if not asked:
        raise typer.BadParameter("give at least one, or --file", param_hint="PROMPTS")
    from stoker.frontend.llm import LLM

    with LLM(engine, **msgspec.structs.asdict(runtime)) as llm:
        inputs: list[Prompt] = [llm.chat_prompt([{"role": "user", "content": text}]) if as_chat else text for text in asked]
        if len(inputs) == 1 and params.n == 1 and not as_json:
            asyncio.run(stream(llm, inputs[0], params))
        else:
            _batch(llm, asked, inputs, params, as_json)


async def stream(llm: LLM, prompt: str | list[int], params: SamplingParams) -> str:
    """Print an answer as it comes; returns it. Raises RequestError when the sequence fails."""
    pieces = []
    async for delta in llm.stream(prompt, params):
        typer.echo(delta.text, nl=False)
        pieces.append(delta.text)
        if delta.finish_reason is FinishReason.ERROR:
            raise RequestError("prompt", prompt, delta.error or "it failed")
    typer.echo()
    return "".join(pieces)


def _batch(llm: LLM, asked: list[str], inputs: list[Prompt], params: SamplingParams, as_json: bool) -> None:
    from rich.console import Console

    from stoker.cli.progress import Bars

    done = 0
    with Bars(Console(stderr=True)) as bars:

        def finished(answer: Completion) -> None:
            nonlocal done
            done += 1
            bars("answers", done, len(inputs))

        bars("answers", 0, len(inputs))
        answers = llm.generate(inputs, params, finished)
    for text, answer in zip(asked, answers, strict=True):
        typer.echo(_json(text, answer) if as_json else _text(text, answer))


def _json(prompt: str, answer: Completion) -> bytes:
    return msgspec.json.encode({"prompt": prompt, "choices": answer.choices, "usage": answer.usage})


def _text(prompt: str, answer: Completion) -> str:
    return "\n".join(f"> {prompt}\n{choice.text}\n" for choice in answer.choices)
