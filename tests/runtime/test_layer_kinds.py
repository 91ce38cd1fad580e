"""A few layers stand for all of a stage when memory is measured and before a capture."""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from stoker.base.config import Limits, RuntimeConfig
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.distributed.world import ALONE_WORLD
from stoker.engine.reader import Engine
from stoker.runtime.worker import layer_kinds
from stoker.runtime.worker.dummy_step import Bounds, allocate_dummy_step
from stoker.runtime.worker.inputs import Shape
from stoker.runtime.worker.layer_kinds import representative_layers
from stoker.runtime.worker.rank import largest_steps, load_rank

SIZES = {
    "hidden_size": 64, "intermediate_size": 160, "max_position_embeddings": 1024, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 128, "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 1, "num_hidden_layers": 8,
}  # fmt: skip
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "tie_word_embeddings": False} | SIZES
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_act": "silu", "tie_word_embeddings": False,
    "num_local_experts": 4, "num_experts_per_tok": 2,
} | SIZES  # fmt: skip
GEMMA = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 32,
    "query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
} | SIZES  # fmt: skip
LIMITS = Limits(max_batch_size=8, max_input_len=200, max_output_len=56, max_num_tokens=256, tokens_per_block=16)


def runner_of(config: dict[str, Any], folder: Path, quantization: str | None = None) -> Any:
    """(a rank with random weights, its runner on the CPU)."""
    (folder / "config.json").write_text(json.dumps(config))
    settings = BuildConfig(device="cpu", dummy_weights=True, limits=LIMITS, quantization=quantization)
    engine = Engine.open(build(folder, folder / "engine", settings, verify="none").path)
    loaded = load_rank(engine, RuntimeConfig(kv_cache_tokens=512), torch.device("cpu"), ALONE_WORLD)
    return loaded, loaded.runner(32)


def peak_bytes(run: Callable[[], None]) -> int:
    """The largest sum of what `run` has allocated and not yet freed on the CPU, without what a collection of garbage would free."""
    run()
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            run()
    finally:
        gc.enable()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


@pytest.mark.parametrize(
    ("kinds", "indices"),
    [
        ("AAAAAAAA", [0, 1, 7]),
        ("ABABABAB", [0, 1, 2, 7]),
        ("BAAAAAAA", [0, 1, 2, 7]),  # dense layers first
        ("AAAB", None),  # nothing is left out
        ("AAABAAABAAAB", None),  # without the second A between two, the third one would be beside B
        ("AAA", None),
        ("A", None),
        ("", None),
    ],
)
def test_each_layer_is_represented_between_the_same_neighbours(
    monkeypatch: pytest.MonkeyPatch, kinds: str, indices: list[int] | None
) -> None:
    monkeypatch.setattr(layer_kinds, "_kind", lambda engine, layer: kinds[layer - 10])
    assert representative_layers(None, range(10, 10 + len(kinds))) == indices  # type: ignore[arg-type]
    if indices is not None:
        chosen = "".join(kinds[i] for i in indices)
        assert {*zip(" " + kinds, kinds, kinds[1:] + " ", strict=False)} == {*zip(" " + chosen, chosen, chosen[1:] + " ", strict=False)}


@pytest.mark.parametrize(
    ("config", "quantization", "indices"),
    [(LLAMA, None, 3), (LLAMA, "FP8", 3), (LLAMA, "WEIGHTS_ONLY_INT4", 3), (MIXTRAL, None, 3), (GEMMA, None, 4)],
)
@torch.inference_mode()
def test_representatives_need_as_much_memory_as_all(tmp_path: Path, config: dict[str, Any], quantization: str | None, indices: int) -> None:
    loaded, runner = runner_of(config, tmp_path, quantization)
    assert len(runner._representatives) == indices and len(runner.model.layers) == 8
    for shape, bounds in largest_steps(loaded.capacity):
        run = partial(runner.run_dummy_step_with_sampling, shape, bounds)
        needed = peak_bytes(partial(run, all_layers=True))
        assert needed == peak_bytes(partial(run, all_layers=False)) > 4 * shape.tokens * 64


@torch.inference_mode()
def test_later_steps_have_all_layers(tmp_path: Path) -> None:
    _, runner = runner_of(LLAMA, tmp_path)
    model, counted = runner.model, list[None]()
    parts = model.layers, model.fused_layers, model.overlapped_layers
    shape, bounds = Shape(64, 8, is_decode=False), Bounds(0, 64, 256)
    model.after_layer = lambda: counted.append(None)
    runner.run_dummy_step_with_sampling(shape, bounds, all_layers=False)
    assert len(counted) == 3
    runner.run_dummy_step_with_sampling(shape, bounds)
    assert len(counted) == 3 + 8
    runner._launch_all(allocate_dummy_step(shape, bounds, 16, runner.inputs.num_rows, runner.device), 0)
    assert len(counted) == 3 + 8 + 3, "what is launched before a capture"
    with pytest.raises(ZeroDivisionError), model.only_layers([0, 7]):
        assert len(model.layers) == 2
        raise ZeroDivisionError
    assert parts == (model.layers, model.fused_layers, model.overlapped_layers) and len(model.fused_layers.layers) == 8


def test_a_rank_whose_drafter_may_read_all_layers_runs_all(tiny_engine: Path) -> None:
    """On followers, too: they cannot know which layers it reads, and take part in the collectives of all."""
    engine = Engine.open(tiny_engine)
    config = RuntimeConfig(kv_cache_tokens=512, speculate=str(tiny_engine), draft_tokens=2)
    assert load_rank(engine, config, torch.device("cpu"), ALONE_WORLD).runner(8)._representatives is None
