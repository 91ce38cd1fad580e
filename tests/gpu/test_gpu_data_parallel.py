"""Data-parallel attention on two GPUs: NCCL inside CUDA graphs of one shape, ids broadcast to the other rank. Needs two GPUs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

for folder in ("parity", "parallel"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has less than two CUDA devices")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", ["Mixtral", "DeepSeek-V3"])
def test_tokens_under_load_equal_those_alone(name: str, cuda_graphs: bool, tmp_path: Path, tokenizer: Path) -> None:
    """In float32, so that the order of sums does not change a greedy token."""
    from cases import CASES, POSITIONS
    from rank_executors import generate, load
    from test_data_parallel import MODELS, prompts

    from stoker.base.config import Limits, Mapping
    from stoker.builder.build import build
    from stoker.builder.config import BuildConfig

    row, variant, _ = MODELS[name]
    CASES[row, variant]().save(tmp_path / "hf")
    limits = Limits(max_input_len=POSITIONS // 2, max_output_len=POSITIONS // 2, max_num_tokens=64, max_batch_size=4)
    found = {}
    for out, mapping in (("one", Mapping()), ("dp", Mapping(data_parallel=2, expert_parallel=True))):
        config = BuildConfig(tokenizer=str(tokenizer), device="cuda", dtype="float32", limits=limits, mapping=mapping)
        build(tmp_path / "hf", tmp_path / out, config, verify="none")
        executor = load(tmp_path / out, kv_cache_tokens=1024, policy="max_utilization", cuda_graphs=cuda_graphs)
        try:
            alone = [generate(executor, [prompt], 24)[0] for prompt in prompts()[:3]]
            found[out] = generate(executor, prompts(), 24)
            assert found[out][:3] == alone
            sampled = generate(executor, prompts(), 8, temperature=1.0, seed=3)
            assert [len(tokens) for tokens in sampled] == [8] * len(sampled)
        finally:
            executor.close()
    assert found["dp"] == found["one"]
