"""Measures how long `stoker serve ENGINE` needs from the start of its process until it is ready, with random weights.

PYTHONPATH=src python benchmarks/start_up.py --config benchmarks/models/llama-3.1-8b --quantize FP8 --json start_up.json

With --tensor-parallel 2, the engine has two ranks, which need two GPUs (or --device cpu). Each start has the stages of every process, in
seconds since the start of the command, and the lines that the server wrote after the signal to stop that are not its own log. The page
cache is warm from the second start on. The floor is the import of torch, plus the weights at the bandwidth of the file system, which
load_weights.py measures. --cold empties the page cache before each start: of the weights of --engine only, or of all files, as after a
boot of the machine, which needs root; then torch is imported cold, too.
"""

from __future__ import annotations

import argparse
import contextlib
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
from stoker.runtime.weight_prefetch import is_cached


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
        result["last_lines"] = [line for line in server.communicate()[0].splitlines() if not line.startswith("{")]
    if "ready" not in result:
        raise RuntimeError(f"the server did not start:\n{''.join(lines)}")
    return result


def seconds_of_import(module: str) -> float:
    """The seconds that a new process needs to import a module."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
    return time.perf_counter() - began


def build_engine(args: argparse.Namespace, folder: Path) -> Path:
    """Build an engine of a config.json with random weights, which are created at the start and not read. Returns its directory."""
    save_tokenizer(folder / "tokenizer", json.loads((Path(args.config) / "config.json").read_text())["vocab_size"])
    config = BuildConfig(
        dtype="bfloat16" if args.device == "cuda" else "float32",
        quantization=args.quantize,
        dummy_weights=True,
        limits=Limits(),
        mapping=Mapping(tensor_parallel=args.tensor_parallel),
        device=args.device,
        tokenizer=str(folder / "tokenizer"),
    )
    build(args.config, folder / "engine", config, verify="none", kernels=compile_kernels)
    return folder / "engine"


def empty_page_cache(engine: Path, kind: str) -> None:
    """Remove the weights of an engine ("weights"), or every file ("all"), from the page cache. Raises RuntimeError if weights remain."""
    os.sync()  # pages that are not written yet would remain
    if kind == "all":
        Path("/proc/sys/vm/drop_caches").write_text("1")
    for path in engine.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            with contextlib.suppress(OSError):  # some file systems cannot tell
                if any(is_cached(file.fileno(), at) for at in range(0, path.stat().st_size, 1 << 30)):
                    raise RuntimeError(f"{path} is still in the page cache")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", help="a folder with the config.json of a model")
    source.add_argument("--engine", type=Path, help="an engine with weights")
    parser.add_argument("--cold", choices=["weights", "all"], help="what is removed from the page cache before each start")
    parser.add_argument("--quantize")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    starts = []
    with tempfile.TemporaryDirectory() as folder:
        engine = args.engine or build_engine(args, Path(folder))
        for _ in range(args.repeats):
            if args.cold:
                empty_page_cache(engine, args.cold)
            starts.append(start(engine))
            print(f"ready after {starts[-1]['ready']} s", flush=True)
        if args.cold:
            empty_page_cache(engine, args.cold)
        import_torch_s = seconds_of_import("torch")
        about = provenance(engine, args.device)
    counted = starts if args.cold else starts[1:]
    ready_s = statistics.median(found["ready"] for found in counted)
    result = {**about, "cold": args.cold, "import_torch_s": import_torch_s, "ready_s": ready_s, "starts": starts}
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
