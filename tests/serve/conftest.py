from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / "builder"), str(Path(__file__).parents[1] / "server")]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama of 256 positions. Read only."""
    import tiny

    return tiny.save(tiny.model(), tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, new_cache: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(new_cache(tmp_path / "cache")))
    for name in ("HF_MODEL_ID", "OPTION_MODEL_ID", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
