"""Weights are read into the page cache once, by threads that ignore what they cannot read."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from stoker.base.nodes import NodeSettings
from stoker.runtime import weight_prefetch
from stoker.runtime.weight_prefetch import CHUNK_BYTES, WeightPrefetch, available_bytes, is_cached

SIZES = (CHUNK_BYTES + 12345, 2 * CHUNK_BYTES)
LAST = [(rank, min(at + CHUNK_BYTES, size) - 1) for rank, size in enumerate(SIZES) for at in range(0, size, CHUNK_BYTES)]


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """A directory with the config.json of an engine of two ranks, and with their files, which are not in the page cache."""
    files = {}
    for rank, size in enumerate(SIZES):
        with (tmp_path / f"rank{rank}.safetensors").open("wb") as file:
            file.write(os.urandom(1 << 16))
            file.truncate(size)
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        files[f"rank{rank}.safetensors"] = {"size": size, "sha256": "0" * 64}
    plain = {"format_version": 3, "model": {"architecture": "Llama", "vocab_size": 8}, "limits": {}, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps({**plain, "mapping": {"tensor_parallel": 2}, "files": files}))
    return tmp_path


def read(engine: Path, nodes: NodeSettings = NodeSettings()) -> int:
    """Wait for a prefetch. Returns the number of its threads."""
    prefetch = WeightPrefetch(engine, nodes)
    for thread in prefetch.threads:
        thread.join()
    return len(prefetch.threads)


def cached_ends(engine: Path) -> list[tuple[int, int]]:
    """(rank, offset) of those ends of chunks that are cached."""
    found = []
    for rank, offset in LAST:
        with (engine / f"rank{rank}.safetensors").open("rb") as file:
            if is_cached(file.fileno(), offset):
                found.append((rank, offset))
    return found


def test_all_files_are_read_once(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(engine) > 0
    assert cached_ends(engine) == LAST
    sizes, preadv = [], os.preadv

    def recorded(fd: int, buffers: list[bytearray], offset: int, flags: int = 0) -> int:
        sizes.append(len(buffers[0]))
        return preadv(fd, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", recorded)
    assert read(engine) > 0
    assert sizes == [1] * len(LAST)


def test_a_node_reads_the_files_of_its_ranks(engine: Path) -> None:
    for rank in range(2):
        nodes = NodeSettings(num_nodes=2, node_rank=rank, rendezvous="localhost:29400")
        assert weight_prefetch._weight_files(engine, nodes) == [engine / f"rank{rank}.safetensors"]
    assert weight_prefetch._weight_files(engine, NodeSettings(num_nodes=3, rendezvous="localhost:29400")) == []


def test_nothing_is_read_without_files_or_memory(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_bytes() > 1 << 20
    assert read(tmp_path / "absent") == 0
    with monkeypatch.context() as patch:
        patch.setattr(weight_prefetch, "available_bytes", lambda: 2 * sum(SIZES) - 2)
        assert read(engine) == 0
    plain = json.loads((engine / "config.json").read_text())
    (engine / "config.json").write_text(json.dumps({**plain, "weights": "dummy"}))
    assert read(engine) == 0


def test_files_that_cannot_be_read_end_the_threads(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object) -> int:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "preadv", refused)
    assert read(engine) > 0
