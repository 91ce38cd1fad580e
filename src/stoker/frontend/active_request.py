"""The state of a running request: converts outputs of the executor to deltas with text and token usage."""

from __future__ import annotations

import time

from stoker.base.errors import UnavailableError
from stoker.base.types import Delta, FinishReason, Usage
from stoker.frontend.sequence_text import SequenceText
from stoker.frontend.stopwatch import Stopwatch
from stoker.frontend.tokenizer import Tokenizer
from stoker.runtime.client import ExecutorClient
from stoker.runtime.request import SequenceOutput, TokenRequest


class ActiveRequest:
    """One request with `n` sequences.

    The first delta carries the usage of the prompt, the last one the whole usage and the timings. A sequence that ends with a stop string
    is cancelled in the executor, which does not see text.
    """

    def __init__(self, task: TokenRequest, tokenizer: Tokenizer, client: ExecutorClient, stopwatch: Stopwatch) -> None:
        params = task.params
        self.started = False
        self._task = task
        self._client = client
        self._stopwatch = stopwatch
        self._texts = [SequenceText(i, params, tokenizer.detokenizer(params.skip_special_tokens)) for i in range(params.n)]
        self._cached_tokens: int | None = None
        self._drafts: dict[int, tuple[int, int]] = {}  # by sequence: verified and accepted drafts
        self._convert = self._convert_timed if task.traced else self._push_one

    @property
    def finished(self) -> bool:
        """Whether all sequences have finished."""
        return all(text.finished for text in self._texts)

    def push(self, outputs: list[SequenceOutput]) -> list[Delta]:
        """Convert outputs to deltas, one per output. Outputs of sequences that have finished are dropped."""
        return self._with_usage([self._convert(output) for output in outputs if not self._texts[output.index].finished])

    def fail(self, error: UnavailableError) -> list[Delta]:
        """End all running sequences with `error`, because the executor has ended. Returns their last deltas."""
        deltas = []
        for text in self._texts:
            if not text.finished:
                text.finished = True
                deltas.append(Delta(text.index, finish_reason=FinishReason.ERROR, error=str(error)))
        return self._with_usage(deltas)

    def _convert_timed(self, output: SequenceOutput) -> Delta:
        """`_push_one` for a traced request: measures its time, and passes on when the prompt was computed."""
        started = time.monotonic()
        delta = self._push_one(output)
        self._stopwatch.detokenize_s += time.monotonic() - started
        delta.prefill_chunks = output.prefill_chunks
        return delta

    def _push_one(self, output: SequenceOutput) -> Delta:
        """The delta of one output. Cancels the sequence in the executor if a stop string ended it."""
        text = self._texts[output.index]
        if text.num_tokens == 0 and output.token_ids:
            self._record_cached_tokens(output.cached_tokens)
            self._stopwatch.token(output.admission)
        delta = text.push(output)
        delta.admission = output.admission
        delta.prompt_logprobs = output.prompt_logprobs
        if output.num_drafts:
            self._drafts[output.index] = (output.num_drafts, output.num_accepted)
            delta.draft_tokens, delta.accepted_draft_tokens = output.num_drafts, output.num_accepted
        if text.stopped_by_text and not self.finished:
            self._client.cancel(self._task.request_id, text.index)
        return delta

    def _record_cached_tokens(self, cached_tokens: int) -> None:
        """Remember the smallest number of cached prompt tokens of all sequences."""
        # Later sequences reuse the blocks of the first one. The reuse of earlier requests is the smallest number.
        self._cached_tokens = cached_tokens if self._cached_tokens is None else min(self._cached_tokens, cached_tokens)

    def _with_usage(self, deltas: list[Delta]) -> list[Delta]:
        """Set the usage in the first delta of the request, and usage and timings in the last one."""
        if not deltas:
            return deltas
        usage = Usage(len(self._task.prompt_ids), 0, self._cached_tokens or 0)
        if not self.started:
            deltas[0].usage = usage
        if self.finished:
            lengths = [text.num_tokens for text in self._texts]
            usage.completion_tokens = sum(lengths)
            usage.draft_tokens = sum(num_drafts for num_drafts, _ in self._drafts.values())
            usage.accepted_draft_tokens = sum(num_accepted for _, num_accepted in self._drafts.values())
            deltas[-1].usage = usage
            deltas[-1].timings = self._stopwatch.timings(lengths)
        self.started = True
        return deltas
