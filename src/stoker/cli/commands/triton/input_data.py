"""`stoker triton input-data`: random requests in perf_analyzer's format."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Annotated

import typer


def input_data(
    output: Annotated[Path, typer.Option(help="The file to write.")] = Path("input_data.json"),
    requests: Annotated[int, typer.Option(help="Number of different requests.")] = 10,
    start_len: Annotated[int, typer.Option("--start_len", "--start-len", help="Tokens of each prompt.")] = 8,
    output_len: Annotated[int, typer.Option("--output_len", "--output-len", help="New tokens of each request.")] = 10,
    vocab_size: Annotated[int, typer.Option(help="Random token ids are below this number.")] = 1000,
) -> None:
    """Write random requests for the model that takes token ids. perf_analyzer reads the file with --input-data.

    Examples:

      stoker triton input-data

      stoker triton input-data --output requests.json --requests 100 --start_len 128 --vocab-size 32000
    """
    from stoker.cli.clients.triton import FIRST_TOKEN_ID, check_sizes

    check_sizes(start_len, output_len, vocab_size, requests=requests)
    generator = random.Random(0)
    rows = [
        {
            "input_ids": {"content": [generator.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(start_len)], "shape": [start_len]},
            "input_lengths": {"content": [start_len], "shape": [1]},
            "request_output_len": {"content": [output_len], "shape": [1]},
        }
        for _ in range(requests)
    ]
    output.write_text(json.dumps({"data": rows}) + "\n")
    typer.echo(output)
