"""What graphs are going to take is known before the cache is sized, and no collection disturbs a capture. Captures are stood in for."""

from __future__ import annotations

import gc

import pytest

from stoker.runtime.worker import cuda_graphs as graphs
from stoker.runtime.worker.cuda_graphs import Captured, Graphs, row_buckets
from stoker.runtime.worker.inputs import Shape

MIB = 1 << 20
TOTAL = 1000 * MIB


class Pretended(Graphs):
    """The first capture of a kind takes memory by its tokens, each one a little more, as a pool that later graphs live in."""

    def __init__(self) -> None:
        self.row_buckets, self.token_buckets, self.mixed_rows = row_buckets(64), [64, 128, 256], [8, 64]
        self._captured, self._pool, self._stream = {}, None, None
        self.free = TOTAL

    def capture(self, shape: Shape, all_greedy: bool) -> Captured:
        known = [s.tokens for s, _ in self._captured if s.is_decode == shape.is_decode]
        self.free -= MIB + max(shape.tokens - max(known, default=0), 0) * MIB // 4
        self._pool = self._pool or object()
        self._captured[shape, all_greedy] = Captured(None, None, shape.rows)  # type: ignore[arg-type]
        return self._captured[shape, all_greedy]


def test_the_footprint_is_what_the_warm_up_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    probe, real = Pretended(), Pretended()
    monkeypatch.setattr(graphs, "_unused", lambda: probe.free)
    expected = probe.footprint()
    assert not probe._captured and probe._pool is None  # graphs that linger are destroyed in the middle of another's capture
    monkeypatch.setattr(graphs, "_unused", lambda: real.free)
    assert real.warm_up() == expected == TOTAL - real.free
    assert len(real._captured) == 2 * (len(real.row_buckets) + len(real.token_buckets))


def test_the_footprint_of_a_single_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Pretended()
    probe.row_buckets, probe.token_buckets = [1], []
    monkeypatch.setattr(graphs, "_unused", lambda: probe.free)
    assert probe.footprint() == TOTAL - probe.free > 0


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_during_a_capture(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        with pytest.raises(RuntimeError), graphs._nothing_collected():
            assert not gc.isenabled()
            raise RuntimeError("a capture that fails")
        assert gc.isenabled() == enabled
    finally:
        gc.enable() if before else gc.disable()
