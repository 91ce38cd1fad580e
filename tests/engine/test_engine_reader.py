"""Opening an engine: every defect is refused in one line that ends with a cure."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from stoker.base.errors import EngineError
from stoker.builder.build import build
from stoker.engine.config_file import FORMAT_VERSION
from stoker.engine.reader import Engine
from stoker.engine.safetensors_header import read_header
from stoker.engine.tensor_source import DummyTensorSource

FILE = "rank0.safetensors"


@pytest.fixture
def engine(tmp_path: Path, llama: Path) -> Path:
    return build(llama, tmp_path / "engine", verify="none").path


def edit(engine: Path, **fields: object) -> None:
    config = json.loads((engine / "config.json").read_text())
    (engine / "config.json").write_text(json.dumps(config | fields))


def refused(path: Path, **options: bool) -> str:
    """The message of the error that opening the directory raises."""
    with pytest.raises(EngineError) as caught:
        Engine.open(path, **options)
    text = str(caught.value)
    assert "\n" not in text and caught.value.cure
    return text


def test_paths_that_are_not_engines_are_refused(tmp_path: Path, llama: Path) -> None:
    assert "does not exist" in refused(tmp_path / "nowhere")
    assert "has no config.json" in refused(tmp_path)
    assert f"is a Hugging Face checkpoint. Run: stoker build {llama} -o ENGINE." in refused(llama)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert "is a GGUF file" in refused(tmp_path / "m.gguf")
    (tmp_path / "config.json").write_text("{}")
    assert "has no format_version" in refused(tmp_path)
    for broken in ("{", "[" * 200_000):
        (tmp_path / "config.json").write_text(broken)
        assert "is not JSON" in refused(tmp_path)


def test_other_versions_and_damaged_files_are_refused(engine: Path) -> None:
    Engine.open(engine, verify=True)
    edit(engine, format_version=99, stoker_version="9.9")
    assert "engine format 99 (Stoker 9.9), and this Stoker" in refused(engine)
    edit(engine, format_version=FORMAT_VERSION)
    with (engine / FILE).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    Engine.open(engine)
    assert f"{FILE} is corrupt: its sha256 is" in refused(engine, verify=True)
    with (engine / FILE).open("r+b") as file:
        file.truncate(100)
    assert f"{FILE} is truncated or changed: it has 100 bytes" in refused(engine)
    (engine / FILE).unlink()
    assert f"{FILE} is missing" in refused(engine)


@pytest.mark.parametrize(
    "fields",
    [
        {"limits": {"max_batch_size": 0}}, {"limits": {"max_batch_size": "8"}}, {"limits": None}, {"model": {}},
        {"model": {"layers": [{"count": "x"}]}},
        {"recipe": {"default": {"format": "nothing"}}}, {"files": {FILE: {}}}, {"checkpoint": 3}, {"surprise": 1}, {"dtype": 7},
        {"dtype": "nothing"}, {"weights": "nothing"}, {"target": {"device": "nothing"}}, {"recipe": {"kv_cache": "nothing"}},
    ],
)  # fmt: skip
def test_damaged_configs_are_refused(engine: Path, fields: dict) -> None:
    edit(engine, **fields)
    assert "config.json is damaged" in refused(engine)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"stoker_version": 1}, "(stoker_version: Expected `str`, got `int`)"),
        ({"recipe": {"default": "x"}}, "(recipe: Expected `object`, got `str` - at `$.default`)"),
        ({"recipe": {"name": []}}, "(recipe: Expected `str`, got `array` - at `$.name`)"),
        ({"model": {"layers": [{"count": 2**70}]}}, "$.layers[0].count`"),
    ],
)
def test_the_damaged_field_is_named(engine: Path, fields: dict, reason: str) -> None:
    """A count of layers is refused before they are created, which would fill the memory."""
    changed = (
        fields | {"model": json.loads((engine / "config.json").read_text())["model"] | fields["model"]} if "model" in fields else fields
    )
    edit(engine, **changed)
    assert reason in refused(engine)


def test_the_number_of_layers_is_limited(engine: Path) -> None:
    model = json.loads((engine / "config.json").read_text())["model"]
    edit(engine, model=model | {"layers": [{"count": 4096, "layer": model["layers"][0]["layer"]}] * 2})
    assert "Expected at most 4096 layers - at `$.layers`" in refused(engine)


def test_files_outside_the_directory_are_refused(engine: Path) -> None:
    files = json.loads((engine / "config.json").read_text())["files"]
    edit(engine, files=files | {"../escape": {"size": 1, "sha256": ""}})
    assert "../escape" in refused(engine)


def test_another_world_size_or_device_is_refused(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Engine.open(engine)
    opened.check_world(1)
    with pytest.raises(EngineError, match=r"built for 1 rank .*, and 2 are running.*--tensor-parallel 2"):
        opened.check_world(2)
    with pytest.raises(EngineError, match=r"built for cpu, and cuda was requested.*--device cuda"):
        opened.check_device(torch.device("cuda"))
    edit(engine, target={"device": "cuda", "compute_capability": "9.0"})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(EngineError, match=r"capability 9\.0, and this device has 8\.0"):
        Engine.open(engine).check_device(torch.device("cuda"))


def test_tensors_are_views_of_the_mapped_file(engine: Path) -> None:
    source, given = Engine.open(engine).source(), load_file(engine / FILE)
    for name, tensor in given.items():
        found = source.get(name, tuple(tensor.shape), tensor.dtype)
        assert torch.equal(found, tensor)
        assert found.untyped_storage().data_ptr() == source.get(name, tuple(tensor.shape), tensor.dtype).untyped_storage().data_ptr()
    embed = source.get("embed.weight", tuple(given["embed.weight"].shape), torch.float32)
    embed.zero_()
    assert torch.equal(load_file(engine / FILE)["embed.weight"], given["embed.weight"])


def test_missing_tensors_and_other_shapes_or_dtypes_are_refused(engine: Path) -> None:
    source = Engine.open(engine).source()
    with pytest.raises(EngineError, match=r"rank0\.safetensors: tensor 'nothing' is missing"):
        source.get("nothing", (1,), torch.float32)
    for shape, dtype in (((48, 320), torch.float32), ((320, 48), torch.float16)):
        with pytest.raises(EngineError, match=r"tensor 'embed.weight' is torch.float32 \[320, 48\], and .* is expected"):
            source.get("embed.weight", shape, dtype)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ],
)
def test_dummy_tensors_depend_on_their_name_alone(dtype: torch.dtype) -> None:
    source = DummyTensorSource(torch.device("cpu"))
    first, again = source.get("layers.0.mlp.up.weight", (64, 48), dtype), source.get("layers.0.mlp.up.weight", (64, 48), dtype)
    other = source.get("layers.1.mlp.up.weight", (64, 48), dtype)
    assert first.dtype == dtype and first.shape == (64, 48)
    assert torch.equal(first.view(torch.uint8), again.view(torch.uint8)) and not torch.equal(
        first.view(torch.uint8), other.view(torch.uint8)
    )
    assert bool(torch.isfinite(first.float()).all())
    assert len(first.float().unique()) > 20


def test_dummy_scales_are_positive_and_norms_near_one() -> None:
    source = DummyTensorSource(torch.device("cpu"))
    assert bool((source.get("layers.0.mlp.up.scale", (64,), torch.float32) > 0).all())
    assert abs(float(source.get("layers.0.attention_norm.weight", (64,), torch.float32).mean()) - 1) < 0.05


def test_staging_buffers_copy_every_byte(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory and events are replaced by plain memory, and buffers are smaller than a tensor."""
    from stoker.engine import staging as staging_module

    monkeypatch.setattr(staging_module, "STAGING_BYTES", 1000)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(synchronize=lambda: None, record=lambda: None))
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **kwargs: real(*args, **kwargs))
    staging, entries = staging_module.StagingBuffers(), read_header(engine / FILE, EngineError, "")
    with (engine / FILE).open("rb") as file:
        for name, tensor in load_file(engine / FILE).items():
            out = torch.empty_like(tensor)
            staging.copy_from_file(out, file.fileno(), entries[name].start)
            assert torch.equal(out, tensor)
        with pytest.raises(EOFError):
            staging.copy_from_file(torch.empty(100), file.fileno(), (engine / FILE).stat().st_size - 9)
