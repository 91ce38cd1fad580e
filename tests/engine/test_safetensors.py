"""Safetensors files: the library reads what the writer writes, and damaged headers are refused."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from stoker.base.errors import CheckpointError
from stoker.engine.safetensors_header import DTYPES, read_header
from stoker.engine.safetensors_writer import MAX_CHUNKS, SafetensorsWriter

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "odd": torch.arange(5, dtype=torch.int8),
    "half": torch.randn(2, 3).to(torch.bfloat16),
    "eight": torch.randn(4, 4).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(3, dtype=torch.int32),
    "none": torch.empty(0, 4),
}


def write(path: Path) -> bytes:
    """Write TENSORS. Returns the content of the file."""
    with SafetensorsWriter(path, {n: (tuple(t.shape), t.dtype) for n, t in TENSORS.items()}) as writer:
        for name, tensor in TENSORS.items():
            writer.write(name, tensor)
        record = writer.finish()
    assert record.size == path.stat().st_size
    return path.read_bytes()


def test_the_library_reads_written_files(tmp_path: Path) -> None:
    data = write(tmp_path / "f.safetensors")
    found = load_file(tmp_path / "f.safetensors")
    assert {n: (t.dtype, t.shape) for n, t in found.items()} == {n: (t.dtype, t.shape) for n, t in TENSORS.items()}
    assert all(
        torch.equal(found[n].view(torch.uint8) if t.ndim else found[n], t.view(torch.uint8) if t.ndim else t) for n, t in TENSORS.items()
    )
    (length,) = struct.unpack("<Q", data[:8])
    assert (8 + length) % 64 == 0


class FakeDeviceTensor(torch.Tensor):
    """A CPU tensor that claims to be on a device."""

    is_cpu = False


def test_device_tensors_are_written_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more chunks than buffers, and CPU tensors between them. Pinned memory is replaced by plain memory."""
    real, made = torch.empty, []

    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        made.extend([args] * pin_memory)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    whole = {"a": torch.randn(100, 33), "b": torch.randn(7), "c": torch.arange(1000).to(torch.int8), "d": torch.randn(3, 5).t()}
    layouts = {n: (tuple(t.shape), t.dtype) for n, t in whole.items()}
    with SafetensorsWriter(tmp_path / "f", layouts, pinned_bytes=64 * MAX_CHUNKS) as writer:
        for name, tensor in whole.items():
            writer.write(name, tensor if name == "b" else tensor.as_subclass(FakeDeviceTensor))
        record = writer.finish()
    assert len(made) == MAX_CHUNKS
    assert all(torch.equal(load_file(tmp_path / "f")[name], tensor) for name, tensor in whole.items())
    assert record.sha256 == hashlib.sha256((tmp_path / "f").read_bytes()).hexdigest()


def test_headers_of_the_library_are_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "f.safetensors", metadata={"format": "pt"})
    found = read_header(tmp_path / "f.safetensors", CheckpointError, "")
    assert {n: (e.dtype, e.shape) for n, e in found.items()} == {n: (t.dtype, tuple(t.shape)) for n, t in TENSORS.items()}


def test_tensors_out_of_order_are_refused(tmp_path: Path) -> None:
    layouts = {"a": ((2,), torch.float32), "b": ((2,), torch.float32)}
    with SafetensorsWriter(tmp_path / "f", layouts) as writer, pytest.raises(ValueError, match=r"b .*in place of a"):
        writer.write("b", torch.zeros(2))
    with SafetensorsWriter(tmp_path / "g", layouts) as writer:
        writer.write("a", torch.zeros(2))
        with pytest.raises(ValueError, match=r"were not written: .*b"):
            writer.finish()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 1000), flip=st.integers(0, 1000), value=st.integers(0, 255))
def test_damage_is_harmless_or_an_error_that_names_the_file(tmp_path: Path, cut: int, flip: int, value: int) -> None:
    whole = tmp_path / "f.safetensors"
    if not whole.exists():
        write(whole)
    data = bytearray(whole.read_bytes())
    (header,) = struct.unpack("<Q", data[:8])
    bad = tmp_path / "bad.safetensors"
    if cut < len(data):
        bad.write_bytes(data[:cut])
        with pytest.raises(CheckpointError, match=r"bad\.safetensors"):
            read_header(bad, CheckpointError, "")
    data[flip % (8 + header)] = value
    bad.write_bytes(data)
    try:
        entries = read_header(bad, CheckpointError, "")
    except CheckpointError as problem:
        assert "bad.safetensors" in str(problem)
    else:
        assert all(0 <= e.start <= e.stop <= len(data) for e in entries.values())


def header(name: str = "t", **fields: object) -> bytes:
    text = json.dumps({name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | fields}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(8)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header(shape=[3]), r"tensor 't' of shape \(3,\) and dtype F32 has 8 bytes"),
        (header(shape=[-2]), r"tensor 't' has shape \(-2,\)"),
        (header(shape=[True, 2]), "tensor 't'"),
        (header(dtype="F4"), "tensor 't' has the unknown dtype 'F4'"),
        (header(dtype=["F32"]), "tensor 't'"),
        (header(data_offsets=[4, 12]), "tensor 't' begins at byte"),
        (header(data_offsets=[0]), "tensor 't' has no dtype, shape and data_offsets"),
        (header(shape=[1 << 62]), "tensor 't'"),
        (header(shape=[1 << 62, 1 << 62, 0], data_offsets=[0, 0]), r"tensor 't' has shape .*, which is too large"),
        (header("a." * 600), "has 1200 characters, and the limit is 1024"),
        (header() + b"x", "too long"),
        (struct.pack("<Q", 1 << 62) + b"{}", "header of"),
        (struct.pack("<Q", 2) + b"[]", "not an object"),
        (struct.pack("<Q", 4) + b"\xff\xfe{}", "not JSON"),
        (struct.pack("<Q", 200_000) + b"[" * 200_000, "not JSON"),
        (b"", "0 bytes"),
    ],
)
def test_inconsistent_headers_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "f.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        read_header(tmp_path / "f.safetensors", CheckpointError, "")


def test_dtype_names_are_unique() -> None:
    assert len(set(DTYPES.values())) == len(DTYPES)
