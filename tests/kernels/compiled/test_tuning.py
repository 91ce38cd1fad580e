"""Tuning tables: measured shapes get their measured tiles, invalid files are rejected, and unknown devices get safe tiles."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.base.errors import ConfigError
from stoker.kernels.triton.attention.tiles import decode_tile, prefill_tile
from stoker.kernels.triton.fused_layer.large_batch.launch import _plan
from stoker.kernels.triton.gemm.dense.tiles import linear_tile
from stoker.kernels.triton.gemm.quantized.tiles import quant_tile
from stoker.kernels.triton.gemm.skinny.tiles import skinny_tile
from stoker.kernels.triton.gemm.skinny_int4.tiles import skinny_int4_tile
from stoker.kernels.tuning import devices
from stoker.kernels.tuning.devices import FOLDER, tuning_for, use_engine_tuning
from stoker.kernels.tuning.table import TuningTable, encode_tuning_file, parse_tuning_file
from stoker.kernels.tuning.tiles import LinearTile, QuantTile, SkinnyTile

NUM_SMS = 132
# {op: [[launch, fields of the chosen tile]]}: the choices before the tables were moved from the source to JSON files.
CHOICES: dict[str, list[Any]] = json.loads(Path(__file__).with_name("tile_choices.json").read_text())
DEVICES = ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB", None]  # None: ahead-of-time compilation for sm_90


@pytest.fixture(autouse=True)
def no_engine_tables() -> Iterator[None]:
    tuning_for.cache_clear()
    yield
    devices._engine_tables.clear()
    tuning_for.cache_clear()


def chosen(op: str, launch: list[Any], tuning: TuningTable) -> Any:
    """The choice for one launch of `CHOICES`."""
    if op == "dense_linear":
        return linear_tile(*launch, NUM_SMS, tuning)
    if op == "quantized_linear":
        form, rows, n, k, gated, group = launch
        return quant_tile(form, rows, n, k, gated, NUM_SMS, tuning, group)
    if op == "skinny_linear":
        form, *shape = launch
        return skinny_tile(form.replace("bytes", "int8"), *shape, NUM_SMS, tuning)
    if op == "skinny_int4_linear":
        return skinny_int4_tile(*launch, NUM_SMS, tuning)
    if op == "fused_layer_small_batch":
        return tuning.tile(op, launch[0].replace("bytes", "int8"))
    if op == "fused_layer_large_batch":
        sizes, group, tokens = launch
        assert tuning.costs.fused_layer_large_batch is not None
        return _plan(tuple(map(tuple, sizes)), group, tokens, NUM_SMS, tuning.costs.fused_layer_large_batch)
    head_size, dtype, rows, num_tiles, narrow = launch
    choose = decode_tile if op == "attention_decode" else prefill_tile
    return choose(head_size, getattr(torch, dtype), rows, num_tiles, NUM_SMS, tuning, narrow)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", CHOICES)
def test_every_sm_90_device_has_the_measured_choices(op: str, device: str | None) -> None:
    tuning = tuning_for(device, 90)
    for launch, expected in CHOICES[op]:
        found = chosen(op, launch, tuning)
        plain = None if found is None else json.loads(json.dumps(dataclasses.astuple(found)))
        assert plain == expected, launch


def test_every_file_of_the_package_is_valid() -> None:
    names = {path.stem for path in FOLDER.glob("*.json")}
    assert names >= {"default", "nvidia-h200", "nvidia-h100", "sm_90"}
    for name in names:
        parse_tuning_file(FOLDER / f"{name}.json")
    assert tuning_for("NVIDIA H200", 90).ceiling is not None
    assert tuning_for("NVIDIA H100 80GB HBM3", 90).ceiling is None, "an H100 must not get the bandwidth of an H200"


def test_an_unknown_device_has_safe_tiles_and_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            tuning = tuning_for("NVIDIA A100-SXM4-80GB", 80)
    assert len(caplog.records) == 1
    assert "NVIDIA A100-SXM4-80GB (sm_80)" in caplog.text and "stoker tune ENGINE" in caplog.text
    assert not tuning.tiles and tuning.costs.fused_layer_large_batch is None
    for op in ("dense_linear", "quantized_linear", "skinny_linear", "skinny_int4_linear", "attention_decode", "attention_prefill"):
        for launch, _ in CHOICES[op]:
            assert chosen(op, launch, tuning) is not None


def test_tiles_of_an_engine_override_those_of_the_package(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key, tile = ("dense_linear", "16-bit", (16, 6144, 4096, 0)), LinearTile(32, 64, 4, 4, 5, True)
    (tmp_path / "tuning.json").write_text(encode_tuning_file("NVIDIA H200", 90, {key: tile}, "a test"))
    use_engine_tuning(tmp_path, "NVIDIA H200")
    assert linear_tile(16, 6144, 4096, False, 2, NUM_SMS, tuning_for("NVIDIA H200", 90)) == tile
    other = tuning_for("NVIDIA H100 PCIe", 90)
    assert linear_tile(16, 6144, 4096, False, 2, NUM_SMS, other) != tile
    assert linear_tile(32, 6144, 4096, False, 2, NUM_SMS, tuning_for("NVIDIA H200", 90)).block_n == 64, "other shapes keep their tiles"


def test_a_table_of_another_device_is_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tuning.json").write_text(encode_tuning_file("NVIDIA L4", 89, {}, "a test"))
    with caplog.at_level(logging.WARNING):
        use_engine_tuning(tmp_path, "NVIDIA H200")
    assert "it was measured on NVIDIA L4, and this device is NVIDIA H200" in caplog.text
    assert not devices._engine_tables


def test_a_tuned_unknown_device_logs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiles = {("skinny_linear", "int8", (1, 64, 9, 1)): SkinnyTile(2, 1, 4, 1)}
    (tmp_path / "tuning.json").write_text(encode_tuning_file("NVIDIA L4", 89, tiles, "a test"))
    use_engine_tuning(tmp_path, "NVIDIA L4")
    with caplog.at_level(logging.WARNING):
        assert skinny_tile("int8", 1, 64, 9, True, 58, tuning_for("NVIDIA L4", 89)) == SkinnyTile(2, 1, 4, 1)
    assert caplog.text == ""


def test_written_tiles_are_read_back(tmp_path: Path) -> None:
    tiles = {
        ("dense_linear", "16-bit", (1, 128, 256, 1)): LinearTile(4, 256, 1, 4, 2, False),
        ("quantized_linear", "w8a8", (16, 128, 256, 0)): QuantTile(64, 128, 2, 8, 3, 16, True),
    }
    path = tmp_path / "tuning.json"
    path.write_text(encode_tuning_file("NVIDIA H200", 90, tiles, "a test"))  # type: ignore[arg-type]
    assert parse_tuning_file(path)[1].tiles == tiles


HEAD = {"format": 1, "device": "NVIDIA H200", "capability": 90}
SHAPE = {"rows": 16, "n": 64, "k": 64, "gated": False}
ROW = {"op": "dense_linear", "dtype": "16-bit", "shape": SHAPE, "tile": {"block_n": 16, "block_k": 64}}


def change(**tile: Any) -> dict[str, Any]:
    return {**HEAD, "tiles": [{**ROW, "tile": {**ROW["tile"], **tile}}]}  # type: ignore[dict-item]


HOSTILE: dict[str, tuple[Any, str]] = {
    "not an object": ([], r"\$=\[\]"),
    "another format": ({**HEAD, "format": 2}, r"\$\.format=2"),
    "an unknown key": ({**HEAD, "code": "x"}, "code"),
    "no device": ({"format": 1, "capability": 90}, "device"),
    "an unknown op": ({**HEAD, "tiles": [{**ROW, "op": "../x"}]}, r"\$\.tiles\[0\]\.op='\.\./x'"),
    "an unknown dtype": ({**HEAD, "tiles": [{**ROW, "dtype": "int3"}]}, r"\$\.tiles\[0\]\.dtype='int3'"),
    "a missing shape field": ({**HEAD, "tiles": [{**ROW, "shape": {"rows": 1}}]}, r"\$\.tiles\[0\]\.shape has rows"),
    "a number for a truth value": ({**HEAD, "tiles": [{**ROW, "shape": {**ROW["shape"], "gated": 1}}]}, r"shape\.gated=1"),  # type: ignore[dict-item]
    "a negative size": ({**HEAD, "tiles": [{**ROW, "shape": {**ROW["shape"], "n": -1}}]}, r"\$\.tiles\[0\]\.shape.*is refused"),  # type: ignore[dict-item]
    "an unknown tile field": (change(exec=1), r"tile\.exec is not a field"),
    "no power of two": (change(block_n=48), r"\$\.tiles\[0\]\.tile\.block_n=48"),
    "too many warps": (change(num_warps=64), r"tile\.num_warps=64"),
    "no stage": (change(num_stages=0), r"tile\.num_stages=0"),
    "text": (change(splits="2"), r"tile\.splits='2'"),
    "too few rows for the matrix instructions": (change(block_n=8), r"tile\.block_n=8"),
    "more than shared memory": (change(block_n=256, block_k=1024, num_stages=8), r"block_n × block_k × num_stages"),
    "a repeated row": ({**HEAD, "tiles": [ROW, ROW]}, r"\$\.tiles\[1\] repeats"),
    "no bandwidth": ({**HEAD, "ceiling": {"bytes_per_s": 0, "flops_per_s": {"2": 1}}}, r"\$\.ceiling\.bytes_per_s=0"),
    "a path": ({**HEAD, "same_as": "../../etc/passwd"}, r"\$\.same_as='\.\./"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_naming_the_file_the_key_and_the_value(name: str, tmp_path: Path) -> None:
    content, expected = HOSTILE[name]
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=expected) as refused:
        use_engine_tuning(tmp_path, "NVIDIA H200")
    assert str(path) in str(refused.value) and "stoker tune" in str(refused.value)
    assert len(str(refused.value)) < 700 and not devices._engine_tables


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\xff", "1e999"])
def test_a_file_that_is_not_json_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "tuning.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"tuning\.json"):
        use_engine_tuning(tmp_path, "NVIDIA H200")


def test_the_size_of_a_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.kernels.tuning.table.MAX_FILE_BYTES", 100)
    (tmp_path / "tuning.json").write_text(" " * 101)
    with pytest.raises(ConfigError, match="more than 100 bytes"):
        use_engine_tuning(tmp_path, "NVIDIA H200")


def test_reading_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    first = tuning_for("NVIDIA H200", 90)
    refuse: Callable[..., Any] = lambda path: pytest.fail(f"read {path} again")  # noqa: E731
    monkeypatch.setattr(devices, "parse_tuning_file", refuse)
    assert tuning_for("NVIDIA H200", 90) is first
