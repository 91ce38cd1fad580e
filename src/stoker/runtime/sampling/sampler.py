"""Logits become tokens: features first, then one draw for all rows, then log-probabilities for those who asked."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stoker.base.errors import RequestError
from stoker.kernels import ops
from stoker.kernels.types import DrawParams
from stoker.runtime.request import Sequence, TokenRequest
from stoker.runtime.sampling.bad_words import BadWords
from stoker.runtime.sampling.bias import LogitBias
from stoker.runtime.sampling.feature import Feature
from stoker.runtime.sampling.grammars import Grammars
from stoker.runtime.sampling.guide import Guides
from stoker.runtime.sampling.min_tokens import MinTokens
from stoker.runtime.sampling.penalties import Penalties


@dataclass(slots=True)
class Logprobs:
    """Log probabilities of some rows: chosen [n], best [n, k] with ids [n, k], on the device until read."""

    chosen: Tensor
    best: Tensor
    ids: Tensor


class DrawTable:
    """The draw parameters of every row of the device buffers, kept on the host and on the device."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.device = device
        self._owners = [-1] * num_rows
        places = num_rows + 1  # padding reads the last one, which stays greedy
        self.temperature = np.zeros(places, dtype=np.float32)
        self.top_k = np.zeros(places, dtype=np.int32)
        self.top_p = np.ones(places, dtype=np.float32)
        self.min_p = np.zeros(places, dtype=np.float32)
        self.seeds = np.zeros(places, dtype=np.int64)
        self._random_rows: set[int] = set()
        self._device = {name: torch.from_numpy(getattr(self, name)).to(device, copy=True) for name in self.NAMES}

    NAMES = ("temperature", "top_k", "top_p", "min_p", "seeds")

    def update(self, sequences: list[Sequence]) -> None:
        """Write the parameters of rows that changed hands."""
        stale = False
        for seq in sequences:
            if self._owners[seq.row] != seq.seq_id:
                self._write(seq)
                stale = stale or not seq.params.greedy
        if stale:
            for name in self.NAMES:  # in place: captured graphs read these tensors
                self._device[name].copy_(torch.from_numpy(getattr(self, name)))

    def _write(self, seq: Sequence) -> None:
        row, params = seq.row, seq.params
        self._owners[row] = seq.seq_id
        self.temperature[row] = 0.0
        if params.greedy:
            self._random_rows.discard(row)
            return
        self._random_rows.add(row)
        self.temperature[row] = params.temperature
        self.top_k[row] = min(params.top_k, 2**31 - 1)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seeds[row] = seq.seed

    def all_greedy(self, sequences: list[Sequence]) -> bool:
        return not self._random_rows or all(seq.params.greedy for seq in sequences)

    def gather(self, rows: Tensor, counters: Tensor, all_greedy: bool) -> DrawParams:
        """The parameters of the rows that sample now."""
        picked = dict(self._device) if all_greedy else {name: tensor.index_select(0, rows) for name, tensor in self._device.items()}
        return DrawParams(**picked, counters=counters, all_greedy=all_greedy)


class Sampler:
    """Chooses the tokens of one step after another."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device, grammars: Grammars | None = None) -> None:
        self.table = DrawTable(num_rows, device)
        self.grammars = grammars
        # Guides come before MinTokens: a grammar that can only end lifts the minimum.
        self.features: list[Feature] = [
            Guides(vocab_size), LogitBias(device), Penalties(vocab_size, device), MinTokens(device), BadWords()
        ]  # fmt: skip
        self._users: dict[int, list[Feature]] = {}  # seq_id → its features

    def prepare(self, request: TokenRequest) -> Future[Any] | None:
        """The compilation of a guide; it must be done before the request's sequences are added."""
        if request.params.guide is None:
            return None
        if self.grammars is None:
            raise RequestError("guide.kind", request.params.guide.kind, "this executor has no vocabulary to guide")
        return self.grammars.prepare(request)

    def add(self, seq: Sequence) -> None:
        """A sequence begins."""
        wanted = [feature for feature in self.features if feature.wants(seq.params)]
        if wanted:
            self._users[seq.seq_id] = wanted
            for feature in wanted:
                feature.add(seq)

    def remove(self, seq_id: int) -> None:
        """A sequence ended."""
        for feature in self._users.pop(seq_id, ()):
            feature.remove(seq_id)

    def is_plain(self, sequences: list[Sequence]) -> bool:
        """Whether nothing but the draw parameters is asked for, so that a captured step serves."""
        return not any(s.seq_id in self._users or s.params.logprobs is not None or s.params.prompt_logprobs is not None for s in sequences)

    def sample(self, logits: Tensor, rows: Tensor, counters: Tensor, sequences: list[Sequence]) -> tuple[Tensor, Logprobs | None]:
        """Token ids int32 [L] of logits [L, V]; -1 where the logits are not numbers. Log-probabilities are of the unchanged logits."""
        plain = logits
        users = self._step_users(sequences)
        if users:
            logits = logits.float() if logits.dtype != torch.float32 else logits.clone()
            for feature, pairs in users.items():
                feature.apply(logits, pairs)
        token_ids = ops.sample(logits, self.table.gather(rows, counters, self.table.all_greedy(sequences)))
        for feature, pairs in users.items():
            feature.observe(token_ids, pairs)
        wanted = [seq.params.logprobs for seq in sequences if seq.params.logprobs is not None]
        return token_ids, score(plain, token_ids, max(wanted)) if wanted else None

    def _step_users(self, sequences: list[Sequence]) -> dict[Feature, list[tuple[int, Sequence]]]:
        if not self._users:
            return {}
        users: dict[Feature, list[tuple[int, Sequence]]] = {}
        for i, seq in enumerate(sequences):
            for feature in self._users.get(seq.seq_id, ()):
                users.setdefault(feature, []).append((i, seq))
        return users


def score(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    """Log-probabilities of `token_ids` [L] and of the best `num_top` under logits [L, V]."""
    return Logprobs(*ops.logprobs(logits, token_ids.clamp(min=0), min(num_top, logits.shape[1])))
