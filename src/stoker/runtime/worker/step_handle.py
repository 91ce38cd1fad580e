"""The results of a step, and the handles to wait for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stoker.base.types import TokenLogprobs
from stoker.runtime.request import Sequence
from stoker.runtime.sampling.logprobs import Logprobs
from stoker.runtime.sampling.prompt_logprobs import PromptLogprobs
from stoker.runtime.sampling.verification import Verified, yielded_ids
from stoker.runtime.staging import copy_to_host


@dataclass(slots=True)
class StepResult:
    """The results of a finished step for the rows that sampled."""

    sequences: list[Sequence]
    token_ids: list[list[int]]  # ids that each row yielded; the last is -1 where the logits were not finite
    logprobs: list[list[TokenLogprobs] | None]  # of each row's ids, or None; empty when no row requests them
    drafts: list[list[int]] = field(default_factory=list)  # that follow each row's ids; empty without a drafter
    prompt_logprobs: PromptLogprobs = field(default_factory=dict)  # of rows that sampled for the first time


class StepHandle:
    """A launched step. `wait` blocks until its tokens are on the host."""

    __slots__ = ("_drafts", "_event", "_is_yielded", "_num_rows", "_prompt", "_scores", "_sequences", "_token_ids", "_yielded")

    def __init__(
        self,
        sequences: list[Sequence],
        token_ids: Tensor,
        scores: Logprobs | None = None,
        prompt: Callable[[], PromptLogprobs] = dict,
        verified: Verified | None = None,
        num_rows: Seq[int] = (),
        drafts: Tensor | None = None,
    ) -> None:
        """`token_ids` and `scores` have an entry per row of logits. `prompt` returns the log-probabilities of prompts, after the step.

        With `verified`, `num_rows` is the number of rows of logits of each sequence; otherwise each has one. `drafts` int32 [D, S] follow
        the ids of each sequence.
        """
        self._sequences = sequences
        self._token_ids = copy_to_host(token_ids) if verified is None or scores is not None else None
        self._yielded = copy_to_host(verified.yielded[: len(sequences)]) if verified is not None else None
        self._num_rows = num_rows
        self._is_yielded = copy_to_host(verified.is_yielded) if verified is not None and scores is not None else None
        self._scores = scores.to_host() if scores is not None else None
        self._prompt = prompt
        self._drafts = copy_to_host(drafts[:, : len(sequences)]) if drafts is not None else None
        self._event: torch.cuda.Event | None = None
        if token_ids.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> StepResult:
        """Block until the step has ended, and return its results."""
        if self._event is not None:
            self._event.synchronize()
        token_ids = self._ids()
        drafts = self._drafts.t().tolist() if self._drafts is not None else []
        return StepResult(self._sequences, token_ids, self._logprobs(token_ids), drafts, self._prompt())

    def _ids(self) -> list[list[int]]:
        """The ids that each sequence yielded."""
        if self._yielded is not None:
            return yielded_ids(self._yielded)
        assert self._token_ids is not None
        return [[token] for token in self._token_ids.tolist()]

    def _logprobs(self, token_ids: list[list[int]]) -> list[list[TokenLogprobs] | None]:
        """The log-probabilities of the ids that each sequence yielded."""
        if self._scores is None or self._token_ids is None:
            return []
        num_rows = self._num_rows or [1] * len(token_ids)
        num_tops = [seq.params.logprobs for seq, count in zip(self._sequences, num_rows, strict=True) for _ in range(count)]
        scores = self._scores.to_list(self._token_ids.tolist(), num_tops)
        is_yielded = [True] * len(scores) if self._is_yielded is None else self._is_yielded.tolist()
        rows = iter(zip(scores, is_yielded, strict=True))
        return [
            [score for score, is_yielded in itertools.islice(rows, count) if is_yielded and score is not None] or None for count in num_rows
        ]


class LazyHandle:
    """A step that runs when `wait` is called."""

    __slots__ = ("_start",)

    def __init__(self, start: Callable[[], StepHandle]) -> None:
        self._start = start

    @torch.inference_mode()
    def wait(self) -> StepResult:
        """Run the step now, and return its results."""
        return self._start().wait()
