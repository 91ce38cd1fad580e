"""The real executor with a stub of the device: row after row generates the bytes of scripted texts."""

from __future__ import annotations

import threading
import time

from stoker.base.config import Limits, RuntimeConfig
from stoker.base.types import TokenLogprobs
from stoker.runtime.client import ExecutorInfo, Mailbox
from stoker.runtime.executor import Executor
from stoker.runtime.request import Sequence, TokenRequest
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.schedule.scheduler import Scheduler
from stoker.runtime.worker.step_handle import StepResult

LIMITS = Limits(max_batch_size=8, max_input_len=512, max_output_len=512, max_num_tokens=64, tokens_per_block=16)
INFO = ExecutorInfo(
    limits=LIMITS,
    max_seq_len=LIMITS.max_seq_len,
    vocab_size=1000,
    device="cpu",
    kv_cache_tokens=4096,
    model="LlamaForCausalLM",
    memory={"total": 8 << 30, "others": 1 << 30, "weights": 3 << 30, "kv": 2 << 30, "left over": 2 << 30},
)


class StubRunner:
    """Sequence i of any request generates the ids of `answer`, and then `end_id`. A step takes `step_s` seconds."""

    capture_is_due = False

    def __init__(self, answer: list[int], end_id: int, step_s: float = 0.0) -> None:
        self.answer, self.end_id, self.step_s = answer, end_id, step_s
        self.gate = threading.Event()  # steps wait for it
        self.gate.set()

    def prepare(self, request: TokenRequest) -> None: ...
    def add(self, seq: Sequence) -> None: ...
    def remove(self, seq: Sequence) -> None: ...
    def zero_blocks(self, blocks: list[int]) -> None: ...
    def capture_next(self) -> bool:
        return False

    def close(self) -> None: ...

    def launch(self, plan: StepPlan) -> StubHandle:
        return StubHandle(self, plan)

    def token(self, seq: Sequence) -> int:
        position = len(seq.tokens) - seq.num_prompt
        return self.answer[position] if position < len(self.answer) else self.end_id


class StubHandle:
    def __init__(self, runner: StubRunner, plan: StepPlan) -> None:
        self.runner, self.plan = runner, plan

    def wait(self) -> StepResult:
        self.runner.gate.wait()
        if self.runner.step_s:
            time.sleep(self.runner.step_s)
        sampled = [seq for seq, samples in zip(self.plan.sequences, self.plan.samples, strict=True) if samples]
        ids = [self.runner.token(seq) for seq in sampled]
        scores: list[list[TokenLogprobs] | None] = []
        for seq, token in zip(sampled, ids, strict=True):
            top = seq.params.logprobs
            alternatives = [(token, -0.25), (11, -1.75), (12, -3.0)][:top] if top else []
            scores.append(None if top is None else [TokenLogprobs(token, -0.25, alternatives)])
        return StepResult(sampled, [[token] for token in ids], scores)


def stub_executor(mailbox: Mailbox, runner: StubRunner, num_blocks: int = 256) -> Executor:
    scheduler = Scheduler(
        num_blocks=num_blocks, tokens_per_block=16, max_batch_size=8, max_num_tokens=64, max_seq_len=LIMITS.max_seq_len
    )  # fmt: skip
    return Executor(runner, scheduler, mailbox, INFO, RuntimeConfig(device="cpu"))
