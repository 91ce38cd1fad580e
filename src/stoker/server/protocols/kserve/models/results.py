"""The outputs of all models that generate: log-probabilities, placeholders for logits, and the indices of row and sequence."""

from __future__ import annotations

import msgspec
import numpy as np

from stoker.base.types import AdmissionRecord, Timings, TokenLogprobs
from stoker.server.protocols.kserve.inference import Tensors

_CONSTANT: Tensors = {
    "context_logits": np.zeros((1, 1, 1), np.float32),
    "generation_logits": np.zeros((1, 1, 1, 1), np.float32),
}
_PADDING = -1.0  # after the last log-probability of a shorter beam, as in TensorRT-LLM


def _no_scores(beams: int) -> Tensors:
    """The log-probabilities of a response without any: zeros."""
    return {"cum_log_probs": np.zeros((1, beams), np.float32), "output_log_probs": np.zeros((1, beams, 1), np.float32)}


_NO_SCORES = _no_scores(1)
_INDEX = [np.full((1, 1), i, np.int32) for i in range(64)]
for _array in (*_CONSTANT.values(), *_NO_SCORES.values(), *_INDEX):
    _array.setflags(write=False)  # all responses share these arrays, and encoders cache their encoding


class SequencePart(msgspec.Struct):
    """The part of one sequence or beam that a response contains."""

    index: int
    text: str
    token_ids: list[int]
    scores: list[float]
    cum_score: float
    stopped: bool = False  # by an end id or a stop word, whose text is removed
    admission: AdmissionRecord | None = None  # of a sequence that has tokens, if metrics are requested
    timings: Timings | None = None  # so far, if metrics are requested
    num_drafts: int = 0  # draft tokens that were verified so far, and those of them that were accepted, if metrics are requested
    num_accepted: int = 0


class Scores:
    """The log-probability of one sequence so far. `normalized` divides it by the length, as TensorRT-LLM's normalize_log_probs does."""

    def __init__(self, *, normalized: bool) -> None:
        self.length = 0
        self._normalized = normalized
        self._sum = 0.0

    def part(self, index: int, text: str, token_ids: list[int], logprobs: list[TokenLogprobs]) -> SequencePart:
        """The part of the sequence that these new tokens are, with the log-probability of the sequence up to them."""
        self.length += len(token_ids)
        if not logprobs:
            return SequencePart(index, text, token_ids, [], self._cumulative())
        new = [entry.logprob for entry in logprobs]
        self._sum += sum(new)
        return SequencePart(index, text, token_ids, new, self._cumulative())

    def _cumulative(self) -> float:
        """The sum of the log-probabilities so far, or their mean with `normalized`."""
        return self._sum / self.length if self._normalized and self.length else self._sum


def common_outputs(row: int, parts: list[SequencePart], *, scored: bool) -> Tensors:
    """The output tensors: cum_log_probs [1, beams], output_log_probs [1, beams, tokens], logits a single 0 of their rank.

    Without scores, cum_log_probs and output_log_probs [1, beams, 1] are 0. The Python gpt model calls the scores log_probs
    [1, tokens, beams], and has them only if they are requested.
    """
    indices = {"batch_index": _index(row), "sequence_index": _index(parts[0].index if len(parts) == 1 else 0)}
    if scored:
        scores = _scores(parts)
    else:
        scores = _NO_SCORES if len(parts) == 1 else _no_scores(len(parts))
    return _CONSTANT | scores | indices


def _scores(parts: list[SequencePart]) -> Tensors:
    """The log-probabilities of the parts: sums [1, beams], and by token [1, beams, tokens] and transposed."""
    by_token = np.full((1, len(parts), max(len(part.scores) for part in parts)), _PADDING, np.float32)
    for beam, part in enumerate(parts):
        by_token[0, beam, : len(part.scores)] = part.scores
    return {
        "cum_log_probs": np.array([[part.cum_score for part in parts]], np.float32),
        "output_log_probs": by_token,
        "log_probs": by_token.transpose(0, 2, 1),
    }


def _index(value: int) -> np.ndarray:
    """`value` as an array of shape [1, 1]."""
    return _INDEX[value] if value < len(_INDEX) else np.full((1, 1), value, np.int32)
