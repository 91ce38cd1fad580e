"""Steps are captured by and by: most run with a graph from the start, and the others are captured in idle time, on all ranks."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from unittest.mock import MagicMock

import numpy as np
import pytest
from drive import Driven, request

from stoker.base.errors import RankError
from stoker.distributed.world import ALONE_WORLD
from stoker.runtime.client import Message, Shutdown
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.worker.cuda_graphs import CapturedStep, Graphs
from stoker.runtime.worker.graph_shapes import GraphShapes, row_buckets, thinned
from stoker.runtime.worker.inputs import Shape
from stoker.runtime.worker.model_runner import ModelRunner
from stoker.runtime.worker.row_tracker import RowTracker
from stoker.runtime.worker_group.channels.channel import HEADER_SIZE
from stoker.runtime.worker_group.follower import _run_steps
from stoker.runtime.worker_group.records import END, encode_capture

PARTS = 3  # of a capture


class CountedGraphs(Graphs):
    """A capture has three parts and captures nothing. `failing`: the shape whose capture fails. `on_part` is called in each part."""

    def __init__(self, max_rows: int, max_tokens: int, max_drafts: int = 0) -> None:
        self.shapes = GraphShapes(max_rows, max_tokens, max_drafts)
        self._captured, self._launched, self._pending = {}, set(), {}
        self.parts: list[Shape] = []
        self.failing: Shape | None = None
        self.on_part: Callable[[], None] = lambda: None

    def advance(self, shape: Shape) -> bool:
        if shape == self.failing:
            raise MemoryError("out of memory")
        self.on_part()
        self.parts.append(shape)
        self._launched.add(shape)
        if self.parts.count(shape) < PARTS:
            return False
        for all_greedy in (True, False):
            self._captured[shape, all_greedy] = CapturedStep([], None)  # type: ignore[arg-type]
        self._pending.pop(shape, None)
        self._launched.discard(shape)
        return True


def step(num_tokens: int, num_rows: int) -> StepPlan:
    """Decodes if there are as many tokens as rows, and otherwise a step with prompts."""
    plan = StepPlan()
    plan.sequences, plan.drafts, plan.num_tokens = [None] * num_rows, [()] * num_rows, num_tokens  # type: ignore[list-item]
    plan.num_decodes = num_rows if num_tokens == num_rows else 0
    return plan


@pytest.mark.parametrize("buckets", [row_buckets(512), row_buckets(300), row_buckets(1), [1, 100], [1, 2, 3, 4, 8], []])
@pytest.mark.parametrize("ratio", [2, 4])
def test_thinned_sizes_differ_by_the_ratio(buckets: list[int], ratio: int) -> None:
    chosen = thinned(buckets, ratio)
    assert set(chosen) <= set(buckets) and chosen[:1] == buckets[-1:] and chosen[-1:] == buckets[:1]
    for larger, smaller in itertools.pairwise(chosen):
        between = [size for size in buckets if smaller <= size < larger]
        assert smaller < larger and (larger <= ratio * smaller or between == [smaller])


def test_each_shape_is_captured_once() -> None:
    shapes = GraphShapes(512, 8192, 5)
    assert len(shapes.initial()) + len(shapes.later()) == len(shapes.all())
    assert {*shapes.initial(), *shapes.later()} == set(shapes.all())
    assert set(shapes.largest()) <= set(shapes.all())
    plain = GraphShapes(512, 8192)
    assert (len(plain.initial()), len(plain.all())) == (12, 61)


@pytest.mark.parametrize("max_rows", [1, 8, 100, 512, 1000])
def test_a_larger_graph_runs_steps_until_theirs_is_captured(max_rows: int) -> None:
    graphs = CountedGraphs(max_rows, 8192)
    graphs.warm_up()
    steps = [step(rows, rows) for rows in range(1, max_rows + 1)]
    steps += [
        step(tokens, rows) for tokens in (*range(2, 200, 7), *range(200, 2049, 99)) for rows in (1, 8, 9, 64, 200, 512) if rows < tokens
    ]
    for plan in steps:
        shape, own = graphs.shape_for(plan), graphs.shapes.shape_of(plan)
        if len(plan) > max_rows or own is None:
            continue
        assert shape is not None and shape.rows >= len(plan) and shape.is_decode == own.is_decode
        assert plan.num_tokens <= shape.tokens <= (4 if shape.is_decode else 2) * own.tokens
    assert graphs.shape_for(step(2049, 1)) is None
    while (next_shape := graphs.next_shape()) is not None:
        graphs.capture(next_shape)
    assert all(graphs.shape_for(plan) == graphs.shapes.shape_of(plan) for plan in steps)


def test_what_steps_needed_is_captured_first_and_what_is_begun_is_completed() -> None:
    graphs = CountedGraphs(512, 2048)
    first = Shape(64, 8, is_decode=False)
    graphs.warm_up()
    assert graphs.next_shape() == first and not graphs.is_due
    graphs.advance(first)
    for _ in range(31):
        assert graphs.shape_for(step(300, 200)) == Shape(512, 512, is_decode=False)
    assert graphs.shape_for(step(70, 70)) == Shape(128, 128, is_decode=True)
    assert graphs.next_shape() == first
    graphs.capture(first)
    assert graphs.next_shape() == Shape(384, 256, is_decode=False) and not graphs.is_due
    graphs.advance(Shape(80, 80, is_decode=True))
    assert graphs.next_shape() == Shape(80, 80, is_decode=True) and not graphs.is_due
    graphs.shape_for(step(300, 200))
    assert graphs.next_shape() == Shape(384, 256, is_decode=False) and graphs.is_due, "padding has cost as much as the capture"
    graphs.capture(Shape(384, 256, is_decode=False))
    assert graphs.shape_for(step(300, 200)) == Shape(384, 256, is_decode=False)
    assert graphs.next_shape() == Shape(80, 80, is_decode=True) and not graphs.is_due


@pytest.fixture
def driven(drive: Callable[..., Driven]) -> Driven:
    """An executor with graphs of the start, whose steps run without them."""
    driven = drive()
    graphs = CountedGraphs(8, 64)
    graphs.warm_up()
    graphs.parts.clear()
    graphs.shape_for = lambda plan: None  # type: ignore[method-assign]
    driven.executor.runner.graphs = graphs  # type: ignore[attr-defined]
    return driven


def graphs_of(driven: Driven) -> CountedGraphs:
    graphs = driven.executor.runner.graphs  # type: ignore[attr-defined]
    assert isinstance(graphs, CountedGraphs)
    return graphs


def run_loop(driven: Driven, before_poll: Callable[[int], bool], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Run the loop until `before_poll(i)` returns False before poll i. Returns the times that the polls could wait for messages."""
    waits: list[float] = []
    poll = driven.mailbox.poll

    def recorded(timeout_s: float) -> list[Message]:
        if not before_poll(len(waits)):
            driven.send(Shutdown())
        waits.append(timeout_s)
        return poll(timeout_s)

    monkeypatch.setattr(driven.mailbox, "poll", recorded)
    monkeypatch.setattr(driven.executor.runner, "close", lambda: None)  # other tests use its compile process
    driven.executor.run(capture_when_idle=True)
    return waits


def test_an_idle_executor_captures_all_steps_and_then_waits(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = graphs_of(driven)
    later = graphs.shapes.later()
    waits = run_loop(driven, lambda poll: poll < PARTS * len(later) + 3, monkeypatch)
    assert graphs.parts == [shape for shape in later for _ in range(PARTS)], "one after the other"
    assert waits[: PARTS * len(later)] == [0.0] * PARTS * len(later), "messages are received between all parts"
    assert waits[-1] > 0.0


def test_no_step_is_captured_while_there_are_requests(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, at_arrival, at_end = graphs_of(driven), -1, -1

    def before_poll(number: int) -> bool:
        nonlocal at_arrival, at_end
        if number == 4:  # the second capture has begun
            at_arrival = len(graphs.parts)
            driven.submit(request([5, 6, 7], max_tokens=6, ignore_eos=True))
        if number > 4 and not driven.executor.is_busy and at_end < 0:
            at_end = len(graphs.parts)
        return len(graphs.parts) < PARTS * len(graphs.shapes.later())

    run_loop(driven, before_poll, monkeypatch)
    assert at_arrival == at_end == 4
    assert sum(len(output.token_ids) for output in driven.mailbox.pop_outputs()) == 6
    assert graphs.parts == [shape for shape in graphs.shapes.later() for _ in range(PARTS)], "the capture that was begun is completed"


def test_a_shape_that_steps_need_often_is_captured_between_them(driven: Driven) -> None:
    graphs = graphs_of(driven)
    shape = graphs.shapes.later()[-1]
    graphs._pending[shape] = 0.99
    driven.run(request([5, 6, 7], max_tokens=6, ignore_eos=True))
    assert not graphs.parts
    graphs._pending[shape] = 1.0
    driven.submit(request([5, 6, 7], max_tokens=6, ignore_eos=True))
    for number in range(1, 3 + PARTS):
        driven.turn()
        assert graphs.parts == [shape] * min(number, PARTS), "at most one part for each step"
    driven.finish()


@pytest.mark.parametrize("depth", [1, 2])
def test_the_time_of_a_capture_is_not_that_of_a_step(driven: Driven, monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    """With overlap (2), the step in flight ends before the capture, and its tokens are sent."""
    graphs, executor, skipped_s = graphs_of(driven), driven.executor, 0.0
    monotonic = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + skipped_s)
    recorded: list[float] = []
    monkeypatch.setattr(executor.scheduler, "record_time", lambda plan, duration_s: recorded.append(duration_s))
    num_outputs: list[int] = []

    def on_part() -> None:
        nonlocal skipped_s
        skipped_s += 1000.0
        num_outputs.append(len(driven.mailbox.outputs))

    graphs.on_part, executor._depth = on_part, depth
    runner = executor.runner
    assert isinstance(runner, ModelRunner)
    if depth > 1:  # on a CPU only a tracker resolves ids that the step in flight samples
        runner.tracker = RowTracker(runner.inputs.num_rows, runner.max_seq_len, runner.inputs.block_size, runner.device, looks_up=False)
    driven.submit(request([5, 6, 7], max_tokens=8, ignore_eos=True))
    driven.turn()
    graphs._pending[graphs.shapes.later()[-1]] = 1.0
    driven.finish()
    assert len(graphs.parts) == PARTS and num_outputs == [depth - 1] * PARTS
    assert len(recorded) == 8 and max(recorded) < 1000.0
    assert [each.duration_s for each in executor.step_history.steps()] == recorded
    assert driven.stats.busy_time_s == pytest.approx(sum(recorded))


def test_a_capture_that_fails_is_the_last(driven: Driven, caplog: pytest.LogCaptureFixture) -> None:
    graphs = graphs_of(driven)
    first, graphs.failing = graphs.shapes.later()[:2]
    driven.executor.capture_all()
    assert graphs.parts == [first] * PARTS and graphs.is_captured(first)
    assert f"the capture of {graphs.failing} failed: MemoryError('out of memory')" in caplog.text
    (answer,) = driven.run(request([5, 6, 7], max_tokens=3, ignore_eos=True))
    assert len(answer.tokens) == 3
    driven.executor.runner.world = dataclasses.replace(ALONE_WORLD, size=2)  # type: ignore[attr-defined]
    with pytest.raises(RankError, match="other ranks wait"):
        driven.executor.runner.capture(graphs.failing)  # type: ignore[attr-defined]


def test_followers_capture_what_the_leader_publishes() -> None:
    shapes = [Shape(2048, 512, is_decode=False), Shape(64, 64, is_decode=True), Shape(48, 8, is_decode=False, max_drafts=5)]
    channel, headers = MagicMock(), [*map(encode_capture, shapes), (END,)]
    channel.receive.side_effect = [np.array([*header, *[0] * HEADER_SIZE], dtype=np.int32) for header in headers]
    runner = MagicMock()
    _run_steps(channel, runner, 0.0, MagicMock(rank=1))
    assert [call.args for call in runner.capture.call_args_list] == [(shape,) for shape in shapes]
    assert channel.release.call_count == len(shapes)
