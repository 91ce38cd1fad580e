"""Generate tokens with one rank and with two data-parallel ranks, and assert that they are equal.

Arguments: model, device, "graphs" or "eager", an empty folder, a folder with a tokenizer. A process of its own, because a process is in one
world of NCCL ranks (`stoker.distributed.world`).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "parity"))
sys.path.append(str(Path(__file__).parents[1] / "parallel"))

from cases import CASES, POSITIONS
from rank_executors import generate, load
from test_data_parallel import MODELS, prompts

from stoker.base.config import Limits, Mapping
from stoker.builder.build import build
from stoker.builder.config import BuildConfig


def main(name: str, device: str, cuda_graphs: str, folder: str, tokenizer: str) -> None:
    """In float32, so that the order of sums does not change a greedy token. Tokens under load equal those alone."""
    row, variant, _ = MODELS[name]
    CASES[row, variant]().save(Path(folder, "hf"))
    limits = Limits(max_input_len=POSITIONS // 2, max_output_len=POSITIONS // 2, max_num_tokens=64, max_batch_size=4)
    found = {}
    for out, mapping in (("one", Mapping()), ("dp", Mapping(data_parallel=2, expert_parallel=True))):
        config = BuildConfig(tokenizer=tokenizer, device=device, dtype="float32", limits=limits, mapping=mapping)
        engine = build(Path(folder, "hf"), Path(folder, out), config, verify="none")
        executor = load(engine.path, kv_cache_tokens=1024, policy="max_utilization", cuda_graphs=cuda_graphs == "graphs")
        try:
            alone = [generate(executor, [prompt], 24)[0] for prompt in prompts()[:3]]
            found[out] = generate(executor, prompts(), 24)
            assert found[out][:3] == alone
            sampled = generate(executor, prompts(), 8, temperature=1.0, seed=3)
            assert [len(tokens) for tokens in sampled] == [8] * len(sampled)
        finally:
            executor.close()
    assert found["dp"] == found["one"]


if __name__ == "__main__":
    main(*sys.argv[1:])
