"""An executor process without a model. Token i of a sequence depends on the prompt, the seed, the index of the sequence and i only.

Files in the directory of its engine control it: `hold` has the number of tokens after which sequences wait, `refuse` prevents the load,
and the load lasts as long as `loading` exists.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from stoker.base.config import Limits
from stoker.base.errors import EngineError
from stoker.base.logging import configure
from stoker.base.types import FinishReason
from stoker.runtime.client import Cancel, ExecutorInfo, Shutdown, StatsQuery, Submit
from stoker.runtime.request import ExecutorStats, SequenceOutput, TokenRequest
from stoker.server.processes import executor

INFO = ExecutorInfo(
    limits=Limits(max_input_len=256, max_output_len=256), max_seq_len=512, vocab_size=500, device="cpu", kv_cache_tokens=4096, model="Stub",
    step_timeout_s=3.0,
)  # fmt: skip


class StubSequence:
    def __init__(self, request: TokenRequest, index: int) -> None:
        seed = request.params.seed if request.params.seed is not None else random.getrandbits(32)
        self.request, self.index, self.num_tokens = request, index, 0
        self._random = random.Random(f"{request.prompt_ids} {seed} {index}")

    def next_output(self) -> SequenceOutput:
        self.num_tokens += 1
        reason = FinishReason.LENGTH if self.num_tokens == self.request.params.max_tokens else None
        return SequenceOutput(self.request.request_id, self.index, [self._random.randrange(36, 98)], reason)


class StubExecutor:
    def __init__(self, mailbox: executor.StoppableMailbox, engine: Path) -> None:
        self._mailbox, self._engine = mailbox, engine
        self._sequences: list[StubSequence] = []

    def run(self, *, capture_when_idle: bool) -> None:
        while True:
            for message in self._mailbox.poll(0.005):
                match message:
                    case Submit(request):
                        self._sequences += [StubSequence(request, index) for index in range(request.params.n)]
                    case Cancel(request_id):
                        self._sequences = [each for each in self._sequences if each.request.request_id != request_id]
                    case StatsQuery():
                        self._mailbox.reply_stats(message, ExecutorStats(num_running=len(self._sequences), max_batch_size=8))
                    case Shutdown():
                        return self._mailbox.close()
            hold = self._engine / "hold"
            limit = int(hold.read_text()) if hold.exists() else 1 << 30
            outputs = [sequence.next_output() for sequence in self._sequences if sequence.num_tokens < limit]
            self._sequences = [each for each in self._sequences if each.num_tokens < each.request.params.max_tokens]
            self._mailbox.send(outputs)


def load_stub(engine: str, config: object, listen: Any, nodes: object, **_: object) -> StubExecutor:
    if (Path(engine) / "refuse").exists():
        raise EngineError("the stub refuses to load.")
    while (Path(engine) / "loading").exists():
        time.sleep(0.005)
    return StubExecutor(listen(INFO), Path(engine))


if __name__ == "__main__":
    configure()
    load: Any = ModuleType("stoker.runtime.load")  # the actual one imports torch
    load.load_executor = load_stub
    sys.modules[load.__name__] = load
    sys.exit(executor.main())
