"""`stoker export hf`: an engine as a Hugging Face checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stoker.cli.engines import Model, prepare_engine


def hf(model: Model, folder: Annotated[Path, typer.Argument(help="The new folder to write.")]) -> None:
    """Write config.json, safetensors files and the tokenizer of an engine.

    Quantized weights keep their stored values in the format of compressed-tensors, which transformers and vLLM read: FP8, 8-bit and
    4-bit integers. Others are plain numbers. The shards of several ranks are merged, and the scales of an FP8 KV cache are exported.

    Examples:

      stoker build ./Llama-3.1-8B-Instruct -o engine --quantize AWQ

      stoker export hf engine ./Llama-3.1-8B-Instruct-AWQ
    """
    engine = prepare_engine(model, None)
    from stoker.builder.export.hugging_face import export_hugging_face

    for file in export_hugging_face(engine, folder):
        typer.echo(file)
