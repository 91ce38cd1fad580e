"""An executor whose step loop the test runs on its own thread, and a simple decoder for comparison."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stoker.base.config import RuntimeConfig
from stoker.base.types import FinishReason, SamplingParams, TokenLogprobs
from stoker.profiling.mailbox import SynchronousMailbox
from stoker.runtime.client import Message
from stoker.runtime.executor import Executor
from stoker.runtime.load import load_executor
from stoker.runtime.request import ErrorInfo, TokenRequest
from stoker.runtime.sampling.grammar_client import CompileProcess
from stoker.runtime.sampling.grammar_compiler import Grammars

END = 2
_ids = itertools.count()


@dataclass
class Answer:
    """The outputs of one sequence."""

    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    stop_id: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: ErrorInfo | None = None
    cached: int = 0
    num_outputs: int = 0


def request(
    prompt: list[int], *, request_id: str = "", end_ids: tuple[int, ...] = (), timeout_s: float | None = None, **params: Any
) -> TokenRequest:
    name = request_id or f"r{next(_ids)}"
    return TokenRequest(request_id=name, prompt_ids=prompt, params=SamplingParams(**params), end_ids=end_ids, timeout_s=timeout_s)


class Driven:
    """A loaded executor and its outputs so far."""

    def __init__(self, engine: Path, compiler: CompileProcess | None, device: str = "cpu", **settings: Any) -> None:
        """`compiler` compiles the grammars, so that not every executor starts a process of its own."""
        self.executor: Executor = load_executor(engine, RuntimeConfig(device=device, num_threads=1, **settings), SynchronousMailbox)
        if compiler is not None:
            self.grammars.process = compiler
        self.answers: dict[tuple[str, int], Answer] = {}

    @property
    def mailbox(self) -> SynchronousMailbox:
        assert isinstance(self.executor.mailbox, SynchronousMailbox)
        return self.executor.mailbox

    @property
    def grammars(self) -> Grammars:
        grammars = self.executor.runner.sampler.grammars  # type: ignore[attr-defined]
        assert isinstance(grammars, Grammars)
        return grammars

    @property
    def stats(self) -> Any:
        return self.executor.snapshot()

    def send(self, *messages: Message) -> None:
        self.mailbox.messages += messages

    def submit(self, *requests: TokenRequest) -> None:
        for each in requests:
            for index in range(each.params.n):
                self.answers[each.request_id, index] = Answer()
        self.mailbox.submit(list(requests))

    def turn(self) -> None:
        self.executor.turn(0.0)
        for output in self.mailbox.pop_outputs():
            answer = self.answers[output.request_id, output.index]
            assert answer.reason is None, "an output after the last"
            answer.tokens += output.token_ids
            answer.logprobs += output.logprobs
            answer.reason, answer.stop_id, answer.error = output.finish_reason, output.stop_id, output.error
            answer.prompt_logprobs = answer.prompt_logprobs or output.prompt_logprobs
            answer.cached += output.cached_tokens
            answer.num_outputs += 1

    def finish(self, limit: int = 20_000, until: Callable[[], bool] | None = None) -> None:
        """Run iterations until every sequence has ended, or `until` returns True."""
        for _ in range(limit):
            if until() if until is not None else all(answer.reason is not None for answer in self.answers.values()):
                return
            self.turn()
            if until is None:
                wait_for_a_grammar(self.executor)
        raise AssertionError("the requests do not end")

    def run(self, *requests: TokenRequest) -> list[Answer]:
        """The answers of all sequences of the requests, in order."""
        self.submit(*requests)
        self.finish()
        return [self.answers[each.request_id, index] for each in requests for index in range(each.params.n)]

    def check_idle(self) -> None:
        stats = self.stats
        assert stats.num_running == stats.num_waiting == stats.num_paused == 0
        assert stats.num_free_blocks == stats.num_blocks, "blocks leaked"
        assert not self.executor.runner.sampler._users  # type: ignore[attr-defined]


def wait_for_a_grammar(executor: Executor) -> None:
    """Wait until a grammar is compiled, if the executor has no other work."""
    futures = [future for future, *_ in executor.admission._preparing.values() if future is not None]
    if futures and not executor.scheduler.has_work:
        wait(futures, timeout=60, return_when=FIRST_COMPLETED)


def logits_of(model: Any, tokens: list[int]) -> Tensor:
    """float64 logits [T, V] of a forward pass of transformers."""
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].double()


def plain_decode(model: Any, prompt: list[int], count: int, change: Callable[[Tensor, list[int]], Tensor]) -> list[int]:
    """Greedy tokens with a full forward pass for each. `change(logits, generated)` is applied before each choice."""
    generated: list[int] = []
    for _ in range(count):
        row = logits_of(model, [*prompt, *generated])[-1]
        generated.append(int(change(row.clone(), generated).argmax()))
    return generated
