"""Repetition (CTRL, arXiv 1909.05858), presence and frequency penalties, from counts on the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from stoker.base.types import SamplingParams
from stoker.runtime.request import Sequence
from stoker.runtime.sampling.feature import Feature, SampledRow


class Penalties(Feature):
    """Applies penalties from counts of generated tokens and a mask of prompt tokens, both [slots, vocab], on the device.

    A sequence gets a slot at the first step that samples for it. The number of slots is doubled when all are in use. The counts of a row
    include the drafts before it; those of the slot include only tokens that were generated.
    """

    reads_drafts = True

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)

    def applies_to(self, params: SamplingParams) -> bool:
        return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0

    def remove(self, seq_id: int) -> None:
        """Free the slot of the sequence."""
        slot = self._slots.pop(seq_id, None)
        if slot is not None:
            self._free.append(slot)

    def gather(self, rows: list[SampledRow]) -> list[np.ndarray]:
        """Rows [n]; slots [n]; the three penalties, float32 [3, n]; the slots of new sequences; flat indices of their prompt tokens."""
        new = {self._assign_slot(row.seq): row.seq for row in rows if row.seq.seq_id not in self._slots}
        prompts = [slot * self.vocab_size + np.array(seq.tokens[: seq.num_prompt], dtype=np.int64) for slot, seq in new.items()]
        params = [row.seq.params for row in rows]
        return [
            np.array([row.at for row in rows]),
            np.array([self._slots[row.seq.seq_id] for row in rows]),
            np.array([(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params], dtype=np.float32).T,
            np.array(list(new), dtype=np.int64),
            np.concatenate([np.empty(0, dtype=np.int64), *prompts]),
        ]

    def apply(self, logits: Tensor, *inputs: Tensor) -> None:
        """Reset the slots of new sequences, and apply the three penalties to the logits."""
        drafts, rows, slots, penalties, new, prompts = inputs
        if len(new):
            self._counts.index_fill_(0, new, 0)
            self._in_prompt.index_fill_(0, new, False).view(-1).index_fill_(0, prompts, True)
        repetition, presence, frequency = penalties.unsqueeze(2)
        counts = self._counts.index_select(0, slots)
        if drafts.shape[1]:
            before = drafts.index_select(0, rows)
            counts.scatter_add_(1, before.clamp(min=0).long(), (before >= 0).to(counts.dtype))
        generated = counts > 0
        x = logits.index_select(0, rows)
        seen = generated | self._in_prompt.index_select(0, slots)
        x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
        logits.index_copy_(0, rows, x - frequency * counts - presence * generated)

    def observe(self, token_ids: Tensor, *inputs: Tensor) -> None:
        """Count the sampled tokens."""
        _, rows, slots, *_ = inputs
        chosen = token_ids.index_select(0, rows)
        index = slots * self.vocab_size + chosen.clamp(min=0)
        self._counts.view(-1).index_add_(0, index, (chosen >= 0).to(torch.int32))

    def _assign_slot(self, seq: Sequence) -> int:
        """The slot of a sequence, which is assigned now. Enlarges the tensors if no slot is free."""
        if not self._free:
            old = self._counts.shape[0]
            grown = max(4, 2 * old)
            self._counts = torch.cat((self._counts, self._counts.new_zeros(grown - old, self.vocab_size)))
            self._in_prompt = torch.cat((self._in_prompt, self._in_prompt.new_zeros(grown - old, self.vocab_size)))
            self._free = list(range(grown - 1, old - 1, -1))
        self._slots[seq.seq_id] = self._free.pop()
        return self._slots[seq.seq_id]
