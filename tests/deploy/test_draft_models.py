"""A draft model in the settings of a deployment: an engine is used as it is, and one is built from a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "builder"))

import tiny

from stoker.base.config import RuntimeConfig
from stoker.base.errors import ConfigError
from stoker.cli.prepare_server import check_engine, prepare_server, read_deployment
from stoker.runtime.worker.draft_sources import is_drafter
from stoker.server.settings import ServerSettings


def test_an_engine_is_built_from_a_checkpoint(tiny_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for the model itself, through the cache. A dry run builds nothing, but checks the rest."""
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    checkpoint = tiny.save(tiny.model(num_hidden_layers=1), tmp_path / "checkpoint")
    deployment = read_deployment(tiny_engine, ServerSettings(), RuntimeConfig(device="cpu", speculate=str(checkpoint)))
    check_engine(deployment)
    assert not (tmp_path / "cache").exists()
    built = Path(prepare_server(deployment).runtime.speculate)
    assert is_drafter(built) and built.is_relative_to((tmp_path / "cache").resolve())
    again = msgspec.structs.replace(deployment, runtime=RuntimeConfig(device="cpu", speculate=str(built)))
    assert prepare_server(again).runtime.speculate == str(built)
    short = tiny.save(tiny.model(num_hidden_layers=1, max_position_embeddings=32), tmp_path / "short")
    with pytest.raises(ConfigError, match=r"it has 32 positions, and sequences of .* have 244"):
        prepare_server(read_deployment(tiny_engine, ServerSettings(), RuntimeConfig(device="cpu", speculate=str(short))))
