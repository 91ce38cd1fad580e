"""TensorRT-LLM's tensors of token sequences: row 0 has the concatenated ids, row 1 the end offset of each sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stoker.base.errors import RequestError

MAX_WORDS = 4096
MAX_IDS = 1 << 16


def read_word_list(name: str, array: np.ndarray) -> list[tuple[int, ...]]:
    """The sequences of an array [2, length]. Offsets are followed by -1. Raises RequestError for invalid offsets."""
    if array.size == 0:
        return []
    if array.ndim != 2 or array.shape[0] != 2:
        raise RequestError(name, list(array.shape), "its shape must be [2, length]")
    if array.shape[1] > MAX_IDS:
        raise RequestError(name, list(array.shape), f"the limit is {MAX_IDS} ids")
    ids, ends = array.tolist()
    num_words = next((at for at, end in enumerate(ends) if end == -1), len(ends))
    if any(end != -1 for end in ends[num_words:]):
        raise RequestError(name, ends, "after the first -1 all offsets must be -1")
    if num_words > MAX_WORDS:
        raise RequestError(name, num_words, f"the limit is {MAX_WORDS} words")
    words, start = [], 0
    for end in ends[:num_words]:
        if not start < end <= len(ids):
            raise RequestError(name, end, f"offsets must increase and lie in 1 to {len(ids)}", cure="Send cumulative offsets, then -1.")
        words.append(tuple(ids[start:end]))
        start = end
    return words


def write_word_lists(rows: Sequence[Sequence[Sequence[int]]], *, min_length: int = 0) -> np.ndarray:
    """An INT32 array [rows, 2, length]. Shorter rows are padded with id 0 and offset -1. Without words, the length is `min_length`."""
    flat = [[token for word in words for token in word] for words in rows]
    length = max([min_length, *map(len, flat)])
    array = np.zeros((len(rows), 2, length), np.int32)
    array[:, 1] = -1
    for row, words in enumerate(rows):
        array[row, 0, : len(flat[row])] = flat[row]
        ends = np.cumsum([len(word) for word in words if word])
        array[row, 1, : len(ends)] = ends
    return array
