"""Starts on the device: kernels that the build compiled, the memory table, and the breakdown of a step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stoker.base.config import Limits, RuntimeConfig
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.profiling.batch_run import random_requests, run_batch
from stoker.profiling.breakdown import break_down
from stoker.profiling.mailbox import SynchronousMailbox
from stoker.runtime.aot import compile_kernels
from stoker.runtime.load import load_executor

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 32000, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "eos_token_id": 1, "bos_token_id": 0,
}  # fmt: skip
LIMITS = Limits(max_batch_size=64, max_input_len=4096, max_output_len=1024, max_num_tokens=4096)

# Every kind of step: captured decodes of many sizes, short and long prompts, draws, log-probabilities. Prints what was compiled.
START = """
import json, sys
from stoker.base.config import RuntimeConfig
from stoker.base.types import SamplingParams
from stoker.kernels.triton.aot.kernel_cache import counts
from stoker.profiling.mailbox import SynchronousMailbox
from stoker.runtime.load import load_executor
from stoker.profiling.batch_run import random_requests
from stoker.runtime.request import TokenRequest
executor = load_executor(sys.argv[1], RuntimeConfig(prefix_reuse=False), SynchronousMailbox)
ready = counts.cached, counts.compiled
mailbox, number = executor.mailbox, 0
for params in (SamplingParams(max_tokens=6, ignore_eos=True), SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.8, top_p=0.9),
               SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.8, logprobs=3, frequency_penalty=0.5)):
    for count, length in ((1, 7), (1, 128), (3, 40), (17, 33), (33, 100), (50, 200), (64, 16), (2, 3000), (1, 4096)):
        number += 1
        requests = random_requests(count, length, 6, executor.info.vocab_size, seed=number)
        mailbox.submit([TokenRequest(request_id=r.request_id, prompt_ids=r.prompt_ids, params=params) for r in requests])
        executor.turn(0.0)
        while executor.is_busy:
            executor.turn(0.0)
        outputs = mailbox.pop_outputs()
        assert all(output.error is None for output in outputs)
        assert sum(len(output.token_ids) for output in outputs) == 6 * count
print(json.dumps({"ready": ready, "end": [counts.cached, counts.compiled]}))
executor.close()
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    (folder / "config.json").write_text(json.dumps(MODEL))
    config = BuildConfig(device="cuda", dtype="bfloat16", dummy_weights=True, limits=LIMITS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder / "built"))
        return build(folder, folder / "engine", config, verify="none", kernels=compile_kernels).path


def start(engine: Path, cache_dir: Path) -> dict[str, list[int]]:
    variables = {**os.environ, "TRITON_CACHE_DIR": str(cache_dir), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", START, str(engine)], env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_first_start_with_an_empty_cache_compiles_nothing(engine: Path, tmp_path: Path) -> None:
    first = start(engine, tmp_path / "fresh")
    print("kernels at the first start (cached, compiled):", first)
    assert first["ready"][0] > 10 and first["ready"][1] == 0, "the warm-up launches kernels that the build did not compile"
    assert first["end"][1] == 0, "steps launch kernels that the build did not compile"
    second = start(engine, tmp_path / "fresh")
    assert second["end"][1] == 0


@pytest.mark.timeout(300)  # the start compiles about 50 kernels, one after another
def test_the_ahead_of_time_trace_lists_all_launched_kernels(engine: Path) -> None:
    """Without the archive in the engine a start compiles its kernels; their cache keys are among those that the build has compiled."""
    from stoker.kernels.triton.aot import kernel_cache as cache

    listed = {path.name for path in (engine.parent / "built").iterdir() if list(path.glob("*.cubin"))}
    (engine.parent / "own").mkdir()
    config = json.loads((engine / "config.json").read_text())
    bare = engine.parent / "bare"
    bare.mkdir()
    config["files"] = {name: record for name, record in config["files"].items() if name != cache.ARCHIVE}
    (bare / "config.json").write_text(json.dumps(config))
    for name in config["files"]:
        (bare / name).write_bytes((engine / name).read_bytes())
    start(bare, engine.parent / "own")
    launched = {path.name for path in (engine.parent / "own").iterdir() if list(path.glob("*.cubin"))}
    assert launched <= listed, [sorted(p.name for p in (engine.parent / "own" / folder).glob("*.json")) for folder in launched - listed]


def test_a_capture_loads_a_kernel_that_was_not_launched_before() -> None:
    """Only a few layers are launched before a capture. If one needed another kernel, that would be compiled and loaded within it."""
    import triton
    import triton.language as tl

    @triton.jit
    def add_one_kernel(x_ptr, size: tl.constexpr):
        i = tl.arange(0, size)
        tl.store(x_ptr + i, tl.load(x_ptr + i) + 1)

    x, stream, graph = torch.zeros(64, device="cuda"), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):  # as `Graphs` captures
        add_one_kernel[(1,)](x, 64)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [2.0] * 64


def test_steps_fit_the_memory_table(engine: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        executor = load_executor(engine, RuntimeConfig(kv_cache_tokens=1 << 17), SynchronousMailbox)
    table = next(record.getMessage() for record in caplog.records if record.getMessage().startswith("memory of"))
    print(table)
    rows = {line[2:14].strip(): float(line.split("GiB")[0].split()[-1]) for line in table.splitlines()[1:]}
    assert rows["activations"] > 0.01 and rows["graphs"] > 0 and rows["left over"] > 0
    assert sum(size for name, size in rows.items() if name != "total") == pytest.approx(rows["total"], abs=0.01)
    allocated = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for count, length in ((64, 1024), (1, 4096), (64, 16)):
        run_batch(executor, random_requests(count, length, 8, executor.info.vocab_size, seed=count + length), 8)
    grown = (torch.cuda.max_memory_allocated() - allocated) / 2**30
    assert grown <= rows["activations"] + 0.01, "a step needed more memory than the largest step that was measured"
    executor.close()


def test_all_captures_fit_the_reserve_of_graphs(engine: Path) -> None:
    executor = load_executor(engine, RuntimeConfig(kv_cache_tokens=1 << 17), SynchronousMailbox)
    graphs = executor.runner.graphs  # type: ignore[attr-defined]
    before = free_bytes()
    executor.capture_all()
    assert all(map(graphs.is_captured, graphs.shapes.all()))
    assert before - free_bytes() <= executor.info.memory["graphs"]
    run_batch(executor, random_requests(50, 100, 8, executor.info.vocab_size, seed=1), 8)
    executor.close()


def free_bytes() -> int:
    """The free memory of the device, without what the allocator has cached."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def test_a_breakdown_lists_every_product(engine: Path) -> None:
    executor = load_executor(engine, RuntimeConfig(kv_cache_tokens=1 << 17, prefix_reuse=False), SynchronousMailbox)
    assert isinstance(executor.mailbox, SynchronousMailbox)
    executor.mailbox.submit(random_requests(32, 200, 120, executor.info.vocab_size, seed=1))
    for _ in range(20):
        executor.turn(0.0)
    found = break_down(executor, 20)
    print(found)
    assert found.rows == found.tokens == 32 and found.num_steps == 20
    assert 0 < found.busy_ms <= 1.5 * found.step_ms and 0 <= found.gap_share < 1
    products = [kernel for kernel in found.kernels if "×" in kernel.name]
    assert sum(round(kernel.count) for kernel in products) == 4 * 4 + 1  # qkv, out, up, down; the head
    if torch.cuda.get_device_name().startswith("NVIDIA H200"):
        assert all(kernel.roofline is not None and 0 < kernel.roofline <= 1.1 for kernel in products)
    while executor.is_busy:
        executor.turn(0.0)
    executor.close()
