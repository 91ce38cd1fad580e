"""Log-probabilities of prompt tokens, collected over the chunks of a prefill."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stoker.base.types import TokenLogprobs
from stoker.runtime.request import Sequence
from stoker.runtime.sampling.logprobs import Logprobs
from stoker.runtime.schedule.plan import StepPlan

PromptLogprobs = dict[int, list[TokenLogprobs | None]]  # by seq_id


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of a prompt that a step scores."""

    seq: Sequence
    start: int  # of the first one's predecessor, in the sequence
    at: int  # and among the step's tokens
    targets: np.ndarray  # int32: the tokens


def pieces(plan: StepPlan) -> list[Piece]:
    """Of the sequences that asked, in the plan's order. A prompt's last token has no successor in it."""
    found: list[Piece] = []
    at = 0
    for seq, start, count in zip(plan.sequences, plan.starts, plan.num_new, strict=True):
        if seq.params.prompt_logprobs is not None and start < seq.num_prompt - 1:
            end = min(start + count, seq.num_prompt - 1)
            found.append(Piece(seq, start, at, np.array(seq.tokens[start + 1 : end + 1], dtype=np.int32)))
        at += count
    return found


class PromptScores:
    """What each sequence that asked has so far; its first entry is None, since nothing comes before the first token."""

    def __init__(self) -> None:
        self._partial: PromptLogprobs = {}

    def add(self, seq: Sequence) -> None:
        """A sequence begins."""
        if seq.params.prompt_logprobs is not None:
            self._partial[seq.seq_id] = [None]

    def remove(self, seq_id: int) -> None:
        """It ended; steps that are still on their way add nothing to it."""
        self._partial.pop(seq_id, None)

    def collect(self, scored: list[tuple[Piece, Logprobs]], sampled: list[Sequence]) -> PromptLogprobs:
        """Take what a step scored, on the host now. Returns the lists of `sampled` that are complete, each once.

        A list may be complete a step before its sequence samples, when a chunk ends right before the prompt's last token.
        """
        for piece, scores in scored:
            seq = piece.seq
            if (entries := self._partial.get(seq.seq_id)) is None:
                continue
            scored_now = scores.read(piece.targets.tolist(), [seq.params.prompt_logprobs] * len(piece.targets))
            # After a preemption they are computed again, perhaps in other chunks: the first ones stay.
            entries += scored_now[len(entries) - piece.start - 1 :]
        ready = [seq for seq in sampled if len(self._partial.get(seq.seq_id, ())) == seq.num_prompt] if self._partial else []
        return {seq.seq_id: self._partial.pop(seq.seq_id) for seq in ready}
