"""What is launched before a capture, with a few layers that stand for all, launches every kernel of the captured step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

PUBLISHED = Path(__file__).parents[1] / "parity" / "published"

# Prints a line for each [folder, ranks, settings]: the number of layers that are launched before captures and of all, the smallest number
# of different calls of a captured step, and what captured steps call that was not called before: Triton's kernels with their specialization
# (by the name of their folder), and operations of torch with the shapes, strides and types of their tensors. Tracing sets Triton's
# process-wide target. Each model has a process of its own, which forks after the imports: they take as long as a model.
CAPTURED = """
import json, os, sys
from pathlib import Path
import torch
import torch._dynamo  # operations on meta tensors import it
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from stoker.base.config import Limits, Mapping, RuntimeConfig
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.engine.reader import Engine
from stoker.kernels import ops
from stoker.kernels.triton.aot.compiler import collecting
from stoker.runtime.worker import aot_trace
from stoker.runtime.worker.layer_kinds import representative_layers

class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.called = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        arguments = tree_map(lambda x: (x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x, (args, kwargs))
        self.called.add(f"{operation} {arguments}")
        return operation(*args, **(kwargs or {}))

def calls(launch):
    with collecting(90) as jobs, Operations() as operations:
        launch()
    return {f"{job.name} {folder}" for folder, job in jobs.items()} | operations.called

def capture(runner, shape):
    for all_greedy in (True, False):
        for _ in runner._forward(runner.graphs._dummy_step(shape), shape.max_drafts, all_greedy):
            pass

def examine(folder, ranks, settings):
    limits = Limits(max_batch_size=24, max_input_len=200, max_output_len=56, max_num_tokens=128)
    config = BuildConfig(
        device="cuda", compute_capability="9.0", dtype="bfloat16", dummy_weights=True, limits=limits,
        mapping=Mapping(tensor_parallel=ranks), **settings,
    )
    engine = Engine.open(build(folder, Path(folder, "engine"), config, verify="none").path)
    layers, missing, counts = range(engine.config.model.num_layers), set(), []
    with torch.inference_mode(), collecting(90):
        for rank in range(ranks):
            runner = aot_trace._runner(engine, RuntimeConfig(), rank)
            runner._representatives = representative_layers(engine, layers)
            for shape in runner.graphs.shapes.all():
                launched = calls(lambda: runner.graphs.trace(shape))
                captured = calls(lambda: capture(runner, shape))
                missing |= captured - launched
                counts.append(len(captured))
    return [len(runner._representatives or layers), len(runner.model.layers), min(counts), sorted(missing)]

ops.use_launchers()
aot_trace.distinct_layers = lambda engine, layers, fused_layers: list(range(len(layers)))
for each in sys.argv[1:]:
    if not (child := os.fork()):
        print(json.dumps(examine(*json.loads(each))), flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(1)
"""

MODELS: dict[str, tuple[dict[str, Any], int, dict[str, str], int]] = {  # changes, ranks, settings, number of layers before a capture
    "Llama-3.1-70B-Instruct": ({"num_hidden_layers": 8}, 2, {"quantization": "FP8_KV"}, 3),  # fused layers
    "Mixtral-8x7B-v0.1": ({"num_hidden_layers": 8}, 2, {"quantization": "AWQ", "kv_cache_dtype": "int8"}, 3),
    "DeepSeek-V2-Lite": ({"num_hidden_layers": 8}, 2, {"quantization": "FP8"}, 4),  # a dense layer, then experts
    "gemma-3-1b-it": ({"num_hidden_layers": 14}, 1, {}, 6),  # sliding windows between full attention
    "gpt-oss-120b": ({"num_hidden_layers": 8}, 1, {}, 4),
    "Falcon-H1-0.5B-Instruct": ({"num_hidden_layers": 8}, 1, {}, 3),  # recurrent states beside attention
    "NVIDIA-Nemotron-3-Nano-30B-A3B": ({}, 1, {}, 7),  # recurrent layers, attention and experts
}


def test_a_capture_calls_nothing_new(tmp_path: Path, uninterpreted: Callable[..., str]) -> None:
    arguments = []
    for name, (changes, ranks, settings, _) in MODELS.items():
        model = json.loads((PUBLISHED / f"{name}.json").read_text()) | changes
        if isinstance(kinds := model.get("layer_types"), list):
            model["layer_types"] = kinds[: model["num_hidden_layers"]]
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(model))
        arguments.append(json.dumps([str(tmp_path / name), ranks, settings]))
    lines = uninterpreted("-c", CAPTURED, *arguments).splitlines()
    for (name, (*_, num_launched)), line in zip(MODELS.items(), lines, strict=True):
        launched, num_layers, num_calls, missing = json.loads(line)
        assert missing == [], name
        assert launched == num_launched < num_layers, name
        assert num_calls > 20, name
