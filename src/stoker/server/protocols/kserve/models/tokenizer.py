"""The models preprocessing and postprocessing, which only use the tokenizer."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from stoker.base.errors import RequestError
from stoker.frontend.service import Service
from stoker.server.protocols.kserve.inference import Inference, Response, Responses, Tensors
from stoker.server.protocols.kserve.models import sampling
from stoker.server.protocols.kserve.tensors import word_lists
from stoker.server.protocols.kserve.tensors.dtypes import text_array
from stoker.server.protocols.kserve.tensors.input_row import InputRow, input_rows
from stoker.server.settings import ServerSettings

MAX_BIAS_ELEMENTS = 1 << 24


class TokenizerModel(ABC):
    """A model that needs no executor. A request with any number of rows has one response."""

    def __init__(self, service: Callable[[], Service], settings: ServerSettings) -> None:
        self._service = service
        self._settings = settings

    async def run(self, inference: Inference) -> Responses:
        """Compute the outputs in a thread. Yields one response with the requested ones."""
        outputs = await asyncio.to_thread(self.outputs, inference, self._service())
        names = [tensor.name for tensor in inference.model.outputs if tensor.name in (inference.outputs or outputs)]
        yield [Response(outputs={name: outputs[name] for name in names if name in outputs}, final=True)]

    @abstractmethod
    def outputs(self, inference: Inference, service: Service) -> Tensors:
        """All outputs that the model produces, by name. Raises RequestError."""


class Preprocessing(TokenizerModel):
    """Converts text and word lists to token ids. Rows of INPUT_ID are padded with the pad id."""

    def outputs(self, inference: Inference, service: Service) -> Tensors:
        """INPUT_ID, its lengths, the word lists as ids, and the end and pad ids. Raises RequestError for inputs that are not supported."""
        rows = input_rows(inference)
        for row in rows:
            row.check_rejected()
        end_ids, pad_ids = self._ids(rows, service)
        ids = [service.encode(row.value("QUERY", ""), add_special_tokens=self._settings.add_special_tokens) for row in rows]
        words = {
            role: word_lists.write_word_lists(
                [sampling.tokenize_words(role, row.texts(role), service) for row in rows],
                min_length=int(role in inference.inputs),  # as in the reference: an input without words has one place of padding
            )
            for role in ("BAD_WORDS_DICT", "STOP_WORDS_DICT")
        }
        return {
            "INPUT_ID": _padded(ids, pad_ids[:, 0]),
            "REQUEST_INPUT_LEN": _column([len(row) for row in ids]),
            "DECODER_INPUT_ID": pad_ids,
            "REQUEST_DECODER_INPUT_LEN": np.ones_like(pad_ids),
            "BAD_WORDS_IDS": words["BAD_WORDS_DICT"],
            "STOP_WORDS_IDS": words["STOP_WORDS_DICT"],
            "EMBEDDING_BIAS": _bias(rows, service),
            "REQUEST_OUTPUT_LEN": _column([row.value("REQUEST_OUTPUT_LEN", 0) for row in rows]),
            "OUT_END_ID": end_ids,
            "OUT_PAD_ID": pad_ids,
            "OUT_PROMPT_TABLE_EXTRA_IDS": np.zeros((len(rows), 0), np.uint64),  # there are no prompt tables
        }

    def _ids(self, rows: list[InputRow], service: Service) -> tuple[np.ndarray, np.ndarray]:
        """(end ids, pad ids), [rows, 1] each. The default end id is the model's first; -1 means none."""
        default_end = next(iter(service.end_ids), -1)
        default_pad = service.pad_id if service.pad_id is not None else max(default_end, 0)
        ends = [row.value("END_ID", default_end) for row in rows]
        return _column(ends), _column([row.value("PAD_ID", default_pad) for row in rows])


class Postprocessing(TokenizerModel):
    """Converts token ids [rows, beams, tokens] to texts [rows × beams]. Passes the log-probabilities and logits of release 0.8 through.

    Without SEQUENCE_LENGTH, as in release 0.5, all ids of a row are decoded except for negative ones, which are padding.
    """

    def outputs(self, inference: Inference, service: Service) -> Tensors:
        """OUTPUT: the texts of all sequences. Inputs other than the ids and their lengths are passed through as OUT_*."""
        tokens, lengths = inference.inputs["TOKENS_BATCH"], inference.inputs.get("SEQUENCE_LENGTH")
        if not inference.model.max_batch_size:
            tokens, lengths = tokens[None], lengths[None] if lengths is not None else None
        if tokens.shape[2] > service.max_seq_len:
            raise RequestError("TOKENS_BATCH", list(tokens.shape), f"a sequence has at most {service.max_seq_len} tokens")
        sequences = _all_ids(tokens) if lengths is None else _valid_ids(tokens, lengths)
        skip = self._settings.skip_special_tokens
        texts = [service.decode(ids, skip_special_tokens=skip).encode() for ids in sequences]
        passed = {f"OUT_{role}": array for role, array in inference.inputs.items() if role not in ("TOKENS_BATCH", "SEQUENCE_LENGTH")}
        return {"OUTPUT": text_array(texts, (len(texts),))} | passed


def _all_ids(tokens: np.ndarray) -> list[list[int]]:
    """The ids of each sequence of [rows, beams, tokens], without padding."""
    return [row[row >= 0].tolist() for row in tokens.reshape(-1, tokens.shape[2])]


def _valid_ids(tokens: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    """The first ids of each sequence; `lengths` [rows, beams] are their numbers. Raises RequestError."""
    if lengths.shape != tokens.shape[:2]:
        raise RequestError("SEQUENCE_LENGTH", list(lengths.shape), f"TOKENS_BATCH has {list(tokens.shape[:2])} sequences")
    sequences: list[list[int]] = []
    for ids, length in zip(tokens.reshape(lengths.size, tokens.shape[2]), lengths.ravel().tolist(), strict=True):
        if not 0 <= length <= len(ids):
            raise RequestError("SEQUENCE_LENGTH", length, f"the row has {len(ids)} tokens")
        sequences.append(ids[:length].tolist())
    return sequences


def _column(values: list[int]) -> np.ndarray:
    """An array [rows, 1]."""
    return np.array(values, np.int32).reshape(-1, 1)


def _padded(ids: list[list[int]], pads: np.ndarray) -> np.ndarray:
    """An array [rows, longest row]; each row is padded with its value of `pads`."""
    array = np.repeat(pads[:, None], max(map(len, ids)), axis=1).astype(np.int32)
    for row, tokens in enumerate(ids):
        array[row, : len(tokens)] = tokens
    return array


def _bias(rows: list[InputRow], service: Service) -> np.ndarray:
    """[rows, vocabulary] if any row has words, otherwise [rows, 0]."""
    biases = [sampling.word_bias(row.texts("EMBEDDING_BIAS_WORDS"), row.array("EMBEDDING_BIAS_WEIGHTS"), service) for row in rows]
    width = service.info.vocab_size if any(biases) else 0
    if len(rows) * width > MAX_BIAS_ELEMENTS:
        raise RequestError(
            "EMBEDDING_BIAS_WORDS", len(rows), f"{width} weights per row exceed {MAX_BIAS_ELEMENTS} in total", cure="Send fewer rows."
        )
    array = np.zeros((len(rows), width), np.float32)
    for row, bias in enumerate(biases):
        for token, weight in bias.items():
            array[row, token] = weight
    return array
