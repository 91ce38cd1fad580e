"""Measures how fast the weights of a rank reach the device: from the page cache, from the disk, and without a file.

    PYTHONPATH=src python benchmarks/load_weights.py --gib 8 --folder /dev/shm
    PYTHONPATH=src python benchmarks/load_weights.py --engine ENGINE --json load_weights.json

The first form writes a file of random numbers and reads it from the page cache. With --engine, the file is that of rank 0. Then the disk
is measured, too: threads read the whole file once, past the page cache (O_DIRECT) and into an empty one. The better rate is the floor of
a cold start, and `upload`, which copies from pinned memory, that of a warm one.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from stoker.cli.benchmark.results import provenance
from stoker.engine.config_file import rank_file_name
from stoker.engine.safetensors_writer import SafetensorsWriter
from stoker.engine.tensor_source import FileTensorSource

READ_BYTES = 4 << 20
UPLOAD_BYTES = 1 << 30


def write_file(path: Path, gib: int) -> None:
    """Write a rank file of random numbers."""
    shape = (14336, 4096)  # 112 MiB in bfloat16
    block = torch.randn(shape).to(torch.bfloat16)
    names = [f"w{i}" for i in range(gib * 2**30 // (shape[0] * shape[1] * 2))]
    with SafetensorsWriter(path, dict.fromkeys(names, (shape, torch.bfloat16)), {}) as writer:
        for name in names:
            writer.write(name, block)
        writer.finish()


def gb_per_s(num_bytes: int, started: float) -> float:
    """The rate in GB/s of `num_bytes` bytes since `started`, a time of perf_counter in seconds."""
    return round(num_bytes / (time.perf_counter() - started) / 1e9, 2)


def synchronize(device: torch.device) -> None:
    """Wait for the work of a CUDA device; nothing is pending on others."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def load(path: Path, device: torch.device) -> float:
    """Load all tensors as an executor does, and compare the last one with the file. Returns GB/s."""
    source, started = FileTensorSource(path, device), time.perf_counter()
    loaded = [source.get(name, entry.shape, entry.dtype) for name, entry in source.entries.items()]
    synchronize(device)
    rate = gb_per_s(path.stat().st_size, started)
    last = max(source.entries.values(), key=lambda entry: entry.stop)
    with path.open("rb") as file:
        file.seek(last.start)
        stored = torch.frombuffer(bytearray(file.read(last.stop - last.start)), dtype=torch.uint8)
    assert torch.equal(loaded[list(source.entries.values()).index(last)].cpu().view(-1).view(torch.uint8), stored)
    return rate


def upload(device: torch.device) -> float:
    """GB/s from pinned memory to the device, best of three."""
    host = torch.empty(UPLOAD_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    rates, out = [], torch.empty_like(host, device=device)
    for _ in range(4):
        started = time.perf_counter()
        out.copy_(host)
        synchronize(device)
        rates.append(gb_per_s(UPLOAD_BYTES, started))
    return max(rates[1:])


def read_disk(path: Path, threads: int, *, direct: bool) -> float:
    """GB/s with which threads read a file of which nothing is in the page cache."""
    os.sync()  # pages that are not written yet would remain
    size = path.stat().st_size // READ_BYTES * READ_BYTES
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def read(first: int) -> None:
        with mmap.mmap(-1, READ_BYTES) as buffer:  # aligned to pages, as O_DIRECT requires
            for offset in range(first * READ_BYTES, size, threads * READ_BYTES):
                if os.preadv(fd, [buffer], offset) != READ_BYTES:
                    raise EOFError(f"{path} ends before byte {offset + READ_BYTES}")

    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(threads)))
    os.close(fd)
    return gb_per_s(size, started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, default=8)
    parser.add_argument("--folder", default=None, help="folder for the file; default: the temporary folder")
    parser.add_argument("--engine", type=Path, help="an engine with weights, of which the file of rank 0 is read")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 8], help="that read from the disk at the same time")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json")
    args = parser.parse_args()
    device = torch.device(args.device)
    row = {**provenance(args.engine, device.type), "upload_gb_per_s": upload(device)}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = args.engine / rank_file_name(0) if args.engine else Path(folder, "rank0.safetensors")
        if args.engine:
            row["disk_gb_per_s"] = {
                f"{threads} threads, {'direct' if direct else 'into the page cache'}": read_disk(path, threads, direct=direct)
                for threads in args.threads
                for direct in (True, False)
            }
        else:
            write_file(path, args.gib)
        row |= {"bytes": path.stat().st_size, "load_gb_per_s": [load(path, device) for _ in range(3)]}
    print(row, flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
