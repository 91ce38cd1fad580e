"""Collects the answers in responses of a Triton server, texts or token ids by sequence, and prints them as they arrive or at the end."""

from __future__ import annotations

from typing import Any

import numpy as np
import typer


class Answers:
    """Collects the responses to one request.

    num_sequences: beams or sequences that were requested. One is printed as it arrives; several are printed at the end, numbered.
    accumulated: each response contains the text of the responses before it.
    """

    def __init__(self, num_sequences: int, *, accumulated: bool) -> None:
        self._is_single = num_sequences == 1
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
        rows = [ids[index].tolist() for index in np.ndindex(ids.shape[:-1])]  # a response of a stopped request has no ids
        for index, row in self._by_sequence(result, rows):
            if self._is_single and row:
                typer.echo(",".join(map(str, row)))
            self._ids[index] = self._ids.get(index, []) + row

    def finish(self) -> None:
        """Print all answers that were not printed yet."""
        if self._is_single:
            return
        lines = self._texts or {index: ",".join(map(str, ids)) for index, ids in self._ids.items()}
        for index, line in sorted(lines.items()):
            typer.echo(f"{index}: {line}")

    def _add_text(self, index: int, item: str) -> None:
        """Add text of one sequence, and print it if it is the only sequence."""
        before = self._texts.get(index, "")
        self._texts[index] = text = item if self._accumulated else before + item
        if self._is_single:
            typer.echo(text.removeprefix(before), nl=False)

    @staticmethod
    def _by_sequence(result: Any, items: list[Any]) -> list[tuple[int, Any]]:
        """(index of the sequence, item) for each item of a response. A single item has an index; several items are in order."""
        if len(items) != 1:
            return list(enumerate(items))
        index = result.as_numpy("sequence_index")
        return [(0 if index is None else int(index.flat[0]), items[0])]
