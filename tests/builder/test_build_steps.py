"""The steps of a build: quantization in chunks, writing, fingerprints, background compilation, and publishing."""

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
from stoker.builder.background_compile import Progress
from stoker.builder.build import build
from stoker.builder.checkpoint import fingerprint
from stoker.builder.config import BuildConfig
from stoker.builder.conversion import convert
from stoker.builder.prepare import prepare
from stoker.core.specs import LinearSpec
from stoker.engine import publish as publish_module
from stoker.engine.reader import Engine
from stoker.engine.safetensors_writer import SafetensorsWriter
from stoker.layers.decoder import declare
from stoker.quant.format import Format
from stoker.quant.formats.block_fp8 import BlockFp8
from stoker.quant.formats.dense import Dense
from stoker.quant.formats.fp8 import Fp8
from stoker.quant.formats.int4 import Int4
from stoker.quant.formats.int8 import Int8
from stoker.quant.formats.int8_grouped import GroupedInt8

FORMATS = [
    Dense(), Fp8(), Fp8(weights="tensor"), BlockFp8(rows=16, columns=32), Int8(), GroupedInt8(shifted=True), Int4(group_size=32),
    Int4(group_size=64, zero="none", clip=False), Int4(group_size=32, zero="float"),
]  # fmt: skip


@pytest.mark.parametrize("chosen", FORMATS, ids=lambda f: type(f).__name__)
@pytest.mark.parametrize("experts", [0, 3])
@pytest.mark.parametrize("chunk", [1, 96 * 20, 96 * 64])
def test_quantization_in_chunks_changes_nothing(chosen: Format, experts: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = LinearSpec(name="up", in_features=96, parts=(64, 36), num_experts=experts)
    weight = torch.randn(spec.weight_shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = chosen.quantize(weight, spec)
    monkeypatch.setattr(convert, "CHUNK_VALUES", {"cpu": chunk})
    got = convert.quantize_in_chunks(chosen, weight, spec)
    assert got.keys() == expected.keys()
    for suffix, tensor in expected.items():
        assert got[suffix].dtype == tensor.dtype and torch.equal(got[suffix].float(), tensor.float()), suffix


def test_a_weight_is_converted_on_the_cpu_when_the_device_is_out_of_memory(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare(llama, BuildConfig(device="cpu", quantization="WEIGHTS_ONLY_INT8"))
    spec = declare(prepared.config.model)["layers.0.mlp.up"]
    real = convert.assemble_tensor

    def out_of_memory(*args: Any) -> torch.Tensor:
        if args[-1].type != "cpu":
            raise torch.OutOfMemoryError
        return real(*args)

    def converted(device: str) -> dict[str, torch.Tensor]:
        return dict(prepared.converter(torch.device(device)).convert(spec))

    monkeypatch.setattr(convert, "assemble_tensor", out_of_memory)
    on_cpu, on_cuda = converted("cpu"), converted("cuda")
    assert on_cpu.keys() == on_cuda.keys() == {"layers.0.mlp.up.weight", "layers.0.mlp.up.scale"}
    assert all(torch.equal(tensor, on_cuda[name]) for name, tensor in on_cpu.items())


def test_an_error_of_the_writing_thread_is_raised(tmp_path: Path) -> None:
    layouts = dict.fromkeys("ab", ((4,), torch.float32))

    def disk_full(data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with SafetensorsWriter(tmp_path / "f", layouts) as writer:
        writer.write("a", torch.zeros(4))
        writer._threads = {disk_full: writer._threads[writer._hash.update]}
        writer.write("b", torch.zeros(4))
        with pytest.raises(OSError, match="No space"):
            writer.finish()


def test_a_file_digest_covers_the_digests_of_its_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprint, "CHUNK_BYTES", 4)
    (tmp_path / "f").write_bytes(b"0123456789")
    with ThreadPoolExecutor(3) as pool:
        found = fingerprint.FileDigest(tmp_path / "f", pool).result()
        again = fingerprint.FileDigest(tmp_path / "f", pool)
    assert not again.chunks and again.result() == found, "cached"
    chunk_digests = b"".join(hashlib.sha256(chunk).digest() for chunk in (b"0123", b"4567", b"89"))
    assert found == hashlib.sha256(chunk_digests).hexdigest()


def test_a_fingerprint_depends_on_names_and_contents_not_on_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    files = [tmp_path / name for name in ("c", "a", "b")]
    for file in files:
        file.write_text(file.name)
    reports: list[tuple[int, int]] = []
    found = fingerprint.fingerprint(files, lambda *done: reports.append(done))
    assert [done / total for done, total in reports] == [1 / 3, 2 / 3, 1]
    assert found == fingerprint.fingerprint(files[::-1])
    files[1].write_text("other")
    assert found != fingerprint.fingerprint(files)
    files[0].unlink()
    with pytest.raises(FileNotFoundError):
        fingerprint.fingerprint(files)


def test_kernels_are_compiled_while_weights_are_converted(tmp_path: Path, llama: Path) -> None:
    reports: list[tuple[str, int, int]] = []

    def kernels(path: Path, progress: Progress) -> None:
        assert Engine.open(path).config.weights == "dummy"
        (path / "kernels.zip").write_bytes(b"code")
        progress("kernels", 3, 3)

    engine = build(
        llama, tmp_path / "engine", BuildConfig(device="cpu"), verify="files", progress=lambda *s: reports.append(s), kernels=kernels
    )
    assert engine.config.files["kernels.zip"].size == 4 and engine.config.weights == "files"
    engine.verify()
    assert ("kernels", 3, 3) in reports


def test_a_failed_compilation_leaves_no_engine(tmp_path: Path, llama: Path) -> None:
    def kernels(path: Path, progress: Progress) -> None:
        raise EngineError("no compiler.", cure="Install one.")

    with pytest.raises(EngineError, match="no compiler"):
        build(llama, tmp_path / "engine", BuildConfig(device="cpu"), kernels=kernels)
    assert not list(tmp_path.iterdir())


def test_a_failed_build_ends_the_compilation(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = threading.Event()

    def kernels(path: Path, progress: Progress) -> None:
        while True:
            progress("kernels", 0, 1)
            started.set()

    def write(*args: object) -> None:
        started.wait()
        raise EngineError("the disk is full.", cure="Make room.")

    monkeypatch.setattr(build_module, "write_engine", write)
    with pytest.raises(EngineError, match="disk is full"):
        build(llama, tmp_path / "engine", BuildConfig(device="cpu"), kernels=kernels)
    assert not list(tmp_path.iterdir())


def test_files_are_flushed_to_the_disk_before_the_engine_appears(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, flushed = tmp_path / "engine", []

    def flush_to_disk(paths: Iterable[Path]) -> None:
        flushed.extend((path.name, out.exists()) for path in paths)

    monkeypatch.setattr(publish_module, "flush_to_disk", flush_to_disk)
    build(llama, out, BuildConfig(device="cpu"), verify="none")
    assert {("rank0.safetensors", False), ("config.json", False)} <= set(flushed)
    assert flushed[-1] == (tmp_path.name, True)
