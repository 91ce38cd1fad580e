"""Measures how long `stoker serve ENGINE` needs from the start of its process until it is ready, with random weights.

PYTHONPATH=src python benchmarks/start_up.py --config benchmarks/models/llama-3.1-8b --quantize FP8 --json start_up.json

With --tensor-parallel 2, the engine has two ranks, which need two GPUs (or --device cpu). Each start has the stages of every process, in
seconds since the start of the command. The page cache is warm from the second start on. The floor is the import of torch, plus the
weights at the bandwidth of the file system.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from first_token import save_tokenizer

from stoker.base.config import Limits, Mapping
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.cli.benchmark.results import provenance
from stoker.runtime.aot import compile_kernels


def start(engine: Path) -> dict[str, Any]:
    """Start and stop a server. Returns the seconds until each process reached each stage, and until the server was ready."""
    began, began_at = time.perf_counter(), time.time()
    command = [sys.executable, "-m", "stoker", "serve", str(engine), "--port", "0"]
    environment = os.environ | {"STOKER_LOG": "info", "STOKER_LOG_FORMAT": "json"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its modules compiled; here the first start compiles them
    processes: dict[str, dict[str, float]] = {}
    result: dict[str, Any] = {"processes": processes}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as server:
        assert server.stdout is not None
        lines = []
        for line in server.stdout:
            lines.append(line)
            if "(ready after" in line:
                result["ready"] = round(time.perf_counter() - began, 3)
                break
            if line.startswith("{") and "stages" in (report := json.loads(line)):
                offset = report["began_at"] - began_at
                processes[report["process"]] = {
                    "began": round(offset, 3),
                    **{stage: round(offset + seconds, 3) for stage, seconds in report["stages"].items()},
                }
        server.send_signal(signal.SIGTERM)
        server.communicate()
    if "ready" not in result:
        raise RuntimeError(f"the server did not start:\n{''.join(lines)}")
    return result


def seconds_of_import(module: str) -> float:
    """The seconds that a new process needs to import a module."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--quantize")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engine = Path(folder) / "engine"
        save_tokenizer(Path(folder) / "tokenizer", json.loads((Path(args.config) / "config.json").read_text())["vocab_size"])
        dtype = "bfloat16" if args.device == "cuda" else "float32"
        config = BuildConfig(
            dtype=dtype,
            quantization=args.quantize,
            dummy_weights=True,
            limits=Limits(),
            mapping=Mapping(tensor_parallel=args.tensor_parallel),
            device=args.device,
            tokenizer=folder + "/tokenizer",
        )
        build(args.config, engine, config, verify="none", kernels=compile_kernels)
        starts = [start(engine) for _ in range(args.repeats)]
        about = provenance(engine, args.device)
    ready_s = statistics.median(found["ready"] for found in starts[1:])
    result = {**about, "import_torch_s": seconds_of_import("torch"), "ready_s": ready_s, "starts": starts}
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
