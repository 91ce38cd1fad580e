"""Collects the answers in responses of a Triton server, texts or token ids by sequence, and prints them as they arrive or at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import typer

INCOMPLETE = "\ufffd"  # of a character whose last tokens have not arrived


class Answers:
    """Collects the responses to one request.

    num_sequences: beams or sequences that were requested. One is printed as it arrives; several are printed at the end, numbered.
    accumulated: each response contains the text of the responses before it.
    decode: the text of token ids, which are otherwise printed as numbers. The text of a prompt that precedes them is left out.
    """

    def __init__(
        self,
        num_sequences: int,
        *,
        accumulated: bool,
        decode: Callable[[list[int]], str] | None = None,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self._is_single = num_sequences == 1
        self._decode = decode
        self._prompt_ids = list(prompt_ids)
        self._accumulated = accumulated
        self._texts: dict[int, str] = {}
        self._ids: dict[int, list[int]] = {}

    @property
    def text(self) -> str:
        """The text of the first sequence so far."""
        return self._texts.get(0, "")

    def add(self, result: Any) -> None:
        """Add a response: an InferResult of tritonclient with text_output, or with output_ids."""
        texts = result.as_numpy("text_output")
        if texts is not None:
            for index, item in self._by_sequence(result, list(texts.flat)):
                self._add_text(index, item.decode() if isinstance(item, bytes) else item)
            return
        ids = result.as_numpy("output_ids")
        rows = _valid_ids(ids, result.as_numpy("sequence_length"))
        for index, row in self._by_sequence(result, rows):
            if self._is_single and row and self._decode is None:
                typer.echo(",".join(map(str, row)))
            self._ids[index] = self._ids.get(index, []) + row
            if self._decode is not None:
                self._add_decoded(index, self._ids[index], self._decode)

    def finish(self) -> None:
        """Print all answers that were not printed yet."""
        if self._is_single:
            return
        lines = self._texts or {index: ",".join(map(str, ids)) for index, ids in self._ids.items()}
        for index, line in sorted(lines.items()):
            typer.echo(f"{index}: {line}")

    def _add_decoded(self, index: int, ids: list[int], decode: Callable[[list[int]], str]) -> None:
        """Decode all ids of one sequence so far, without those of the prompt."""
        size = len(self._prompt_ids)
        text = decode(ids[size:] if ids[:size] == self._prompt_ids else ids)
        self._set_text(index, text if self._accumulated else text.rstrip(INCOMPLETE))

    def _add_text(self, index: int, item: str) -> None:
        """Add text of one sequence."""
        self._set_text(index, item if self._accumulated else self._texts.get(index, "") + item)

    def _set_text(self, index: int, text: str) -> None:
        """Set the text of one sequence so far, and print what is new if it is the only sequence."""
        before = self._texts.get(index, "")
        self._texts[index] = text
        if self._is_single:
            typer.echo(text.removeprefix(before), nl=False)

    @staticmethod
    def _by_sequence(result: Any, items: list[Any]) -> list[tuple[int, Any]]:
        """(index of the sequence, item) for each item of a response. A single item has an index; several items are in order."""
        if len(items) != 1:
            return list(enumerate(items))
        index = result.as_numpy("sequence_index")
        return [(0 if index is None else int(index.flat[0]), items[0])]


def _valid_ids(ids: np.ndarray, lengths: np.ndarray | None) -> list[list[int]]:
    """The ids of each sequence, without padding if their lengths are known. A response of a stopped request has no ids."""
    rows: list[list[int]] = [ids[index].tolist() for index in np.ndindex(ids.shape[:-1])]
    if lengths is None or lengths.size != len(rows):
        return rows
    return [row[:length] for row, length in zip(rows, lengths.ravel().tolist(), strict=True)]
