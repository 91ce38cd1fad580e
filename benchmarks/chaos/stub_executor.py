"""An executor without a model behind the real transport, for the full load of the frontends: one token per step for every sequence.

The tokens depend on the prompt and the position only, so that each request has one right answer. `serve.py --stub` starts it.
"""

from __future__ import annotations

import signal
import sys
import zlib
from pathlib import Path

from stoker.base.types import FinishReason
from stoker.cli.prepare_server import engine_info
from stoker.runtime.client import Cancel, ExecutorInfo, Shutdown, StatsQuery, Submit
from stoker.runtime.request import ExecutorStats, SequenceOutput, TokenRequest
from stoker.server.processes.child import EXECUTOR_STOP_SIGNAL, end_with_parent, receive_task
from stoker.server.processes.executor import StoppableMailbox

FIRST, NUM_TOKENS = 3, 300  # ids that stand for text in the vocabulary of the engine
POLL_S = 0.1
STEP_S = 0.001  # a step is not shorter, so that tokens are sent one by one


class StubExecutor:
    """The sequences that run, and their next tokens."""

    def __init__(self, mailbox: StoppableMailbox, limit: int) -> None:
        self._mailbox = mailbox
        self._limit = limit  # new tokens of a request
        self._running: dict[str, tuple[int, int, int]] = {}  # seed of the tokens, tokens so far, tokens in all

    def run(self) -> None:
        """Run until the mailbox delivers Shutdown."""
        while True:
            for message in self._mailbox.poll(STEP_S if self._running else POLL_S):
                match message:
                    case Submit(request):
                        self._running[request.request_id] = (self._seed(request), 0, min(request.params.max_tokens, self._limit))
                    case Cancel(request_id):
                        self._running.pop(request_id, None)
                    case StatsQuery():
                        self._mailbox.reply_stats(message, ExecutorStats(num_running=len(self._running)))
                    case Shutdown():
                        return
            if self._running:
                self._mailbox.send(self._step())

    def _step(self) -> list[SequenceOutput]:
        """One token of each sequence."""
        outputs = []
        for request_id, (seed, done, total) in list(self._running.items()):
            token = FIRST + (seed + done * 7919) % NUM_TOKENS
            is_last = done + 1 == total
            outputs.append(SequenceOutput(request_id, 0, [token], FinishReason.LENGTH if is_last else None))
            if is_last:
                del self._running[request_id]
            else:
                self._running[request_id] = (seed, done + 1, total)
        return outputs

    @staticmethod
    def _seed(request: TokenRequest) -> int:
        return zlib.crc32(repr((request.prompt_ids, request.params.seed)).encode())


def main() -> int:
    task, report_ready = receive_task()
    end_with_parent(EXECUTOR_STOP_SIGNAL)
    limits = engine_info(Path(task.engine)).limits
    info = ExecutorInfo(
        limits=limits, max_seq_len=limits.max_seq_len, vocab_size=FIRST + NUM_TOKENS, device="cpu", kv_cache_tokens=8192, model="stub",
        step_timeout_s=task.config.step_timeout_s or 30.0,
    )  # fmt: skip
    mailbox = StoppableMailbox(task.address, info)
    signal.signal(EXECUTOR_STOP_SIGNAL, lambda number, frame: setattr(mailbox, "stopping", True))
    report_ready()
    StubExecutor(mailbox, limits.max_output_len).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
