"""The memory of graphs is known before the KV cache is sized, and no garbage collection disturbs a capture. Captures are simulated."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from stoker.base.process import without_garbage_collection
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.worker import cuda_graphs as graphs
from stoker.runtime.worker.cuda_graphs import CapturedStep, Graphs, PlainStep
from stoker.runtime.worker.graph_shapes import GraphShapes
from stoker.runtime.worker.inputs import Shape, StepInputs

MIB = 1 << 20
TOTAL = 1000 * MIB


class SimulatedGraphs(Graphs):
    """The first capture of a kind allocates memory for its tokens, from which later captures allocate. Each adds 2 MiB."""

    def __init__(self, max_drafts: int = 0, max_rows: int = 64) -> None:
        self.shapes = GraphShapes(max_rows, 256, max_drafts)
        self._captured, self._pool, self._stream = {}, None, None
        self._launched, self._pending = set(), {}
        self.free = TOTAL

    def advance(self, shape: Shape) -> bool:
        if self.is_captured(shape):
            return True
        known = [s.tokens for s, _ in self._captured if (s.is_decode, s.max_drafts) == (shape.is_decode, shape.max_drafts)]
        self.free -= 2 * MIB + max(shape.tokens - max(known, default=0), 0) * MIB // 4
        self._pool = self._pool or object()
        for all_greedy in (True, False):
            self._captured[shape, all_greedy] = CapturedStep([], None)  # type: ignore[arg-type]
        self._pending.pop(shape, None)
        return True


@pytest.mark.parametrize(("max_drafts", "max_rows"), [(0, 64), (5, 64), (0, 1)])
def test_the_footprint_is_what_all_captures_allocate(monkeypatch: pytest.MonkeyPatch, max_drafts: int, max_rows: int) -> None:
    probe, real = SimulatedGraphs(max_drafts, max_rows), SimulatedGraphs(max_drafts, max_rows)
    monkeypatch.setattr(graphs, "_free_bytes", lambda: probe.free)
    expected = probe.footprint()
    assert not probe._captured and probe._pool is None  # a graph that remains would be destroyed during a later capture
    real.warm_up()
    assert (0 < TOTAL - real.free < expected) == bool(real.shapes.later())
    while (shape := real.next_shape()) is not None:
        real.capture(shape)
    assert expected == TOTAL - real.free
    assert {shape for shape, _ in real._captured} == set(real.shapes.all())


def test_every_decode_with_drafts_has_a_graph_of_sufficient_size() -> None:
    shapes = GraphShapes(64, 256, 5)
    for rows in range(1, 65):
        for total in range(1, min(5 * rows, 64 - rows) + 1):
            drafts = [[7] * (total * (row + 1) // rows - total * row // rows) for row in range(rows)]
            plan = StepPlan()
            plan.drafts, plan.num_tokens = [*drafts], rows + total
            plan.sequences = [None] * rows  # type: ignore[list-item]
            shape = shapes.shape_of(plan)
            assert shape is not None and shape.rows >= rows and rows + total <= shape.tokens <= 64 and shape in shapes.verifications()


def test_the_footprint_of_a_single_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = SimulatedGraphs()
    probe.shapes = GraphShapes(1, 1)
    monkeypatch.setattr(graphs, "_free_bytes", lambda: probe.free)
    assert probe.footprint() == TOTAL - probe.free > 0


class RecordedGraphs(Graphs):
    """Records what is launched, and what would be captured."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self._captured, self._pool, self._stream = {}, None, None
        self._launched, self._pending = set(), {}

    def launch(self, inputs: StepInputs, max_drafts: int) -> None:
        self.events.append("launched")
        inputs.batch.shared["computed"] = True

    def forward(self, inputs: StepInputs, max_drafts: int, all_greedy: bool) -> Iterator[PlainStep]:
        assert not inputs.batch.shared, "a tensor outside of the graph"
        self.events.append(all_greedy)
        inputs.batch.shared["computed"] = True
        yield PlainStep(torch.zeros(1), None)

    def _dummy_step(self, shape: Shape) -> StepInputs:
        return SimpleNamespace(batch=SimpleNamespace(shared={}))  # type: ignore[return-value]


def test_a_capture_launches_the_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if other steps run between its parts."""
    current, graph = simulate_device(monkeypatch)
    captured = RecordedGraphs()
    shape = Shape(8, 8, is_decode=True)
    assert [captured.advance(shape) for _ in range(3)] == [False, False, True]
    assert captured.events == ["launched", True, False]
    assert captured._captured[shape, True] is not captured._captured[shape, False]
    assert current.wait_stream.call_count == 3
    modes = [call.kwargs["capture_error_mode"] for call in graph.call_args_list]
    assert modes == ["relaxed"] * 2, "threads of transfers allocate memory during a capture, and this thread may load a kernel"


def test_the_next_step_waits_for_a_launch_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels read the static buffers, which the step overwrites."""
    current, _ = simulate_device(monkeypatch)
    captured = RecordedGraphs()
    monkeypatch.setattr(captured, "launch", MagicMock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        captured.advance(Shape(8, 8, is_decode=True))
    current.wait_stream.assert_called_once_with(captured._stream)


def simulate_device(monkeypatch: pytest.MonkeyPatch) -> tuple[MagicMock, MagicMock]:
    """Replace the functions of torch.cuda that a capture calls. Returns the current stream, and the context of captures."""
    current, graph = MagicMock(), MagicMock(side_effect=lambda *_, **options: nullcontext())
    for name in ("Stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, MagicMock)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return current, graph


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_collection_during_a_capture(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        with pytest.raises(RuntimeError), without_garbage_collection():
            assert not gc.isenabled()
            raise RuntimeError("a capture that fails")
        assert gc.isenabled() == enabled
    finally:
        gc.enable() if before else gc.disable()
