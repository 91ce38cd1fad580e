"""Steps of data-parallel ranks as on GPUs: padded to captured shapes, and planned before ids are known. Ranks are threads here."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import CASES, POSITIONS
from rank_executors import generate, load
from test_data_parallel import prompts
from torch import Tensor

from stoker.base.config import Limits, Mapping, RuntimeConfig
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.distributed.group import Group
from stoker.distributed.token_dispatch import TokenDispatch
from stoker.distributed.world import World
from stoker.engine.reader import Engine
from stoker.profiling.mailbox import SynchronousMailbox
from stoker.runtime.client import ExecutorInfo
from stoker.runtime.executor import Executor
from stoker.runtime.schedule.data_parallel import DataParallelScheduler
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.schedule.scheduler import Scheduler
from stoker.runtime.worker.cuda_graphs import CapturedStep, Graphs, PlainStep, run_parts
from stoker.runtime.worker.inputs import BLOCK_TABLES, PackedStep, Shape, split_buffer
from stoker.runtime.worker.model_runner import ModelRunner
from stoker.runtime.worker.rank import load_rank
from stoker.runtime.worker_group.channels.channel import HEADER_SIZE
from stoker.runtime.worker_group.records import ZERO_BLOCKS, Record, decode_record, encode_capture, encode_parts

CPU = torch.device("cpu")
SIZE, ROWS, BLOCKS = 3, 4, 8


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

    def gather_rows(self, x: Tensor) -> Tensor:
        return torch.cat(self._all(x))

    def reduce_scatter_rows(self, x: Tensor) -> Tensor:
        return torch.stack(self._all(x)).sum(0).chunk(self.size)[self.rank]

    def broadcast(self, x: Tensor) -> Tensor:
        return self._all(x)[0]


class CalledSteps(Graphs):
    """Runs the function that would be captured, on the static buffers, and records the shapes."""

    def __init__(self, runner: ModelRunner) -> None:
        sizes = {"max_rows": ROWS, "max_seq_len": runner.max_seq_len, "max_tokens": 64, "max_drafts": 0}
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
        parts = self.forward(inputs, 0, all_greedy)
        return run_parts(iter(()), next(parts), num_wanted)


class CapturedSteps(CalledSteps):
    """Captures as on a GPU: first the step is launched, and then both graphs are captured, here by running what they would contain."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
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
            self.launch(step, 0)
            return False
        all_greedy = (shape, True) not in self._captured
        self._captured[shape, all_greedy] = CapturedStep([], next(self.forward(step, 0, all_greedy)))
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
        self._publish(*encode_parts(packed, all_greedy))

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    out = tmp_path_factory.mktemp("engines")
    CASES["DeepseekV3ForCausalLM", "yarn"]().save(out / "hf")
    limits = Limits(
        max_input_len=POSITIONS // 2, max_output_len=POSITIONS // 2, max_num_tokens=64, max_batch_size=ROWS, tokens_per_block=16
    )
    for name, mapping in (("one", Mapping()), ("dp", Mapping(data_parallel=SIZE, expert_parallel=True))):
        config = BuildConfig(tokenizer=str(tokenizer), device="cpu", dtype="float32", limits=limits, mapping=mapping)
        build(out / "hf", out / name, config, verify="none")
    return out


def as_on_a_gpu(runner: ModelRunner, *, graphs: type[CalledSteps] | None) -> ModelRunner:
    """Resolve and broadcast ids, and run captured shapes."""
    runner._broadcasts_ids = True
    runner.graphs = graphs(runner) if graphs is not None else None
    return runner


def executor_of_threads(engine: Engine, *, graphs: type[CalledSteps] | None) -> tuple[Executor, Followers, list[ModelRunner]]:
    barrier, slots = threading.Barrier(SIZE), [torch.empty(0)] * SIZE
    config, runners = RuntimeConfig(num_threads=1), []
    loaded = []
    for rank in range(SIZE):
        group = ThreadGroup(rank, SIZE, barrier, slots)
        loaded.append(load_rank(engine, config, CPU, World(rank, SIZE, everyone=group, dispatch=TokenDispatch(group))))
    runners = [as_on_a_gpu(one.runner(BLOCKS), graphs=graphs) for one in loaded[1:]]
    followers = Followers(runners)
    leader = as_on_a_gpu(loaded[0].runner(BLOCKS, followers), graphs=graphs)
    limits = engine.config.limits
    sizes = {"num_blocks": BLOCKS, "tokens_per_block": 16, "max_batch_size": ROWS, "max_num_tokens": 64, "max_seq_len": leader.max_seq_len}
    scheduler = DataParallelScheduler(
        lambda first: Scheduler(first_row=first, policy="max_utilization", **sizes), SIZE, ROWS, "max_utilization"
    )
    info = ExecutorInfo(limits=limits, max_seq_len=leader.max_seq_len, vocab_size=101, device="cpu", kv_cache_tokens=1, model="m")
    executor = Executor(leader, scheduler, SynchronousMailbox(info), info, config)
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


@pytest.mark.parametrize("graphs", [CalledSteps, None], ids=["padded", "eager"])
def test_overlapped_steps_generate_the_tokens_of_one_rank(folder: Path, graphs: type[CalledSteps] | None) -> None:
    one = load(folder / "one")
    expected = generate(one, prompts(), 20)
    sampled = generate(one, prompts()[:5], 10, temperature=1.0, seed=5)
    executor, followers, runners = executor_of_threads(Engine.open(folder / "dp"), graphs=graphs)
    num_unknown = count_unknown_ids(executor)
    try:
        assert generate(executor, prompts(), 20) == expected
        assert generate(executor, prompts()[:5], 10, temperature=1.0, seed=5) == sampled
        assert generate(executor, prompts()[:2], 6, logprobs=1) == [tokens[:6] for tokens in expected[:2]], "a step without a graph"
        assert num_unknown() > 50 and executor.scheduler.num_preemptions > 0
        if graphs is not None:
            shapes = [runner.graphs.replayed for runner in runners]  # type: ignore[union-attr]
            assert len({tuple(found) for found in shapes}) == 1, "all ranks replay graphs of the same shape"
            assert {shape.is_decode for shape in shapes[0]} == {True, False}
    finally:
        followers.close()


def test_ranks_capture_the_same_steps_in_the_same_order(folder: Path) -> None:
    expected = generate(load(folder / "one"), prompts(), 20)
    executor, followers, runners = executor_of_threads(Engine.open(folder / "dp"), graphs=CapturedSteps)
    graphs = [runner.graphs for runner in runners]
    leader = graphs[0]
    assert isinstance(leader, CapturedSteps)
    leader._pending = dict.fromkeys(leader.shapes.all(), 0.9)  # nothing is captured at first
    try:
        assert generate(executor, prompts(), 20) == expected
        assert any(isinstance(part, Shape) for part in leader.parts), "shapes that steps need are captured between them"
        while executor.capture_next():
            pass
        assert generate(executor, prompts(), 20) == expected
    finally:
        followers.close()
    assert {shape for shape, _ in leader._captured} == set(leader.shapes.all())
    assert all(isinstance(one, CapturedSteps) and one.parts == leader.parts for one in graphs)


def test_only_the_rank_with_poisoned_blocks_zeroes_them(folder: Path) -> None:
    executor, followers, runners = executor_of_threads(Engine.open(folder / "dp"), graphs=None)
    try:
        for runner in runners:
            runner.caches[0].keys.fill_(1.0)
        executor.runner.zero_blocks([BLOCKS + 2, BLOCKS + 3])
    finally:
        followers.close()
    zeroed = [[block for block in range(BLOCKS) if not runner.caches[0].keys[block].any()] for runner in runners]
    assert zeroed == [[], [2, 3], []]
