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
    """The draw parameters of every row of the device buffers, kept on the host and on the device.

    On a GPU they go over in one copy from pinned memory, behind the steps in flight, and nothing waits for it; a buffer is used again
    when the step that it was for has ended.
    """

    def __init__(self, num_rows: int, device: torch.device, num_in_flight: int = 2) -> None:
        self._owners = [-1] * num_rows
        self._random_rows: set[int] = set()
        places = num_rows + 1  # padding reads the last one, which stays greedy
        size = sum(_padded(places * np.dtype(dtype).itemsize) for dtype in self.TYPES.values())
        self._host = np.zeros(size, dtype=np.uint8)
        self._flat = torch.zeros(size, dtype=torch.uint8, device=device)
        self._device: dict[str, Tensor] = {}
        self._arrays: dict[str, np.ndarray] = {}
        at = 0
        for name, dtype in self.TYPES.items():
            end = at + places * np.dtype(dtype).itemsize
            self._arrays[name] = self._host[at:end].view(dtype)
            self._device[name] = self._flat[at:end].view(torch.from_numpy(self._arrays[name]).dtype)
            at += _padded(end - at)
        self.temperature, self.top_k, self.top_p, self.min_p, self.seeds = self._arrays.values()
        self.top_p[:] = 1.0
        self._ring = [
            torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(num_in_flight + 2 if device.type == "cuda" else 0)
        ]
        self._turn = 0
        self._copy()

    TYPES = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32, "seeds": np.int64}

    def update(self, sequences: list[Sequence]) -> None:
        """Write the parameters of rows that changed hands."""
        stale = False
        for seq in sequences:
            if self._owners[seq.row] != seq.seq_id:
                self._write(seq)
                stale = stale or not seq.params.greedy
        if stale:
            self._copy()

    def _copy(self) -> None:
        """In place: captured graphs read these tensors."""
        host = torch.from_numpy(self._host)
        if self._ring:
            self._turn = (self._turn + 1) % len(self._ring)
            host = self._ring[self._turn].copy_(host)
        self._flat.copy_(host, non_blocking=True)

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


def _padded(num_bytes: int) -> int:
    """To 16: kernels are compiled for aligned arguments."""
    return -(-num_bytes // 16) * 16


class Sampler:
    """Chooses the tokens of one step after another."""

    def __init__(
        self, num_rows: int, vocab_size: int, device: torch.device, grammars: Grammars | None = None, num_in_flight: int = 2
    ) -> None:
        self.table = DrawTable(num_rows, device, num_in_flight)
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
