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
class PromptChunk:
    """Tokens of a prompt whose log-probabilities a step computes."""

    seq: Sequence
    start: int  # position of the token before the first one, in the sequence
    at: int  # index of that token among the tokens of the step
    targets: np.ndarray  # int32, the tokens


def prompt_chunks(plan: StepPlan) -> list[PromptChunk]:
    """The chunks of sequences that request prompt_logprobs, in the order of the plan.

    A chunk's targets are the prompt tokens after its positions; the last prompt token has none.
    """
    chunks: list[PromptChunk] = []
    at = 0
    for seq, start, count in zip(plan.sequences, plan.starts, plan.num_new, strict=True):
        if seq.params.prompt_logprobs is not None and start < seq.num_prompt - 1:
            end = min(start + count, seq.num_prompt - 1)
            chunks.append(PromptChunk(seq, start, at, np.array(seq.tokens[start + 1 : end + 1], dtype=np.int32)))
        at += count
    return chunks


class PromptScores:
    """Collects the log-probabilities of each prompt over several steps.

    The first entry of a list is None, because no token precedes the first one.
    """

    def __init__(self) -> None:
        self._partial: PromptLogprobs = {}

    def add(self, seq: Sequence) -> None:
        """Add a sequence before its first step."""
        if seq.params.prompt_logprobs is not None:
            self._partial[seq.seq_id] = [None]

    def remove(self, seq_id: int) -> None:
        """Forget a sequence that ended. Results of its steps in flight are then dropped."""
        self._partial.pop(seq_id, None)

    def collect(self, scored: list[tuple[PromptChunk, Logprobs]], sampled: list[Sequence]) -> PromptLogprobs:
        """Add the results of a step, which are on the host. Returns complete lists by seq_id, for sequences in `sampled`, each once.

        A list may be complete one step before its sequence samples, if a chunk ends before the last prompt token.
        """
        for chunk, scores in scored:
            seq = chunk.seq
            if (entries := self._partial.get(seq.seq_id)) is None:
                continue
            new = scores.to_list(chunk.targets.tolist(), [seq.params.prompt_logprobs] * len(chunk.targets))
            # After a preemption they are computed again, possibly in other chunks. The first results remain.
            entries += new[len(entries) - chunk.start - 1 :]
        ready = [seq for seq in sampled if len(self._partial.get(seq.seq_id, ())) == seq.num_prompt] if self._partial else []
        return {seq.seq_id: self._partial.pop(seq.seq_id) for seq in ready}
