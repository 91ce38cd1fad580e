"""Repetition (CTRL, arXiv 1909.05858), presence and frequency penalties, from counts kept on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.base.types import SamplingParams
from stoker.runtime.request import Sequence
from stoker.runtime.sampling.feature import Feature


class Penalties(Feature):
    """Counts of generated tokens and a mask of prompt tokens, [slots, vocab]; slots are made as sequences need them."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)

    def wants(self, params: SamplingParams) -> bool:
        return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0

    def add(self, seq: Sequence) -> None:
        slot = self._take()
        self._slots[seq.seq_id] = slot
        self._counts[slot] = 0
        self._in_prompt[slot] = False
        prompt = torch.tensor(seq.tokens[: seq.num_prompt], dtype=torch.long, device=self.device)
        self._in_prompt[slot, prompt] = True
        generated = torch.tensor(seq.tokens[seq.num_prompt :], dtype=torch.long, device=self.device)
        self._counts[slot].index_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))

    def remove(self, seq_id: int) -> None:
        slot = self._slots.pop(seq_id, None)
        if slot is not None:
            self._free.append(slot)

    def apply(self, logits: Tensor, sequences: list[tuple[int, Sequence]]) -> None:
        rows, slots = self._index(sequences)
        params = [seq.params for _, seq in sequences]
        repetition, presence, frequency = (
            torch.tensor([getattr(p, name) for p in params], device=self.device).unsqueeze(1)
            for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
        )
        counts = self._counts[slots]
        generated = counts > 0
        x = logits[rows]
        seen = generated | self._in_prompt[slots]
        x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
        logits[rows] = x - frequency * counts - presence * generated

    def observe(self, token_ids: Tensor, sequences: list[tuple[int, Sequence]]) -> None:
        rows, slots = self._index(sequences)
        chosen = token_ids[rows].long().clamp(min=0)
        self._counts.index_put_((slots, chosen), torch.ones_like(chosen, dtype=torch.int32), accumulate=True)

    def _index(self, sequences: list[tuple[int, Sequence]]) -> tuple[Tensor, Tensor]:
        rows = torch.tensor([row for row, _ in sequences], device=self.device)
        slots = torch.tensor([self._slots[seq.seq_id] for _, seq in sequences], device=self.device)
        return rows, slots

    def _take(self) -> int:
        if not self._free:
            old = self._counts.shape[0]
            grown = max(4, 2 * old)
            self._counts = torch.cat((self._counts, self._counts.new_zeros(grown - old, self.vocab_size)))
            self._in_prompt = torch.cat((self._in_prompt, self._in_prompt.new_zeros(grown - old, self.vocab_size)))
            self._free = list(range(grown - 1, old - 1, -1))
        return self._free.pop()
