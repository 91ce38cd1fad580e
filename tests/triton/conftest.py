from __future__ import annotations

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(TESTS / "server"), str(TESTS / "frontend"), str(TESTS / "builder")]


@pytest.fixture(scope="session")
def engine_with_beams(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 320 ids, 256 positions, blocks of 16 tokens and at most 3 beams. Read-only."""
    import tiny

    from stoker.base.config import Limits
    from stoker.builder.build import build
    from stoker.builder.config import BuildConfig

    checkpoint = tiny.save(tiny.model(), tmp_path_factory.mktemp("checkpoint"))
    limits = Limits(max_batch_size=8, max_input_len=100, max_output_len=128, max_num_tokens=128, max_beam_width=3, tokens_per_block=16)
    return build(checkpoint, tmp_path_factory.mktemp("engine") / "tiny", BuildConfig(device="cpu", limits=limits), verify="files").path
