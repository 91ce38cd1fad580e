"""Log-probabilities of prompt tokens, collected over the chunks of a prefill."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.base.types import TokenLogprobs
from stoker.runtime.request import Sequence
from stoker.runtime.sampling.sampler import score
from stoker.runtime.schedule.plan import StepPlan


class PromptScores:
    """What each sequence that asked has so far; its first entry is None, since nothing comes before the first token."""

    def __init__(self) -> None:
        self._partial: dict[int, list[TokenLogprobs | None]] = {}

    def remove(self, seq_id: int) -> None:
        self._partial.pop(seq_id, None)

    def collect(self, plan: StepPlan, logits: Tensor) -> dict[int, list[TokenLogprobs | None]]:
        """Take the step's prompt logits [N, V], in the plan's order. Returns the lists that are complete, by seq_id."""
        complete: dict[int, list[TokenLogprobs | None]] = {}
        at = 0
        for seq, start, count in zip(plan.sequences, plan.starts, plan.num_new, strict=True):
            if seq.params.prompt_logprobs is None or start >= seq.num_prompt - 1:
                continue
            count = min(count, seq.num_prompt - 1 - start)
            entries = self._partial.setdefault(seq.seq_id, [None])
            if len(entries) == start + 1:  # else recomputed after a preemption
                entries += _entries(seq, start, logits[at : at + count])
            at += count
            if len(entries) == seq.num_prompt:
                complete[seq.seq_id] = entries
        return complete


def _entries(seq: Sequence, start: int, logits: Tensor) -> list[TokenLogprobs]:
    targets = seq.tokens[start + 1 : start + 1 + logits.shape[0]]
    scores = score(logits, torch.tensor(targets, dtype=torch.int32, device=logits.device), seq.params.prompt_logprobs or 0)
    rows = zip(targets, scores.chosen.tolist(), scores.ids.tolist(), scores.best.tolist(), strict=True)
    return [TokenLogprobs(token, chosen, list(zip(ids, best, strict=True))) for token, chosen, ids, best in rows]
