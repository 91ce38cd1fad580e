"""Measures the Python time of the executor per step, with a model that takes no time: plan, inputs, commit and outputs.

    PYTHONPATH=src python benchmarks/executor_overhead.py [--followers 7 | --events]

With followers, each step is also published to that number of followers, and the work of a follower, from the record to the tensors of
its step, is timed separately. With --events, the executor publishes block events to a subscriber in another process, and prompts of 512
tokens arrive all the time, so that steps store blocks; each row is also measured without events.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

import torch

from stoker.base.config import Limits, RuntimeConfig
from stoker.base.process import freeze_objects
from stoker.cli.benchmark.results import provenance
from stoker.profiling.batch_run import random_requests
from stoker.profiling.mailbox import SynchronousMailbox
from stoker.runtime.client import ExecutorInfo
from stoker.runtime.executor import Executor
from stoker.runtime.kv.events.log import BlockEventLog
from stoker.runtime.kv.events.publisher import EventPublisher
from stoker.runtime.request import Sequence, TokenRequest
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.schedule.scheduler import Scheduler
from stoker.runtime.worker.inputs import InputBuilder, PackedStep
from stoker.runtime.worker.step_handle import StepHandle
from stoker.runtime.worker_group.channels.shared_memory import SharedMemoryChannel, SharedMemoryReader
from stoker.runtime.worker_group.records import decode_record, encode_step, max_step_size


class StubRunner:
    """Builds the inputs of each step, publishes it, and returns token 7."""

    capture_is_due = False

    def __init__(self, num_rows: int, max_blocks: int, block_size: int, max_tokens: int, followers: int) -> None:
        self.inputs, self.follower_inputs = (InputBuilder(num_rows, max_blocks, block_size, torch.device("cpu")) for _ in range(2))
        self.channel = SharedMemoryChannel(followers, max_step_size(max_tokens, num_rows, max_blocks)) if followers else None
        self.readers = [SharedMemoryReader(self.channel.address, i) for i in range(followers)] if self.channel is not None else []
        self.publish_s = self.follow_s = self.others_s = 0.0  # of the last step: the leader's, a follower's, all followers'

    def prepare(self, request: TokenRequest) -> None: ...
    def add(self, seq: Sequence) -> None: ...
    def remove(self, seq: Sequence) -> None: ...
    def zero_blocks(self, blocks: list[int]) -> None: ...
    def close(self) -> None: ...

    def capture_next(self) -> bool:
        return False

    def launch(self, plan: StepPlan) -> StepHandle:
        packed = self.inputs.pack(plan)
        if self.channel is not None:
            self.publish(self.channel, packed)
        self.inputs.unpack(packed)
        return StepHandle(packed.sampled, torch.full((len(packed.sampled),), 7, dtype=torch.int32))

    def publish(self, channel: SharedMemoryChannel, packed: PackedStep) -> None:
        """Publish the step, and do the work of one follower. The other readers only release the record."""
        started = time.thread_time()
        channel.publish(encode_step(packed, True), packed.host.numpy(), lambda: None)
        published = time.thread_time()
        record = decode_record(self.readers[0].receive(0.0), self.follower_inputs.buffer)
        assert record.packed is not None
        self.follower_inputs.unpack(record.packed)
        self.readers[0].release()
        self.publish_s, self.follow_s = published - started, time.thread_time() - published
        for reader in self.readers[1:]:
            reader.release()
        self.others_s = time.thread_time() - published


def make_executor(runner: StubRunner, rows: int, info: ExecutorInfo, blocks: int, events: EventPublisher | None = None) -> Executor:
    scheduler = Scheduler(
        num_blocks=blocks,
        tokens_per_block=64,
        max_batch_size=rows,
        max_num_tokens=1 << 16,
        max_seq_len=1024,
        event_log=BlockEventLog() if events is not None else None,
    )
    config = RuntimeConfig(max_queue_size=1 << 16)
    return Executor(runner, scheduler, SynchronousMailbox(info), info, config, events=events)


SUBSCRIBER = """
import sys, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.connect(sys.argv[1])
socket.subscribe(b"")
while True:
    socket.recv_multipart()
"""


def measure_events(rows: int, steps: int = 400) -> dict[str, float]:
    """The median time of a step with and without events, for requests of 512 prompt tokens and 32 new ones that follow one another."""
    limits = Limits(max_batch_size=rows, max_input_len=512, max_output_len=512, max_num_tokens=1 << 16)
    blocks = rows * 16
    info = ExecutorInfo(limits=limits, max_seq_len=1024, vocab_size=1000, device="cpu", kv_cache_tokens=blocks * 64, model="stub")
    publisher = EventPublisher("tcp://127.0.0.1:*", None, "", 64)
    subscriber = subprocess.Popen([sys.executable, "-c", SUBSCRIBER, publisher.address.endpoint])
    executors = {
        with_events: make_executor(StubRunner(rows, 16, 64, 1 << 16, 0), rows, info, blocks, publisher if with_events else None)
        for with_events in (False, True)
    }
    cpu: dict[bool, list[float]] = {False: [], True: []}
    wall: dict[bool, list[float]] = {False: [], True: []}
    for step in range(steps):
        for with_events, executor in executors.items():  # alternately, so that other processes disturb both equally
            mailbox = executor.mailbox
            assert isinstance(mailbox, SynchronousMailbox)
            mailbox.submit(random_requests(max(1, rows // 32), 512, 32, 1000))
            for message in mailbox.messages:
                message.request.request_id = f"{step}/{message.request.request_id}"
            time.sleep(0.002)  # the device computes
            started, started_cpu = time.perf_counter(), time.thread_time()
            executor.turn(0.0)
            cpu[with_events].append(time.thread_time() - started_cpu)
            wall[with_events].append(time.perf_counter() - started)
            mailbox.pop_outputs()
    subscriber.kill()
    subscriber.wait()
    executors[True].close()
    row: dict[str, float] = {"rows": rows, "prompts_per_step": max(1, rows // 32)}
    for name, times in (("cpu", cpu), ("wall", wall)):
        row |= {
            f"{name}_median_ms": statistics.median(times[False]) * 1e3,
            f"{name}_median_with_events_ms": statistics.median(times[True]) * 1e3,
        }
    return row


def measure(rows: int, followers: int = 0, steps: int = 300, input_len: int = 200) -> dict[str, float]:
    limits = Limits(max_batch_size=rows, max_input_len=512, max_output_len=512, max_num_tokens=1 << 16)
    blocks = rows * 16
    info = ExecutorInfo(limits=limits, max_seq_len=1024, vocab_size=1000, device="cpu", kv_cache_tokens=blocks * 64, model="stub")
    runner = StubRunner(rows, 16, 64, 1 << 16, followers)
    executor = make_executor(runner, rows, info, blocks)
    mailbox = executor.mailbox
    assert isinstance(mailbox, SynchronousMailbox)
    mailbox.submit(random_requests(rows, input_len, steps + 20, 1000))
    for _ in range(10):
        executor.turn(0.0)
        mailbox.pop_outputs()
    times, published, followed = [], [], []
    for _ in range(steps):
        started = time.thread_time()  # CPU time of this thread, without other processes
        executor.turn(0.0)
        times.append(time.thread_time() - started - runner.others_s)
        published.append(runner.publish_s)
        followed.append(runner.follow_s)
        mailbox.pop_outputs()
    times.sort()
    row = {"rows": rows, "median_ms": statistics.median(times) * 1e3, "p95_ms": times[int(0.95 * steps)] * 1e3, "max_ms": times[-1] * 1e3}
    if followers:
        row |= {"followers": followers, "publish_us": statistics.median(published) * 1e6, "follow_us": statistics.median(followed) * 1e6}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--followers", type=int, default=0, help="number of other ranks: 7 for eight ranks")
    parser.add_argument("--events", action="store_true", help="publish block events")
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    freeze_objects()  # as the executor of a server does
    results = []
    for rows in (1, 16, 64, 256, 1024):
        if args.events:
            results.append(row := measure_events(rows))
            print("  ".join(f"{name} {value:.3f}" for name, value in row.items()))
            continue
        row = measure(rows, args.followers)
        if args.followers:
            row["alone_median_ms"] = measure(rows)["median_ms"]
        results.append(row)
        ranks = f", of which {row['publish_us']:.0f} µs to publish; a follower {row['follow_us']:.0f} µs" if args.followers else ""
        print(f"{row['rows']:5} rows: {row['median_ms']:.3f} ms per step (p95 {row['p95_ms']:.3f}, at most {row['max_ms']:.3f}){ranks}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({**provenance(), "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
