"""One executor computes prompts for another one on the same GPU: the tokens are those of one executor. Not run on a GPU yet."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("builder", "transfer")]


@pytest.mark.parametrize("backend", ["tcp", "nixl"])
def test_blocks_move_between_caches_on_a_gpu(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tiny
    from pairs import Pair, request

    from stoker.base.config import Limits
    from stoker.builder.build import build
    from stoker.builder.config import BuildConfig

    if backend == "nixl":
        pytest.importorskip("nixl")
    monkeypatch.setenv("STOKER_CLUSTER_TOKEN", "a shared secret of these tests")
    checkpoint = tiny.save(tiny.model(), tmp_path / "checkpoint")
    limits = Limits(max_batch_size=8, max_input_len=180, max_output_len=64, max_num_tokens=128, tokens_per_block=16)
    engine = build(checkpoint, tmp_path / "engine", BuildConfig(device="cuda", dtype="float32", limits=limits), verify="files").path
    both, alone = Pair(engine, transfer_backend=backend), Pair(engine, transfer_backend="tcp")
    dice = random.Random(0)
    for params in ({}, {"temperature": 0.9, "seed": 7, "n": 2}):
        wanted = request([dice.randrange(3, 300) for _ in range(150)], **params)
        found = both.generate(wanted)
        assert (both.cached, both.decode.stats.num_failed_imports) == (144, 0)
        assert found == alone.prefill.generate(wanted)
    both.close()
    alone.close()
