"""Kernels that are compiled ahead of time for an engine of several ranks: every rank finds those that it launches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.base.config import Limits, Mapping
from stoker.builder.build import build
from stoker.builder.config import BuildConfig

# Biases of row-split linears are on one rank. The others launch kernels without bias.
MODEL = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new", "bos_token_id": 0, "eos_token_id": 1,
    "layer_norm_epsilon": 1e-5, "n_ctx": 64, "n_embd": 256, "n_head": 4, "n_layer": 1, "n_positions": 64, "vocab_size": 128,
}  # fmt: skip

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 8192, "intermediate_size": 2048,
    "max_position_embeddings": 8192, "num_attention_heads": 64, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 128,
    "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False, "vocab_size": 128, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip

# The launches of two ranks, and those that the build lists, by their folders in Triton's cache.
LISTS = """
import json, sys
import torch
from stoker.base.config import RuntimeConfig
from stoker.engine.reader import Engine
from stoker.kernels import ops
from stoker.kernels.triton.aot.compiler import collecting
from stoker.kernels.triton.all_reduce import check_sums
from stoker.runtime.worker import aot_trace
engine = Engine.open(sys.argv[1])
listed = aot_trace.kernels_of(engine, 90)
launched = {}
for rank in (1, 3):
    with torch.inference_mode(), collecting(90) as jobs:
        runner = aot_trace._runner(engine, RuntimeConfig(), rank)
        aot_trace._trace(runner)
    with collecting(90) as checked:
        if (inboxes := runner.world.tensor.inboxes) is not None:
            check_sums(inboxes, aot_trace.META, 0)
    launched[rank] = {folder: job.name for folder, job in (jobs | checked).items()}
json.dump([list(listed), launched], sys.stdout)
"""


def test_every_rank_finds_its_kernels(tmp_path: Path, uninterpreted: Callable[..., str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    limits = Limits(max_batch_size=1, max_input_len=48, max_output_len=16, max_num_tokens=48)
    config = BuildConfig(
        device="cuda", compute_capability="9.0", dtype="bfloat16", dummy_weights=True, limits=limits,
        mapping=Mapping(tensor_parallel=4),
    )  # fmt: skip
    build(tmp_path, tmp_path / "engine", config, verify="none")
    listed, launched = json.loads(uninterpreted("-c", LISTS, tmp_path / "engine"))
    missing = {rank: sorted(name for folder, name in jobs.items() if folder not in listed) for rank, jobs in launched.items()}
    assert not any(missing.values()), missing
    assert all(list(jobs.values()).count("all_reduce_kernel") > 2 for jobs in launched.values())


# The names of the kernels that the build lists.
NAMES = """
import json, sys
from stoker.engine.reader import Engine
from stoker.runtime.worker import aot_trace
json.dump(sorted({job.name for job in aot_trace.kernels_of(Engine.open(sys.argv[1]), 90).values()}), sys.stdout)
"""


@pytest.mark.parametrize(("max_num_tokens", "overlaps"), [(8192, True), (2048, False)])
def test_sums_that_overlap_with_products_are_compiled(
    max_num_tokens: int, overlaps: bool, tmp_path: Path, uninterpreted: Callable[..., str]
) -> None:
    """The kernel that adds the summands of two ranks is listed if steps are long enough."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    limits = Limits(max_batch_size=1, max_input_len=4096, max_output_len=16, max_num_tokens=max_num_tokens)
    config = BuildConfig(
        device="cuda", compute_capability="9.0", dtype="bfloat16", dummy_weights=True, limits=limits, mapping=Mapping(tensor_parallel=2)
    )
    build(tmp_path, tmp_path / "engine", config, verify="none")
    assert ("add_summands_kernel" in json.loads(uninterpreted("-c", NAMES, tmp_path / "engine"))) == overlaps
