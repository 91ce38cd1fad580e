"""A weight that is quantized some rows at a time is the weight quantized whole, and a file written by a thread is the file."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.base.errors import EngineError
from stoker.builder import build as build_module
from stoker.builder.build import Progress, build
from stoker.builder.checkpoint import fingerprint
from stoker.builder.config import BuildConfig
from stoker.builder.conversion import convert
from stoker.builder.prepare import prepare
from stoker.core.specs import LinearSpec
from stoker.engine import publish as directory
from stoker.engine.reader import Engine
from stoker.engine.tensor_file import TensorFileWriter
from stoker.layers.decoder import declare
from stoker.quant.block_fp8 import BlockFp8
from stoker.quant.dense import Dense
from stoker.quant.format import Format
from stoker.quant.fp8 import Fp8
from stoker.quant.int4 import Int4
from stoker.quant.int8 import Int8
from stoker.quant.int8_grouped import GroupedInt8

FORMATS = [
    Dense(), Fp8(), Fp8(weights="tensor"), BlockFp8(rows=16, columns=32), Int8(), GroupedInt8(shifted=True), Int4(group_size=32),
    Int4(group_size=64, zero="none", clip=False), Int4(group_size=32, zero="float"),
]  # fmt: skip


@pytest.mark.parametrize("chosen", FORMATS, ids=lambda f: type(f).__name__)
@pytest.mark.parametrize("experts", [0, 3])
@pytest.mark.parametrize("piece", [1, 96 * 20, 96 * 64])
def test_rows_at_a_time(chosen: Format, experts: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = LinearSpec(name="up", in_features=96, parts=(64, 36), num_experts=experts)
    weight = torch.randn(spec.weight_shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole = chosen.quantize(weight, spec)
    monkeypatch.setattr(convert, "PIECE_VALUES", {"cpu": piece})
    got = convert.quantized(chosen, weight, spec)
    assert got.keys() == whole.keys()
    for suffix, tensor in whole.items():
        assert got[suffix].dtype == tensor.dtype and torch.equal(got[suffix].float(), tensor.float()), suffix


def test_what_a_device_has_no_room_for_is_made_on_the_cpu(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare(llama, BuildConfig(device="cpu", quantization="WEIGHTS_ONLY_INT8"))
    config, spec = prepared.config, declare(prepared.config.model)["layers.0.mlp.up"]
    real = convert.make

    def full(*args: Any) -> torch.Tensor:
        if args[-1].type != "cpu":
            raise torch.OutOfMemoryError
        return real(*args)

    def made(device: str) -> dict[str, torch.Tensor]:
        given = prepared.makings, prepared.checkpoint.weights, config.model, config.recipe, torch.float32, None, torch.device(device)
        return dict(convert.convert(spec, *given))

    monkeypatch.setattr(convert, "make", full)
    here, there = made("cpu"), made("cuda")
    assert here.keys() == there.keys() == {"layers.0.mlp.up.weight", "layers.0.mlp.up.scale"}
    assert all(torch.equal(tensor, there[name]) for name, tensor in here.items())


def test_what_a_thread_cannot_write_is_raised(tmp_path: Path) -> None:
    layouts = dict.fromkeys("ab", ((4,), torch.float32))

    def full(data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with TensorFileWriter(tmp_path / "f", layouts) as writer:
        writer.write("a", torch.zeros(4))
        writer._threads = {full: writer._threads[writer._hash.update]}
        writer.write("b", torch.zeros(4))
        with pytest.raises(OSError, match="No space"):
            writer.finish()


def test_a_file_s_digest_is_that_of_its_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprint, "PIECE_BYTES", 4)
    (tmp_path / "f").write_bytes(b"0123456789")
    with ThreadPoolExecutor(3) as pool:
        found = fingerprint.Digest(tmp_path / "f", pool).read()
        again = fingerprint.Digest(tmp_path / "f", pool)
    assert not again.pieces and again.read() == found, "from the note"
    pieces = b"".join(hashlib.sha256(piece).digest() for piece in (b"0123", b"4567", b"89"))
    assert found == hashlib.sha256(pieces).hexdigest()


def test_files_are_read_at_once_and_named_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    files = [tmp_path / name for name in ("c", "a", "b")]
    for file in files:
        file.write_text(file.name)
    told: list[tuple[int, int]] = []
    found = fingerprint.fingerprint(files, lambda *done: told.append(done))
    assert [done / total for done, total in told] == [1 / 3, 2 / 3, 1]
    assert found == fingerprint.fingerprint(files[::-1])
    files[1].write_text("other")
    assert found != fingerprint.fingerprint(files)
    files[0].unlink()
    with pytest.raises(FileNotFoundError):
        fingerprint.fingerprint(files)


def test_kernels_are_made_beside_the_weights(tmp_path: Path, llama: Path) -> None:
    told: list[tuple[str, int, int]] = []

    def kernels(path: Path, progress: Progress) -> None:
        assert Engine.open(path).config.weights == "dummy"
        (path / "kernels.zip").write_bytes(b"code")
        progress("kernels", 3, 3)

    engine = build(
        llama, tmp_path / "engine", BuildConfig(device="cpu"), verify="files", progress=lambda *s: told.append(s), kernels=kernels
    )
    assert engine.config.files["kernels.zip"].size == 4 and engine.config.weights == "files"
    engine.verify()
    assert ("kernels", 3, 3) in told


def test_kernels_that_fail_leave_no_engine(tmp_path: Path, llama: Path) -> None:
    def kernels(path: Path, progress: Progress) -> None:
        raise EngineError("no compiler.", cure="Install one.")

    with pytest.raises(EngineError, match="no compiler"):
        build(llama, tmp_path / "engine", BuildConfig(device="cpu"), kernels=kernels)
    assert not list(tmp_path.iterdir())


def test_a_build_that_fails_ends_the_kernels_beside_it(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = threading.Event()

    def kernels(path: Path, progress: Progress) -> None:
        while True:
            progress("kernels", 0, 1)
            started.set()

    def write(*args: object) -> None:
        started.wait()
        raise EngineError("the disk is full.", cure="Make room.")

    monkeypatch.setattr(build_module, "_write", write)
    with pytest.raises(EngineError, match="disk is full"):
        build(llama, tmp_path / "engine", BuildConfig(device="cpu"), kernels=kernels)
    assert not list(tmp_path.iterdir())


def test_an_engine_is_on_the_disk_before_it_appears(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, synced = tmp_path / "engine", []

    def sync(paths: Iterable[Path]) -> None:
        synced.extend((path.name, out.exists()) for path in paths)

    monkeypatch.setattr(directory, "sync", sync)
    build(llama, out, BuildConfig(device="cpu"), verify="none")
    assert {("rank0.safetensors", False), ("config.json", False)} <= set(synced)
    assert synced[-1] == (tmp_path.name, True)
