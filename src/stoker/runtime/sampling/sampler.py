"""Samples tokens from logits: features change logits, one kernel samples for all rows, then log-probabilities are computed."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stoker.base.errors import RequestError
from stoker.kernels import ops
from stoker.kernels.types import DrawParams
from stoker.runtime.request import Sequence, TokenRequest
from stoker.runtime.sampling.allowed_tokens import AllowedTokens
from stoker.runtime.sampling.bad_words import BadWords
from stoker.runtime.sampling.draft_probabilities import DraftLogits, supplied_logits, uses_draft_logits
from stoker.runtime.sampling.feature import Feature, SampledRow
from stoker.runtime.sampling.grammar_compiler import Grammars
from stoker.runtime.sampling.guided_decoding import Guides
from stoker.runtime.sampling.logit_bias import LogitBias
from stoker.runtime.sampling.logprobs import Logprobs, score
from stoker.runtime.sampling.min_tokens import MinTokens
from stoker.runtime.sampling.penalties import Penalties
from stoker.runtime.sampling.prompt_logprobs import PromptChunk
from stoker.runtime.sampling.verification import StepDrafts, Verified, node_paths, verify
from stoker.runtime.staging import StagingBuffers, padded


@dataclass(frozen=True, slots=True)
class Sampled:
    """The results of a step, on the device."""

    token_ids: Tensor  # int32 [L]; -1 if no token can be sampled
    logprobs: Logprobs | None  # of the unchanged logits; None if no row requests them
    prompt: list[tuple[PromptChunk, Logprobs]]
    verified: Verified | None  # None if the step has no drafts

    @property
    def newest(self) -> Tensor:
        """The newest token of each sequence, int32 [S]."""
        return self.token_ids if self.verified is None else self.verified.newest


class DraftedRows(NamedTuple):
    """The drafts of the S sequences of a step: their ids, -1 where only the device knows them, their parents (see `StepPlan.parents`),
    and the tensors of the step."""

    ids: list[Seq[int]]
    parents: list[Seq[int]]
    tensors: StepDrafts


class DrawTable:
    """The sampling parameters (temperature, top_k …) of every row of the device buffers, on the host and on the device.

    Changes are copied asynchronously, with one copy that is queued after the steps in flight.
    """

    def __init__(self, num_rows: int, device: torch.device, num_in_flight: int = 2) -> None:
        self._owners = [-1] * num_rows
        self._random_rows: set[int] = set()
        length = num_rows + 1  # padding reads the last element, which is always greedy
        size = sum(padded(length * np.dtype(dtype).itemsize) for dtype in self.TYPES.values())
        self._host = np.zeros(size, dtype=np.uint8)
        self._flat = torch.zeros(size, dtype=torch.uint8, device=device)
        self._device: dict[str, Tensor] = {}
        self._arrays: dict[str, np.ndarray] = {}
        at = 0
        for name, dtype in self.TYPES.items():
            end = at + length * np.dtype(dtype).itemsize
            self._arrays[name] = self._host[at:end].view(dtype)
            self._device[name] = self._flat[at:end].view(torch.from_numpy(self._arrays[name]).dtype)
            at += padded(end - at)
        self.temperature, self.top_k, self.top_p, self.min_p, self.seeds = self._arrays.values()
        self.top_p[:] = 1.0
        self._buffers = StagingBuffers(device, num_in_flight)
        self._copy()

    TYPES = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32, "seeds": np.int64}

    def update(self, sequences: list[Sequence]) -> None:
        """Write the parameters of each of `sequences` whose row belonged to another sequence before, and start to copy the table."""
        stale = False
        for seq in sequences:
            if self._owners[seq.row] != seq.seq_id:
                stale = stale or not seq.params.greedy or seq.row in self._random_rows
                self._write(seq)
        if stale:
            self._copy()

    def _copy(self) -> None:
        """Start to copy the table to the device, in place, because captured graphs read these tensors."""
        host = self._buffers.next_buffer(len(self._host))
        host.numpy()[:] = self._host
        self._flat.copy_(host, non_blocking=True)

    def _write(self, seq: Sequence) -> None:
        """Write the parameters of one sequence to its row on the host."""
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
        """Whether no sequence draws at random."""
        return not self._random_rows or all(seq.params.greedy for seq in sequences)

    def gather(self, rows: Tensor, counters: Tensor, all_greedy: bool) -> DrawParams:
        """The parameters of `rows` [L], which sample in this step. `counters` [L] count each row's random draws."""
        picked = dict(self._device) if all_greedy else {name: tensor.index_select(0, rows) for name, tensor in self._device.items()}
        return DrawParams(**picked, counters=counters, all_greedy=all_greedy)


class Sampler:
    """Samples the tokens of steps, with all features."""

    def __init__(
        self, num_rows: int, vocab_size: int, device: torch.device, grammars: Grammars | None = None, num_in_flight: int = 2
    ) -> None:
        self.table = DrawTable(num_rows, device, num_in_flight)
        self.grammars = grammars
        # Guides come before MinTokens, because a grammar that allows only an end id removes the minimum.
        self.features: list[Feature] = [
            Guides(vocab_size), AllowedTokens(vocab_size), LogitBias(vocab_size), Penalties(vocab_size, device), MinTokens(vocab_size),
            BadWords(vocab_size),
        ]  # fmt: skip
        self._buffers = StagingBuffers(device, num_in_flight)
        self._users: dict[int, list[Feature]] = {}  # seq_id → its features

    def prepare(self, request: TokenRequest) -> Future[Any] | None:
        """Start to compile the guide of the request, which must be complete before its sequences are added. None without a guide.

        Raises RequestError if the executor has no tokenizer.
        """
        if request.params.guide is None:
            return None
        if self.grammars is None:
            raise RequestError("guide.kind", request.params.guide.kind, "this executor has no tokenizer")
        return self.grammars.prepare(request)

    def close(self) -> None:
        """End the compilation of grammars."""
        if self.grammars is not None:
            self.grammars.close()

    def add(self, seq: Sequence) -> None:
        """Add a sequence before its first step."""
        used = [feature for feature in self.features if feature.applies_to(seq.params)]
        if used:
            self._users[seq.seq_id] = used
            for feature in used:
                feature.add(seq)

    def remove(self, seq_id: int) -> None:
        """Remove a sequence that ended."""
        for feature in self._users.pop(seq_id, ()):
            feature.remove(seq_id)

    def is_plain(self, sequences: list[Sequence]) -> bool:
        """Whether the sequences use neither features, log-probabilities nor supplied logits, so that a captured step can be used."""
        return not any(
            s.seq_id in self._users or s.params.logprobs is not None or s.params.prompt_logprobs is not None or uses_draft_logits(s)
            for s in sequences
        )

    def draws_on_device(self, seq: Sequence) -> bool:
        """Whether the tokens of a sequence need nothing from the host: no feature that reads tokens there, and no supplied logits."""
        return not any(feature.reads_tokens for feature in self._users.get(seq.seq_id, ())) and not uses_draft_logits(seq)

    def sample(
        self,
        logits: Tensor,
        rows: Tensor,
        counters: Tensor,
        sequences: list[Sequence],
        prompt: list[PromptChunk],
        drafts: DraftedRows | None = None,
    ) -> Sampled:
        """Sample the tokens of `sequences`, from the first L rows of logits [L + P, V], and verify their drafts.

        Without drafts each sequence has one row. The P other rows give the log-probabilities of the tokens of `prompt`. All inputs are
        copied to the device with one copy.
        """
        plain = logits if len(logits) == len(rows) else logits[: len(rows)]
        users = self._features_of(sequences, drafts)
        gathered = [feature.gather(sampled_rows) for feature, sampled_rows in users.items()]
        targets = [chunk.targets for chunk in prompt]
        sent = iter(self._buffers.send([*chain.from_iterable(gathered), *targets]) if gathered or targets else ())
        inputs = {feature: list(islice(sent, len(arrays))) for feature, arrays in zip(users, gathered, strict=True)}
        draw = self.table.gather(rows, counters, self.table.all_greedy(sequences))
        supplied = supplied_logits(sequences, drafts.ids, logits.shape[1]) if drafts is not None else None
        token_ids, verified = self._sample(plain, draw, inputs, drafts.tensors if drafts is not None else None, supplied)
        num_tops = [seq.params.logprobs for seq in sequences if seq.params.logprobs is not None]
        parts = logits[len(rows) :].split([len(ids) for ids in targets]) if targets else ()
        scored = [
            (chunk, score(part, ids, chunk.seq.params.prompt_logprobs or 0)) for chunk, part, ids in zip(prompt, parts, sent, strict=True)
        ]
        return Sampled(token_ids, score(plain, token_ids, max(num_tops)) if num_tops else None, scored, verified)

    def _sample(
        self, logits: Tensor, draw: DrawParams, inputs: dict[Feature, list[Tensor]], drafts: StepDrafts | None, supplied: DraftLogits | None
    ) -> tuple[Tensor, Verified | None]:
        """Apply features to the logits [L, V], sample token ids [L], verify drafts, and report the tokens to the features."""
        if inputs:
            logits = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            before = drafts.before() if drafts is not None else logits.new_empty(len(logits), 0, dtype=torch.int32)
            inputs = {feature: [before, *tensors] if feature.reads_drafts else tensors for feature, tensors in inputs.items()}
        for feature, tensors in inputs.items():
            feature.apply(logits, *tensors)
        token_ids, verified = ops.sample(logits, draw), None
        if supplied is not None:
            token_ids = supplied.apply(token_ids, logits, draw)
        if drafts is not None:
            verified = verify(token_ids, drafts)
            if inputs:
                token_ids = torch.where(verified.is_yielded, token_ids, -1)
        for feature, tensors in inputs.items():
            feature.observe(token_ids, *tensors)
        return token_ids, verified

    def _features_of(self, sequences: list[Sequence], drafts: DraftedRows | None) -> dict[Feature, list[SampledRow]]:
        """The features that the step uses, each with its rows, in the order of `features`. `drafts`: None if no sequence has any."""
        if not self._users:
            return {}
        users: dict[Feature, list[SampledRow]] = {}
        first = 0
        for i, seq in enumerate(sequences):
            ids, parents = (drafts.ids[i], drafts.parents[i]) if drafts is not None else ((), ())
            if features := self._users.get(seq.seq_id):
                num_tokens = seq.num_tokens - 1 - len(ids)  # the tokens of this step are pending already
                paths = node_paths(ids, parents)
                rows = [SampledRow(first + j, seq, num_tokens + len(path), path) for j, path in enumerate(paths)]
                for feature in features:
                    users.setdefault(feature, []).extend(rows)
            first += 1 + len(ids)
        return {feature: users[feature] for feature in self.features if feature in users}
