"""Compares Stoker with llama.cpp on this CPU: the same Q4_1 file of SmolLM2-135M-Instruct and the same number of threads.

Each has its own process, runs alternate, and the best of each counts, because other work on the machine only makes runs slower.
llama.cpp is measured without a sampler: its tokens are the largest logits. Stoker is measured with its executor. Needs a Python with
llama-cpp-python, which is compiled for this processor when it is installed:

    CMAKE_ARGS=-DGGML_NATIVE=ON pip install llama-cpp-python==0.3.36

PYTHONPATH=src python benchmarks/cpu_llama_cpp.py --llama-python PATH/python --json benchmarks/results/cpu_llama_cpp.json

With --gguf, both read another file instead, for example one with random weights on a machine without a network.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHORT, NEW, LONG = 16, 128, 512
TARGETS = {"decode": 1.3, "prompt": 1.8}


def prompts() -> tuple[list[int], list[int]]:
    draw = random.Random(1)
    return tuple([draw.randrange(100, 49000) for _ in range(length)] for length in (SHORT, LONG))  # type: ignore[return-value]


def llama_cpp(path: str, threads: int) -> tuple[Callable[[], object], Callable[[], object], str]:
    """Functions that decode NEW tokens after a prompt of SHORT, and that process a prompt of LONG; the version."""
    import llama_cpp
    import numpy as np
    from llama_cpp import llama_cpp as lib

    lib.llama_log_set(SILENT := lib.llama_log_callback(lambda *_: None), None)
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads, params.n_threads_batch = 1024, LONG, LONG, threads, threads
    context, vocab = lib.llama_init_from_model(model, params), lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    short, long = prompts()

    def process(ids: list[int]) -> int:
        tokens = (lib.llama_token * len(ids))(*ids)  # the batch has its address only
        assert lib.llama_decode(context, lib.llama_batch_get_one(tokens, len(ids))) == 0
        return int(np.ctypeslib.as_array(lib.llama_get_logits_ith(context, -1), (vocab,)).argmax())

    def start() -> None:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)

    def decode() -> None:
        start()
        newest = process(short)
        for _ in range(NEW - 1):
            newest = process([newest])

    def prompt() -> object:
        start()
        return process(long), SILENT

    return decode, prompt, f"llama-cpp-python {llama_cpp.__version__}: {lib.llama_print_system_info().decode()}"


def stoker(path: str, threads: int) -> tuple[Callable[[], object], Callable[[], object], str]:
    """The same for an engine directory."""
    import torch

    from stoker import LLM, SamplingParams

    llm = LLM(path, kv_cache_tokens=4096, num_threads=threads, prefix_reuse=False)  # the same prompts are timed several times
    short, long = prompts()
    return (
        lambda: llm.generate(short, SamplingParams(max_tokens=NEW, ignore_eos=True)),
        lambda: llm.generate(long, SamplingParams(max_tokens=1, ignore_eos=True)),
        f"torch {torch.__version__}",
    )


def serve(name: str, path: str, threads: int) -> None:
    """The measured process: each line of the standard input is a measure to run, and is answered by [wall seconds, CPU seconds]."""
    decode, prompt, version = {"llama.cpp": llama_cpp, "stoker": stoker}[name](path, threads)
    print(json.dumps(version), flush=True)
    for line in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        {"decode": decode, "prompt": prompt}[line.strip()]()
        print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]), flush=True)


class Measured:
    """A process that runs `serve`."""

    def __init__(self, python: str, name: str, path: Path, threads: int) -> None:
        command = [python, "-X", "faulthandler", __file__, "--serve", name, str(path), str(threads)]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True)
        self.version = self._answer()
        self.best: dict[str, list[float]] = {}

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.errors.seek(0)
            raise RuntimeError(f"{self.process.args} ended with {self.process.wait()}:\n{self.errors.read()[-4000:]}")
        return json.loads(line)

    def run(self, measure: str) -> None:
        assert self.process.stdin is not None
        print(measure, file=self.process.stdin, flush=True)
        found = self._answer()
        self.best[measure] = [min(both) for both in zip(found, self.best.get(measure, found), strict=True)]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        self.errors.close()


def compare(paths: dict[str, Path], pythons: dict[str, str], threads: int, rounds: int) -> dict[str, Any]:
    """Tokens per second and CPU milliseconds per token of both, and the ratios of the speeds."""
    sides = {name: Measured(pythons[name], name, paths[name], threads) for name in paths}
    for _ in range(rounds):
        for measure in TARGETS:
            for side in sides.values():
                side.run(measure)
    row: dict[str, Any] = {"threads": threads, "versions": {name: side.version for name, side in sides.items()}}
    for measure, count in (("decode", NEW), ("prompt", LONG)):
        speed = {name: count / side.best[measure][0] for name, side in sides.items()}
        row[measure] = {
            "tokens_per_s": speed,
            "cpu_ms_per_token": {name: side.best[measure][1] / count * 1e3 for name, side in sides.items()},
            "ratio": speed["stoker"] / speed["llama.cpp"],
            "target": TARGETS[measure],
        }
    for side in sides.values():
        side.close()
    print(json.dumps({name: row[name] for name in ("threads", *TARGETS)}), flush=True)
    return row


def main() -> None:
    from stoker.builder.build import build_cached
    from stoker.builder.config import BuildConfig
    from stoker.cli.benchmark.results import provenance
    from stoker.cli.default_model import default_checkpoint

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-python", required=True, help="a Python that has llama-cpp-python")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--gguf", type=Path, help="a file with the same vocabulary; default: the published one, which is downloaded")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    gguf = args.gguf or default_checkpoint()
    engine = build_cached(gguf, BuildConfig(device="cpu", quantization="AS_STORED"), verify="files").path
    paths, pythons = {"llama.cpp": gguf, "stoker": engine}, {"llama.cpp": args.llama_python, "stoker": sys.executable}
    results = {
        **provenance(),
        "processors": sorted(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "file": gguf.name,
        "bytes": {
            name: sum(file.stat().st_size for file in ([path] if path.is_file() else path.glob("*.safetensors")))
            for name, path in paths.items()
        },
        "rows": [compare(paths, pythons, threads, args.rounds) for threads in args.threads],
    }
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main()
