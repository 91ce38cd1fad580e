"""Measures an executor with requests of fixed lengths that are submitted at once, without detokenization."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

from stoker.base.errors import StokerError
from stoker.base.types import FinishReason, SamplingParams
from stoker.profiling.mailbox import SynchronousMailbox
from stoker.runtime.executor import Executor
from stoker.runtime.request import TokenRequest


@dataclass(slots=True)
class BatchRun:
    """The sizes and times of one batch of requests. Times are in seconds."""

    num_requests: int
    input_len: int
    output_len: int
    total_s: float = 0.0
    first_token_s: list[float] = field(default_factory=list)
    turns_s: list[float] = field(default_factory=list)  # per iteration of the step loop; with overlap, between the ends of two steps

    @property
    def output_tokens_per_s(self) -> float:
        """Generated tokens of all requests per second."""
        return self.num_requests * self.output_len / self.total_s


def random_requests(count: int, input_len: int, output_len: int, vocab_size: int, seed: int = 0) -> list[TokenRequest]:
    """Greedy requests with random prompts that generate `output_len` tokens each."""
    generator = random.Random(seed)
    params = SamplingParams(max_tokens=output_len, ignore_eos=True)
    return [
        TokenRequest(request_id=f"{seed}-{i}", prompt_ids=[generator.randrange(vocab_size) for _ in range(input_len)], params=params)
        for i in range(count)
    ]


def run_batch(executor: Executor, requests: list[TokenRequest], output_len: int) -> BatchRun:
    """Submit all requests and run the executor's loop on this thread until all have ended. Raises StokerError if one fails."""
    mailbox = executor.mailbox
    assert isinstance(mailbox, SynchronousMailbox)
    result = BatchRun(len(requests), len(requests[0].prompt_ids), output_len)
    unfinished = len(requests)
    seen: set[str] = set()
    started = last = time.perf_counter()
    mailbox.submit(requests)
    while unfinished:
        executor.turn(0.0)
        now = time.perf_counter()
        result.turns_s.append(now - last)
        last = now
        for output in mailbox.pop_outputs():
            if output.request_id not in seen:
                seen.add(output.request_id)
                result.first_token_s.append(now - started)
            if output.finish_reason is not None:
                unfinished -= 1
                if output.finish_reason is not FinishReason.LENGTH:
                    raise StokerError(f"request {output.request_id} ended with {output.finish_reason}: {output.error}.")
    result.total_s = time.perf_counter() - started
    return result
