"""`stoker run-batch`: processes a file of OpenAI's batch requests in this process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.base.config import RuntimeConfig
from stoker.base.errors import ConfigError
from stoker.cli.commands.serve import SERVER_HELP
from stoker.cli.engines import Model, running_llm
from stoker.cli.options import build_options, runtime_options, struct_options
from stoker.deploy.build_settings import BuildSettings
from stoker.server.settings import ServerSettings

if TYPE_CHECKING:
    from stoker.server.protocols.openai.batches.lines import BatchLine, LineResult

_NAMES = (
    "model_name",
    "add_special_tokens",
    "skip_special_tokens",
    "default_max_tokens",
    "request_timeout_s",
    "tool_parser",
    "reasoning_parser",
)


@build_options
@runtime_options
@struct_options(ServerSettings, "settings", {name: SERVER_HELP[name] for name in _NAMES})
def run_batch(
    model: Model,
    input_file: Annotated[
        Path, typer.Option("--input-file", "-i", help="A file with one request a line: custom_id, url and body. - is standard input.")
    ],
    output_file: Annotated[
        Path, typer.Option("--output-file", "-o", help="The file for the results. Requests that it has results of are skipped.")
    ],
    *,
    settings: ServerSettings,
    runtime: RuntimeConfig,
    build: BuildSettings,
) -> None:
    """Process a file in the format of OpenAI's Batch API without a server.

    The url of a request is /v1/chat/completions, /v1/completions or /v1/responses. A request that is refused has a result with its error.
    The exit status is 1 if there is one. A run that was interrupted continues with the same command.

    Examples:

      stoker run-batch engine -i requests.jsonl -o results.jsonl

      stoker run-batch ./Qwen3-8B -i requests.jsonl -o results.jsonl --reasoning-parser qwen3
    """
    lines, num_done = _remaining_lines(_read_input(input_file), output_file)
    if not lines:
        _report(num_done, 0, 0)
        return
    with running_llm(model, runtime, build) as llm, output_file.open("ab") as output:
        from stoker.api.progress import shown_progress
        from stoker.server.protocols.openai.batches.offline import run_offline

        counts = {True: 0, False: 0}
        with shown_progress("running", lambda line: print(f"stoker: {line}", file=sys.stderr, flush=True)) as progress:

            def on_result(result: LineResult) -> None:
                output.write(result.encode())
                output.flush()
                counts[result.succeeded] += 1
                progress("requests", sum(counts.values()), len(lines))

            llm.run(run_offline(llm.service, settings, lines, on_result))
    _report(num_done, counts[True], counts[False])
    if counts[False]:
        raise typer.Exit(1)


def _read_input(path: Path) -> list[BatchLine]:
    """The requests of the file. Raises ConfigError that names the first wrong line."""
    from stoker.server.protocols.openai.batches.fields import URLS
    from stoker.server.protocols.openai.batches.lines import BatchLinesError, read_batch_lines

    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return read_batch_lines(data, URLS)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", cure="Name a file with one request a line.") from None
    except BatchLinesError as error:
        raise ConfigError(f"{path}: {error}", cure='A line is {"custom_id": …, "url": "/v1/chat/completions", "body": {…}}.') from None


def _remaining_lines(lines: list[BatchLine], path: Path) -> tuple[list[BatchLine], int]:
    """(requests without a result in the output file, number of the others). A result that was not written completely is removed.

    Raises ConfigError if the file cannot be written or has other content.
    """
    from stoker.server.protocols.openai.batches.lines import finished_ids

    try:
        path.open("ab").close()
        done = finished_ids(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.", cure="Name a file in a folder that exists.") from None
    except ValueError:
        raise ConfigError(f"{path} has lines that are not results of a batch.", cure="Name another file, or remove it.") from None
    remaining = [line for line in lines if line.custom_id not in done]
    return remaining, len(lines) - len(remaining)


def _report(num_done: int, num_completed: int, num_failed: int) -> None:
    earlier = f", {num_done} were completed or failed before" if num_done else ""
    print(f"stoker: {num_completed} requests completed, {num_failed} failed{earlier}", file=sys.stderr)
