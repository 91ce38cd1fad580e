"""The memory of graphs is known before the KV cache is sized, and no garbage collection disturbs a capture. Captures are simulated."""

from __future__ import annotations

import gc

import pytest

from stoker.runtime.worker import cuda_graphs as graphs
from stoker.runtime.worker.cuda_graphs import CapturedStep, Graphs, row_buckets
from stoker.runtime.worker.inputs import Shape

MIB = 1 << 20
TOTAL = 1000 * MIB


class SimulatedGraphs(Graphs):
    """The first capture of a kind allocates memory for its tokens, from which later captures allocate. Each adds 1 MiB."""

    def __init__(self) -> None:
        self.row_buckets, self.token_buckets, self.mixed_rows = row_buckets(64), [64, 128, 256], [8, 64]
        self._captured, self._pool, self._stream = {}, None, None
        self.free = TOTAL

    def capture(self, shape: Shape, all_greedy: bool) -> CapturedStep:
        known = [s.tokens for s, _ in self._captured if s.is_decode == shape.is_decode]
        self.free -= MIB + max(shape.tokens - max(known, default=0), 0) * MIB // 4
        self._pool = self._pool or object()
        self._captured[shape, all_greedy] = CapturedStep(None, None)  # type: ignore[arg-type]
        return self._captured[shape, all_greedy]


def test_the_footprint_is_what_the_warm_up_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    probe, real = SimulatedGraphs(), SimulatedGraphs()
    monkeypatch.setattr(graphs, "_free_bytes", lambda: probe.free)
    expected = probe.footprint()
    assert not probe._captured and probe._pool is None  # a graph that remains would be destroyed during a later capture
    monkeypatch.setattr(graphs, "_free_bytes", lambda: real.free)
    assert real.warm_up() == expected == TOTAL - real.free
    assert len(real._captured) == 2 * (len(real.row_buckets) + len(real.token_buckets))


def test_the_footprint_of_a_single_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = SimulatedGraphs()
    probe.row_buckets, probe.token_buckets = [1], []
    monkeypatch.setattr(graphs, "_free_bytes", lambda: probe.free)
    assert probe.footprint() == TOTAL - probe.free > 0


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_collection_during_a_capture(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        with pytest.raises(RuntimeError), graphs._without_garbage_collection():
            assert not gc.isenabled()
            raise RuntimeError("a capture that fails")
        assert gc.isenabled() == enabled
    finally:
        gc.enable() if before else gc.disable()
