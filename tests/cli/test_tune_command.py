"""`stoker tune`: lists the shapes of an engine without a GPU, keeps the fastest tile, and refuses to run without a device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.base.config import Limits
from stoker.base.errors import ConfigError
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.cli.command_table import load_command
from stoker.cli.commands import COMMANDS
from stoker.engine.reader import Engine
from stoker.kernels.tuning.table import TileKey, parse_tuning_file
from stoker.kernels.tuning.tiles import LinearTile, QuantTile, SkinnyTile, Tile
from stoker.profiling.engine_tuning import engine_tile_keys, tune_tiles, write_engine_tuning

PUBLISHED = Path(__file__).parents[1] / "parity" / "published"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2.5-7B without weights, for sm_90."""
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "config.json").write_text((PUBLISHED / "Qwen2.5-7B-Instruct.json").read_text())
    limits = Limits(max_batch_size=4, max_input_len=64, max_output_len=64, max_num_tokens=64)
    config = BuildConfig(limits=limits, device="cuda", compute_capability="9.0", dtype="bfloat16", dummy_weights=True)
    return Path(build(folder, folder / "engine", config, verify="none").path)


def test_the_shapes_of_an_engine_are_listed_without_a_gpu(engine: Path) -> None:
    from stoker.profiling.tile_cases import is_measurable  # imports triton, which tests/kernels must configure first

    keys = engine_tile_keys(engine, 90)
    assert ("dense_linear", "16-bit", (1, 152064, 3584, 0)) in keys, "the head of one row"
    assert len(set(keys)) == len(keys) and all(is_measurable(key) for key in keys if key[0] == "dense_linear")


def test_the_fastest_tile_is_written_and_read_back(engine: Path) -> None:
    from stoker.profiling.tile_cases import candidate_tiles  # imports triton, which tests/kernels must configure first

    key: TileKey = ("dense_linear", "16-bit", (16, 4096, 4096, 0))
    without_tiles: TileKey = ("dense_linear", "16-bit", (16, 64, 64, 0))
    fastest = candidate_tiles(key)[3]
    steps: list[tuple[str, int, int | None]] = []

    def measure(measured: TileKey, tiles: list[Tile]) -> dict[Tile, float]:
        return {tile: 1.0 if tile == fastest else 2.0 for tile in tiles}

    tiles = tune_tiles([key, without_tiles], candidate_tiles, measure, lambda *step: steps.append(step))
    assert tiles == {key: fastest} and steps[-1] == ("tiles", 2, 2)
    path = write_engine_tuning(engine, "NVIDIA H200", 90, tiles)
    assert parse_tuning_file(path)[1].tiles == tiles
    assert [file.name for file in engine.glob("tuning.json*")] == ["tuning.json"]
    Engine.open(engine, verify=True)  # the file is no part of what the build wrote
    path.unlink()


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        (("dense_linear", "16-bit", (1, 6144, 4096, 0)), LinearTile),
        (("quantized_linear", "fp8", (16, 14336, 4096, 1)), QuantTile),
        (("quantized_linear", "w8a8", (1, 6144, 4096, 0)), QuantTile),
        (("skinny_linear", "int8", (1, 6144, 64, 0)), SkinnyTile),
    ],
)
def test_candidates_are_valid_rows(key: TileKey, kind: type, tmp_path: Path) -> None:
    from stoker.profiling.tile_cases import candidate_tiles, is_measurable  # imports triton, which tests/kernels must configure first

    tiles = candidate_tiles(key)
    assert len(tiles) > 3 and all(isinstance(tile, kind) for tile in tiles) and is_measurable(key)
    for tile in tiles:
        path = write_engine_tuning(tmp_path, "NVIDIA H200", 90, {key: tile})
        assert list(parse_tuning_file(path)[1].tiles.values()) == [tile]
        assert json.loads(path.read_text())["device"] == "NVIDIA H200"


def test_without_a_gpu_the_command_says_where_to_run_it(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    command = load_command(next(row for row in COMMANDS if row.name == "tune"))
    with pytest.raises(ConfigError, match="this machine has none that torch can use") as refused:
        command.main([str(engine)], standalone_mode=False)
    assert "stoker doctor" in str(refused.value)
