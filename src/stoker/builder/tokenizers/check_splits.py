"""Compares a converted tokenizer with the library that the original was made for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from stoker.base.errors import CheckpointError
from stoker.builder.tokenizers.probe_texts import PROBE_TEXTS


def check_splits(tokenizer: Tokenizer, encode: Callable[[str], list[int]], file: Path) -> None:
    """Raise CheckpointError unless `tokenizer` splits the probe texts into the same ids as `encode`, the original tokenizer.

    `file` is the vocabulary file that was converted, for the message.
    """
    for text in PROBE_TEXTS:
        ids, expected = tokenizer.encode(text, add_special_tokens=False).ids, encode(text)
        if ids != expected:
            raise CheckpointError(
                f"{file}: the converted tokenizer splits {text!r} into {ids}, not {expected}.", cure="Add a tokenizer.json."
            )
