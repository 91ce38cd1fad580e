"""An executor loop that generates scripted tokens. It uses a Mailbox like the real executor."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from stoker.base.config import Limits
from stoker.base.types import AdmissionRecord, FinishReason, SamplingParams, TokenLogprobs
from stoker.runtime.client import Cancel, ExecutorInfo, Mailbox, Pause, Shutdown, StatsQuery, Submit
from stoker.runtime.request import ErrorInfo, ExecutorStats, SequenceOutput, TokenRequest

Script = Callable[[TokenRequest, int], list[int] | ErrorInfo]


def info(vocab_size: int = 1000, **limits: int) -> ExecutorInfo:
    checked = Limits(**{"max_input_len": 64, "max_output_len": 64, "max_beam_width": 4, **limits})
    return ExecutorInfo(
        limits=checked, max_seq_len=checked.max_seq_len, vocab_size=vocab_size, device="cpu", kv_cache_tokens=4096, model="Scripted"
    )


class Running:
    """A running sequence; `done` tokens are committed."""

    def __init__(self, request: TokenRequest, index: int, ids: list[int]) -> None:
        self.request, self.index, self.ids, self.done = request, index, ids, 0

    def step(self, group: int) -> SequenceOutput:
        params: SamplingParams = self.request.params
        first = self.done == 0
        room = params.max_tokens - self.done
        new: list[int] = []
        stop_id = None
        for token in self.ids[self.done : self.done + min(group, room)]:
            new.append(token)
            if (token in self.request.end_ids or token in params.stop_token_ids) and self.done + len(new) > params.min_tokens:
                stop_id = token
                break
        self.done += len(new)
        ended = self.done >= params.max_tokens or self.done >= len(self.ids)
        reason = FinishReason.STOP if stop_id is not None else FinishReason.LENGTH if ended else None
        return SequenceOutput(
            self.request.request_id,
            self.index,
            new,
            reason,
            stop_id,
            [TokenLogprobs(token, -0.5) for token in new] if params.logprobs is not None else [],
            cached_tokens=len(self.request.prompt_ids) // 2 if first else 0,
            prompt_logprobs=[None] if first and params.prompt_logprobs is not None else None,
            admission=AdmissionRecord(0.25, 0, 1, 1) if first else None,
        )


class FakeExecutor:
    """Runs in a thread. `script(request, index)` returns the ids of a sequence or an error; a step commits `group` tokens of each."""

    def __init__(self, mailbox: Mailbox, script: Script, *, group: int = 1, step_s: float = 0.0) -> None:
        self.mailbox, self.script, self.group, self.step_s = mailbox, script, group, step_s
        self.requests: list[TokenRequest] = []
        self.cancelled: list[tuple[str, int | None]] = []
        self.paused = False
        self.running: list[Running] = []
        self.steps = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(10)
        assert not self._thread.is_alive()
        self.mailbox.close()

    def _loop(self) -> None:
        while not self._stop.is_set():
            outputs: list[SequenceOutput] = []
            for message in self.mailbox.poll(0.0 if self.running else 0.02):
                outputs += self._handle(message)
            outputs += [row.step(self.group) for row in self.running]
            ended = {(o.request_id, o.index) for o in outputs if o.finish_reason is not None}
            self.running = [row for row in self.running if (row.request.request_id, row.index) not in ended]
            if outputs:
                self.steps += 1
                self.mailbox.send(outputs)
                if self.step_s:
                    time.sleep(self.step_s)

    def _handle(self, message: object) -> list[SequenceOutput]:
        match message:
            case Submit(request):
                return self._start(request)
            case Cancel(request_id, index):
                self.cancelled.append((request_id, index))
                cancelled = [r for r in self.running if r.request.request_id == request_id and index in (None, r.index)]
                self.running = [r for r in self.running if r not in cancelled]
                return [SequenceOutput(request_id, r.index, [], FinishReason.CANCELLED) for r in cancelled]
            case StatsQuery():
                self.mailbox.reply_stats(message, ExecutorStats(num_running=len(self.running), num_steps=self.steps))
            case Pause(paused):
                self.paused = paused
            case Shutdown():
                self._stop.set()
        return []

    def _start(self, request: TokenRequest) -> list[SequenceOutput]:
        self.requests.append(request)
        failed = []
        for index in range(request.params.n):
            ids = self.script(request, index)
            if isinstance(ids, ErrorInfo):
                failed.append(SequenceOutput(request.request_id, index, [], FinishReason.ERROR, error=ids))
            else:
                self.running.append(Running(request, index, ids))
        return failed
