from __future__ import annotations

import sys
from pathlib import Path

import pytest

AREAS = ("builder", "console", "frontend")
sys.path[:0] = [str(Path(__file__).parent), *(str(Path(__file__).parents[1] / area) for area in AREAS)]


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine of a tiny random Llama, which tests must not modify."""
    import tiny

    from stoker.base.config import Limits
    from stoker.builder.build import build
    from stoker.builder.config import BuildConfig

    checkpoint = tiny.save(tiny.model(), tmp_path_factory.mktemp("checkpoint"))
    limits = Limits(max_batch_size=8, max_input_len=128, max_output_len=128, max_num_tokens=256, tokens_per_block=16)
    out = tmp_path_factory.mktemp("engines") / "tiny"
    build(checkpoint, out, BuildConfig(dtype="float32", limits=limits), verify="files")
    return out
