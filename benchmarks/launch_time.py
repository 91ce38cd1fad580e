"""Measures the time in which the host launches a step that is not captured, and in which it captures one.

PYTHONPATH=src python benchmarks/launch_time.py --quantize NO_QUANT,FP8_KV --json results.json     without a GPU
PYTHONPATH=src python benchmarks/launch_time.py --quantize FP8_KV --gpu --json results.json        with one

Without a GPU, the real model runs a dummy step on meta tensors, and the real kernels for sm_90 are compiled and launched by Triton's own
launchers. Only the CUDA driver is replaced, by a library whose functions return success, and the library's GEMMs, by an allocation of the
result. What is missing of the time on a GPU are the calls of the driver, and the host's part of these GEMMs. The result is the CPU time of
a layer: the smallest of several runs, and the difference of two numbers of layers, so that the embedding and the head do not count.

With a GPU, the step and the captures of an engine are measured with the launches of `kernels.triton.launcher`, and with Triton's own, in
turns. The device is idle when a launch begins.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from stoker.base import logging
from stoker.base.config import Limits, RuntimeConfig
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.builder.prepare import prepare
from stoker.cli.benchmark.results import provenance
from stoker.engine.reader import Engine
from stoker.kernels import ops
from stoker.profiling.mailbox import SynchronousMailbox
from stoker.runtime.aot import compile_kernels
from stoker.runtime.load import load_executor
from stoker.runtime.worker import aot_trace
from stoker.runtime.worker.dummy_step import Bounds, allocate_dummy_step
from stoker.runtime.worker.inputs import Shape
from stoker.runtime.worker.model_runner import ModelRunner

CONFIG = Path(__file__).parent / "models" / "llama-3.1-8b"
LIMITS = Limits(max_batch_size=256, max_input_len=4096, max_output_len=4096, max_num_tokens=8192)

# Every function of the CUDA driver that Triton calls.
DRIVER = """
#include <stdint.h>
int launches;
int cuPointerGetAttribute(uint64_t *data, int attribute, uint64_t pointer) { *data = pointer; return 0; }
int cuLaunchKernelEx() { launches++; return 0; }
int cuCtxGetCurrent(uint64_t *context) { *context = 1; return 0; }
int cuCtxSetCurrent() { return 0; }
int cuCtxGetLimit() { return 0; }
int cuCtxSetLimit() { return 0; }
int cuDeviceGet(int *device) { *device = 0; return 0; }
int cuDeviceGetAttribute(int *value) { *value = 232448; return 0; }
int cuDevicePrimaryCtxRetain(uint64_t *context) { *context = 1; return 0; }
int cuFuncGetAttribute(int *value) { *value = 1024; return 0; }
int cuFuncSetAttribute() { return 0; }
int cuFuncSetCacheConfig() { return 0; }
int cuGetErrorString(int error, const char **text) { *text = "error"; return 0; }
int cuModuleGetFunction(uint64_t *function) { *function = 1; return 0; }
int cuModuleLoadData(uint64_t *module) { *module = 1; return 0; }
int cuOccupancyMaxActiveClusters(int *count) { *count = 1; return 0; }
int cuTensorMapEncodeTiled() { return 0; }
"""


class EmptyDriver(CudaDriver):
    """Triton's driver of NVIDIA GPUs, with an H200 as the only device."""

    def __init__(self) -> None:
        super().__init__()
        target = GPUTarget("cuda", 90, 32)
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0
        self.get_device_capability = lambda device: (9, 0)
        self.get_current_target = lambda: target


def load_empty_driver(folder: Path) -> ctypes.CDLL:
    """Build and load a CUDA driver whose functions do nothing, before Triton looks for one."""
    source, library = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-w", "-Wl,-soname,libcuda.so.1", source, "-o", library], check=True)
    triton.knobs.nvidia.libcuda_path = str(folder)
    return ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


@contextmanager
def without_library() -> Iterator[None]:
    """Replace the library's GEMMs, and what is computed in Python on meta tensors only, by allocations of their results."""

    def scaled_mm(x: Tensor, weight: Tensor, *scales: Tensor, out_dtype: torch.dtype, **options: Any) -> Tensor:
        return torch.empty((x.shape[0], weight.shape[1]), dtype=out_dtype, device=x.device)

    def mm(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.empty((x.shape[0], weight.shape[1]), dtype=x.dtype, device=x.device) if out is None else out

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)

    with (
        mock.patch.object(torch, "_scaled_mm", scaled_mm),
        mock.patch.object(torch, "mm", mm),
        mock.patch.object(torch, "addmm", lambda residual, x, weight: mm(x, weight)),
        mock.patch.object(torch.nn.functional, "linear", linear),
        mock.patch.object(Tensor, "add_", lambda self, other: self),
    ):
        yield


def model_launch(runner: ModelRunner, tokens: int, decodes: int) -> Callable[[], Tensor]:
    """A function that launches the model's kernels for a prompt of `tokens` tokens beside decodes, without sampling."""
    shape = Shape(tokens + decodes, decodes + (tokens > 0), is_decode=tokens == 0)
    bounds = Bounds(decodes, max(tokens, 1), LIMITS.max_input_len)
    width = -(-runner.max_seq_len // runner.inputs.block_size)
    batch = runner._resolve(allocate_dummy_step(shape, bounds, width, runner.inputs.num_rows, runner.device))
    return lambda: runner.model(batch, runner.caches)


def meta_runner(quantize: str, num_layers: int, folder: Path) -> ModelRunner:
    """A runner of 8B shapes with `num_layers` layers on the meta device."""
    config = json.loads((CONFIG / "config.json").read_text()) | {"num_hidden_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(config))
    settings = BuildConfig(
        device="cuda", compute_capability="9.0", dtype="bfloat16", dummy_weights=True, limits=LIMITS, quantization=quantize
    )
    engine = Engine(folder, prepare(folder, settings).config)
    with mock.patch.object(aot_trace, "distinct_layers", lambda engine, layers, fused_layers: list(layers)):
        return aot_trace._runner(engine, RuntimeConfig(), 0)


def without_gpu(quantize: str, tokens: int, decodes: int, layers: int, runs: int, folder: Path, launches: ctypes.c_int) -> dict[str, Any]:
    """The CPU time and the number of launches of a layer."""
    steps = [model_launch(meta_runner(quantize, number, folder), tokens, decodes) for number in (1, 1 + layers)]
    counts, times = [], ([], [])
    for step in steps:
        step()
        launches.value = 0
        step()
        counts.append(launches.value)
    for _ in range(runs):
        for step, measured in zip(steps, times, strict=True):
            started = time.process_time()
            step()
            measured.append(time.process_time() - started)
    layer_us = 1e6 * (min(times[1]) - min(times[0])) / layers
    number = (counts[1] - counts[0]) / layers
    row = {"layer_us": round(layer_us, 1), "triton_launches": number, "us_per_launch": round(layer_us / number, 1)}
    return {"quantize": quantize, "tokens": tokens, "decodes": decodes, **row}


def with_gpu(quantize: str, tokens: int, decodes: int, runs: int, folder: Path) -> dict[str, Any]:
    """Milliseconds in which a step of the 8B model is launched, and a few are captured, by Triton's own launches and by ours."""
    from stoker.kernels.triton import launcher

    settings = BuildConfig(dtype="bfloat16", dummy_weights=True, limits=LIMITS, device="cuda", quantization=quantize)
    build(CONFIG, folder / quantize, settings, verify="none", kernels=compile_kernels)
    executor = load_executor(folder / quantize, RuntimeConfig(prefix_reuse=False), SynchronousMailbox)
    runner: ModelRunner = executor.runner
    graphs, num_layers = runner.graphs, len(runner.model.layers)
    assert graphs is not None
    with torch.inference_mode():
        step = model_launch(runner, tokens, decodes)
    shapes = {"decodes_64": Shape(64, 64, is_decode=True), "tokens_1024": Shape(1024, graphs.shapes.mixed_rows[-1], is_decode=False)}
    ways = {"triton": launcher._run, "stoker": JITFunction.run}
    found: dict[str, dict[str, list[float]]] = {name: {"step": [], **{kind: [] for kind in shapes}} for name in ways}
    for number in range(runs + 1):
        for name, run in ways.items():
            with mock.patch.object(JITFunction, "run", run), torch.inference_mode():
                torch.cuda.synchronize()
                started = time.perf_counter()
                step()
                found[name]["step"].append(time.perf_counter() - started)
                for kind, shape in shapes.items() if number % 4 == 0 else ():
                    torch.cuda.synchronize()
                    graphs._captured.pop((shape, True), None)
                    graphs._captured.pop((shape, False), None)
                    started = time.perf_counter()
                    graphs.capture(shape)
                    found[name][kind].append(time.perf_counter() - started)
    executor.close()
    medians = {name: {kind: round(1e3 * statistics.median(times[1:]), 2) for kind, times in kinds.items()} for name, kinds in found.items()}
    return {"quantize": quantize, "tokens": tokens, "decodes": decodes, "layers": num_layers, "ms": medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantize", default="FP8_KV", help="recipes, such as NO_QUANT,FP8_KV")
    parser.add_argument("--steps", default="2048+128", help="prompt tokens + decodes of each step, such as 2048+128,0+64")
    parser.add_argument("--layers", type=int, default=6, help="without a GPU: the number of layers that are compared with one")
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    steps = [tuple(map(int, step.split("+"))) for step in args.steps.split(",")]
    if args.gpu and len(steps) > 1:
        parser.error(f"--steps {args.steps} has {len(steps)} steps, and --gpu measures one")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.gpu:
            logging.configure("INFO")
            for quantize in args.quantize.split(","):
                rows.append(with_gpu(quantize, *steps[0], args.runs, folder))
                print(json.dumps(rows[-1]), flush=True)
        else:
            library = load_empty_driver(folder)
            driver.set_active(EmptyDriver())
            ops.use_launchers()
            launches = ctypes.c_int.in_dll(library, "launches")
            with without_library(), torch.inference_mode():
                for quantize in args.quantize.split(","):
                    for tokens, decodes in steps:
                        rows.append(without_gpu(quantize, tokens, decodes, args.layers, args.runs, folder, launches))
                        print(json.dumps(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps({**provenance(device="cuda" if args.gpu else "cpu"), "steps": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
