"""Generate with draft heads on two GPUs, and assert that tokens are those of plain decoding and drafts are accepted.

Arguments: mapping and kind of heads as in tests/parallel/test_rank_draft_heads.py, "chain", "tree" or "dynamic", "graphs" or "eager", an
empty folder, a folder with a tokenizer.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("parity", "parallel", "runtime")]

from rank_executors import generate, load
from test_rank_draft_heads import COUNT, DYNAMIC, PROMPTS, TREE, build_llama


def main(name: str, kind: str, shape: str, cuda_graphs: str, folder: str, tokenizer: str) -> None:
    build_llama(Path(folder), Path(tokenizer), name, device="cuda")
    expected = [[prompt[-1] + 1 + i for i in range(COUNT)] for prompt in PROMPTS]
    executor = load(
        Path(folder, name),
        speculate=str(Path(folder, kind)),
        draft_tokens=5,
        adaptive_drafts=False,
        kv_cache_tokens=256,
        max_batch_size=2,
        draft_tree={"chain": None, "tree": TREE, "dynamic": DYNAMIC}[shape],
        cuda_graphs=cuda_graphs == "graphs",
    )
    try:
        assert generate(executor, PROMPTS, COUNT) == expected
        assert executor.snapshot().num_accepted_draft_tokens > 8
    finally:
        executor.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
