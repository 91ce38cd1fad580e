"""Measures the load of a rank file from the page cache to the device.

PYTHONPATH=src python benchmarks/load_weights.py --gib 8 --folder /dev/shm
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from stoker.cli.benchmark.results import provenance
from stoker.engine.safetensors_writer import SafetensorsWriter
from stoker.engine.tensor_source import FileTensorSource


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=int, default=8)
    parser.add_argument("--folder", default=None, help="folder for the file; default: the temporary folder")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json")
    args = parser.parse_args()
    device = torch.device(args.device)
    shape = (14336, 4096)  # 112 MiB in bfloat16
    names = [f"w{i}" for i in range(args.gib * 2**30 // (shape[0] * shape[1] * 2))]
    block = torch.randn(shape).to(torch.bfloat16)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = Path(folder) / "rank0.safetensors"
        with SafetensorsWriter(path, dict.fromkeys(names, (shape, torch.bfloat16)), {}) as writer:
            for name in names:
                writer.write(name, block)
            writer.finish()
        rates = []
        for _ in range(3):
            source = FileTensorSource(path, device)
            started = time.perf_counter()
            loaded = [source.get(name, shape, torch.bfloat16) for name in names]
            if device.type == "cuda":
                torch.cuda.synchronize()
            rates.append(path.stat().st_size / (time.perf_counter() - started) / 1e9)
            assert torch.equal(loaded[-1].cpu(), block) and torch.equal(loaded[0].cpu(), block)
            del loaded
    row = {**provenance(device=device.type), "gib": args.gib, "gb_per_s": rates}
    print(row, flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
