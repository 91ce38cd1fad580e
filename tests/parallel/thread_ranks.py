"""Ranks that are threads of one process on a CPU, whose steps are padded to captured shapes and planned ahead as on GPUs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from stoker.base.config import RuntimeConfig
from stoker.distributed.group import Group
from stoker.distributed.world import World
from stoker.engine.reader import Engine
from stoker.profiling.mailbox import SynchronousMailbox
from stoker.runtime.client import ExecutorInfo
from stoker.runtime.executor import Executor
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.schedule.scheduler import Scheduler
from stoker.runtime.worker.cuda_graphs import CapturedStep, Graphs, PlainStep, run_parts
from stoker.runtime.worker.inputs import BLOCK_TABLES, PackedStep, Shape, split_buffer
from stoker.runtime.worker.model_runner import ModelRunner
from stoker.runtime.worker.rank import load_rank
from stoker.runtime.worker_group.channels.channel import HEADER_SIZE
from stoker.runtime.worker_group.records import ZERO_BLOCKS, Record, decode_record, encode_capture, encode_parts, encode_step

CPU = torch.device("cpu")
ROWS, BLOCKS = 4, 8  # of the steps and the cache of these ranks


class ThreadGroup(Group):
    """A rank of a group of threads."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, slots: list[Tensor]) -> None:
        self.rank, self.size, self._barrier, self._slots = rank, size, barrier, slots

    def _all(self, x: Tensor) -> list[Tensor]:
        self._slots[self.rank] = x.clone()
        self._barrier.wait(60)
        found = list(self._slots)
        self._barrier.wait(60)
        assert len({(tensor.shape, tensor.dtype) for tensor in found}) == 1, "ranks have different shapes"
        return found

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._all(x)).sum(0)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._all(x), dim=-1)

    def gather_rows(self, x: Tensor) -> Tensor:
        return torch.cat(self._all(x))

    def reduce_scatter_rows(self, x: Tensor) -> Tensor:
        return self.all_reduce(x).chunk(self.size)[self.rank]

    def broadcast(self, x: Tensor) -> Tensor:
        return self._all(x)[0]


class CalledSteps(Graphs):
    """Runs the function that would be captured, on the static buffers, and records the shapes."""

    def __init__(self, runner: ModelRunner, max_drafts: int) -> None:
        sizes = {"max_rows": ROWS, "max_seq_len": runner.max_seq_len, "max_tokens": 64, "max_drafts": max_drafts}
        super().__init__(runner._forward, runner._launch_all, runner.inputs, **sizes, device=CPU)
        self.replayed: list[Shape] = []

    def is_captured(self, shape: Shape) -> bool:
        return True

    def run(self, packed: PackedStep, all_greedy: bool, num_wanted: int | None = None) -> PlainStep:
        self.replayed.append(packed.shape)
        tables = self._tables[: packed.shape.rows]
        self.inputs.send(packed, self._static, tables)
        views = split_buffer(self._static, packed.sizes)
        inputs = self.inputs.step_inputs(packed, [*views[:BLOCK_TABLES], tables.view(-1), *views[BLOCK_TABLES + 1 :]])
        parts = self.forward(inputs, packed.shape.max_drafts, all_greedy)
        return run_parts(iter(()), next(parts), num_wanted)


class CapturedSteps(CalledSteps):
    """Captures as on a GPU: first the step is launched, and then both graphs are captured, here by running what they would contain."""

    def __init__(self, runner: ModelRunner, max_drafts: int) -> None:
        super().__init__(runner, max_drafts)
        self.parts: list[object] = []

    def is_captured(self, shape: Shape) -> bool:
        return (shape, True) in self._captured and (shape, False) in self._captured

    def run(self, packed: PackedStep, all_greedy: bool, num_wanted: int | None = None) -> PlainStep:
        assert self.is_captured(packed.shape), "a rank replays a shape before its capture"
        self.parts.append(("replayed", packed.shape))
        return super().run(packed, all_greedy, num_wanted)

    def advance(self, shape: Shape) -> bool:
        self.parts.append(shape)
        step = self._dummy_step(shape)
        if shape not in self._launched:
            self._launched.add(shape)
            self.launch(step, shape.max_drafts)
            return False
        all_greedy = (shape, True) not in self._captured
        self._captured[shape, all_greedy] = CapturedStep([], next(self.forward(step, shape.max_drafts, all_greedy)))
        if self.is_captured(shape):
            self._pending.pop(shape, None)
        return self.is_captured(shape)


class Followers:
    """The followers, one thread each, to which records are sent as the plan channel does."""

    def __init__(self, runners: list[ModelRunner]) -> None:
        self.queues: list[queue.SimpleQueue[Tensor | None]] = [queue.SimpleQueue() for _ in runners]
        self.errors: list[BaseException] = []
        self.threads = [threading.Thread(target=self._follow, args=pair) for pair in zip(runners, self.queues, strict=True)]
        for thread in self.threads:
            thread.start()

    def publish_step(self, packed: list[PackedStep], all_greedy: bool) -> None:
        if len(packed) > 1:
            self._publish(*encode_parts(packed, all_greedy))
        else:
            self._publish(encode_step(packed[0], all_greedy), packed[0].host)

    def publish_zero_blocks(self, blocks: list[int]) -> None:
        self._publish((ZERO_BLOCKS, len(blocks)), torch.tensor(blocks, dtype=torch.int32).numpy())

    def publish_capture(self, shape: Shape) -> None:
        self._publish(encode_capture(shape), torch.zeros(0, dtype=torch.int32))

    def _publish(self, header: tuple[int, ...], numbers: object) -> None:
        record = torch.zeros(HEADER_SIZE, dtype=torch.int32)
        record[: len(header)] = torch.tensor(header, dtype=torch.int32)
        for one in self.queues:
            one.put(torch.cat((record, torch.as_tensor(numbers))))

    def _follow(self, runner: ModelRunner, records: queue.SimpleQueue[Tensor | None]) -> None:
        try:
            while (numbers := records.get()) is not None:
                record: Record = decode_record(numbers.numpy(), runner.inputs.buffer, runner.world.rank)
                if record.kind == ZERO_BLOCKS:
                    runner.zero_blocks(record.blocks)
                elif record.shape is not None:
                    runner.capture(record.shape)
                else:
                    assert record.packed is not None
                    runner.follow(record.packed, record.all_greedy)
        except BaseException as error:
            self.errors.append(error)

    def close(self) -> None:
        for one in self.queues:
            one.put(None)
        for thread in self.threads:
            thread.join(60)
        assert not self.errors, self.errors[0]


def as_on_a_gpu(runner: ModelRunner, *, graphs: type[CalledSteps] | None, max_drafts: int) -> ModelRunner:
    """Resolve and broadcast ids, and run captured shapes."""
    runner._broadcasts_ids = True
    runner.graphs = graphs(runner, max_drafts) if graphs is not None else None
    return runner


def groups_of_threads(size: int) -> list[ThreadGroup]:
    """The group of each of `size` ranks."""
    barrier, slots = threading.Barrier(size), [torch.empty(0)] * size
    return [ThreadGroup(rank, size, barrier, slots) for rank in range(size)]


def executor_of_threads(
    engine: Engine, worlds: list[World], scheduler_of: Callable[[dict[str, int]], Scheduler], *,
    graphs: type[CalledSteps] | None, max_drafts: int = 0,
) -> tuple[Executor, Followers, list[ModelRunner]]:  # fmt: skip
    """The executor of the first rank, whose steps overlap, its followers, and the runners of all ranks.

    `scheduler_of` makes the scheduler, from the sizes of the cache and of steps. `max_drafts`: the largest number of drafts of a row.
    """
    config = RuntimeConfig(num_threads=1)
    loaded = [load_rank(engine, config, CPU, world) for world in worlds]
    runners = [as_on_a_gpu(one.runner(BLOCKS), graphs=graphs, max_drafts=max_drafts) for one in loaded[1:]]
    followers = Followers(runners)
    leader = as_on_a_gpu(loaded[0].runner(BLOCKS, followers), graphs=graphs, max_drafts=max_drafts)
    sizes = {"num_blocks": BLOCKS, "tokens_per_block": 16, "max_batch_size": ROWS, "max_num_tokens": 64, "max_seq_len": leader.max_seq_len}
    limits = engine.config.limits
    info = ExecutorInfo(limits=limits, max_seq_len=leader.max_seq_len, vocab_size=101, device="cpu", kv_cache_tokens=1, model="m")
    executor = Executor(leader, scheduler_of(sizes), SynchronousMailbox(info), info, config)
    executor._depth = 2  # steps overlap
    return executor, followers, [leader, *runners]


def count_unknown_ids(executor: Executor) -> Callable[[], int]:
    """Returns a function that returns the number of rows whose newest id the host did not have at the launch."""
    launch, count = executor.runner.launch, 0

    def counted(plan: StepPlan) -> object:
        nonlocal count
        count += sum(start >= len(seq.tokens) for seq, start in zip(plan.sequences, plan.starts, strict=True))
        return launch(plan)

    executor.runner.launch = counted  # type: ignore[assignment, method-assign]
    return lambda: count
