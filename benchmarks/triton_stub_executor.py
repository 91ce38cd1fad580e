"""A stub executor behind the real transport: one token per step for every running sequence, and a step every `pace_s` seconds.

python benchmarks/triton_stub_executor.py ADDRESS PACE_S
"""

from __future__ import annotations

import sys
import time

from stoker.base.config import Limits
from stoker.base.types import FinishReason
from stoker.runtime.client import Cancel, ExecutorInfo, StatsQuery, Submit
from stoker.runtime.request import ExecutorStats, SequenceOutput
from stoker.runtime.transport.zmq_mailbox import ZmqMailbox

TOKEN = 97


def main() -> None:
    address, pace_s = sys.argv[1], float(sys.argv[2])
    limits = Limits(max_batch_size=64, max_input_len=1024, max_output_len=1 << 14)
    info = ExecutorInfo(limits=limits, max_seq_len=limits.max_seq_len, vocab_size=512, device="stub", kv_cache_tokens=1, model="stub")
    mailbox = ZmqMailbox(address, info)
    running: dict[str, int] = {}
    next_step = 0.0
    while True:
        wait_s = max(0.0, next_step - time.perf_counter()) if running else 1.0
        for message in mailbox.poll(wait_s):
            match message:
                case Submit(request):
                    running[request.request_id] = request.params.max_tokens
                case Cancel(request_id):
                    running.pop(request_id, None)
                case StatsQuery():
                    mailbox.reply_stats(message, ExecutorStats(num_running=len(running)))
        if not running or time.perf_counter() < next_step:
            continue
        next_step = time.perf_counter() + pace_s
        outputs = []
        for request_id, left in list(running.items()):
            outputs.append(SequenceOutput(request_id, 0, [TOKEN], FinishReason.LENGTH if left == 1 else None))
            running[request_id] = left - 1
            if left == 1:
                del running[request_id]
        mailbox.send(outputs)
        if not running:
            next_step = 0.0


if __name__ == "__main__":
    main()
