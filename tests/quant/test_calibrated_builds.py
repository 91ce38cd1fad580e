"""Builds with calibration: their text, resuming after an interruption, scales of the cache, and the accuracy gate."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import msgspec
import pytest
import tiny
import torch
from tokenizers import Tokenizer
from torch import Tensor

from stoker.base.config import Mapping
from stoker.base.errors import ConfigError, EngineError
from stoker.builder.build import build
from stoker.builder.calibration import calibration_text
from stoker.builder.calibration.calibration_text import calibration_windows, read_text
from stoker.builder.calibration.saved_layers import SavedLayers, calibration_folder
from stoker.builder.config import BuildConfig
from stoker.builder.prepare import add_fingerprint, prepare
from stoker.builder.verification.accuracy import check_accuracy
from stoker.distributed.group import SINGLE
from stoker.engine.layerwise import LayerwiseModel, Scores, split_windows
from stoker.engine.reader import Engine
from stoker.layers.loader import Loader
from stoker.quant.calibration.sample_text import default_text, held_out_text
from stoker.quant.format import TensorTable

CPU = torch.device("cpu")
QUICK: dict[str, Any] = {"calibration_size": 4, "calibration_seq_len": 64, "device": "cpu"}


def test_calibration_text_and_held_out_text_are_disjoint() -> None:
    assert len(default_text()) > 200_000 and len(held_out_text()) == 24_000
    assert held_out_text()[:200] not in default_text()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.model(), tmp_path_factory.mktemp("quant") / "hf")


def test_an_interrupted_calibration_is_resumed(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = BuildConfig(quantization="AWQ", kv_cache_dtype="int8", max_perplexity_increase=9.0, **QUICK)
    whole = build(checkpoint, tmp_path / "whole", config)
    real, saved = SavedLayers.save, []

    def failing(self: SavedLayers, index: int, *rest: Any) -> None:
        saved.append(index)
        if index == 1 and len(saved) == 2:
            raise KeyboardInterrupt
        real(self, index, *rest)

    monkeypatch.setattr(SavedLayers, "save", failing)
    with pytest.raises(KeyboardInterrupt):
        build(checkpoint, tmp_path / "again", config)
    again = build(checkpoint, tmp_path / "again", config)
    assert saved == [0, 1, 1, 2]
    assert again.config.files["rank0.safetensors"] == whole.config.files["rank0.safetensors"]
    assert not list((tmp_path / "cache").glob("calibration/*")), "a finished build removes what was saved for resuming"
    assert again.config.recipe.calibration == {"data": "default", "size": 4, "seq_len": 64}


def interrupted(checkpoint: Path, out: Path, config: BuildConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that is interrupted after its first layer was calibrated and saved."""
    real = SavedLayers.save

    def failing(self: SavedLayers, index: int, *rest: Any) -> None:
        real(self, index, *rest)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SavedLayers, "save", failing)
        with pytest.raises(KeyboardInterrupt):
            build(checkpoint, out, config)


def layers_saved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    real, saved = SavedLayers.save, []
    monkeypatch.setattr(SavedLayers, "save", lambda self, index, *rest: (saved.append(index), real(self, index, *rest)))
    return saved


def test_builds_with_other_rotary_settings_do_not_resume(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = BuildConfig(quantization="AWQ", max_perplexity_increase=9.0, **QUICK)
    other_base = msgspec.structs.replace(config, rotary_base=500.0)
    interrupted(checkpoint, tmp_path / "plain", config, monkeypatch)
    saved = layers_saved(monkeypatch)
    build(checkpoint, tmp_path / "other_base", other_base)
    assert saved == [0, 1, 2], "layers that were calibrated with other rotary positions are not reused"
    build(checkpoint, tmp_path / "plain", config)
    assert saved == [0, 1, 2, 1, 2], "the files of another build are not removed"


@pytest.mark.parametrize("damaged", ["layer-0", "hidden-000001"])
def test_damaged_saved_layers_are_not_used(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: str) -> None:
    config = BuildConfig(quantization="AWQ", max_perplexity_increase=9.0, **QUICK)
    interrupted(checkpoint, tmp_path / "engine", config, monkeypatch)
    file = next((tmp_path / "cache" / "calibration").glob(f"*/*/{damaged}.safetensors"))
    file.write_bytes(file.read_bytes()[:-10])
    saved = layers_saved(monkeypatch)
    build(checkpoint, tmp_path / "engine", config)
    assert saved == [0, 1, 2]


def test_concurrent_builds_do_not_interfere(checkpoint: Path, tmp_path: Path) -> None:
    """Another process holds the lock of the same calibration. Its files are neither used nor removed."""
    config = BuildConfig(quantization="AWQ", max_perplexity_increase=9.0, **QUICK)
    prepared = add_fingerprint(prepare(checkpoint, config))
    tokens = calibration_windows(checkpoint, None, config.calibration_size, config.calibration_seq_len)
    other_files = SavedLayers(calibration_folder(prepared.config), tokens).path
    hold = "import sys, filelock; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", hold, f"{other_files}.lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdin is not None and other.stdout.readline() == b"held\n"
        (other_files / "layer-0.new").write_bytes(b"half")
        build(checkpoint, tmp_path / "engine", config)
        assert (other_files / "layer-0.new").read_bytes() == b"half"
        assert not list(other_files.parent.glob(f"{other_files.name}-*")), "the files of this build are removed"
        other.stdin.close()


@pytest.mark.parametrize("kv_cache", ["int8", "float8_e4m3fn"])
def test_cache_scales_are_measured_and_used(checkpoint: Path, tmp_path: Path, kv_cache: str) -> None:
    engine = build(
        checkpoint, tmp_path / "engine", BuildConfig(kv_cache_dtype=kv_cache, max_perplexity_increase=1.0, **QUICK), verify="files"
    )
    tokens = split_windows(list(range(1, 200)), 64)
    exact = build(checkpoint, tmp_path / "exact", BuildConfig(device="cpu"), verify="files")
    scores = [LayerwiseModel(e.config.model, tokens).run(e.loader()) for e in (engine, exact)]
    assert engine.kv_dtype == getattr(torch, kv_cache)
    assert scores[0].nll != scores[1].nll
    assert scores[0].perplexity == pytest.approx(scores[1].perplexity, rel=0.02)
    # e4m3 values have exponents, so only a scale that is wrong by orders of magnitude matters.
    other = Loader(_ConstantScale(engine, 1.0 if kv_cache == "int8" else 1e-3), engine.config.recipe, torch.float32, CPU, SINGLE)
    constant = LayerwiseModel(engine.config.model, tokens).run(other)
    assert abs(constant.nll - scores[1].nll) > 3 * abs(scores[0].nll - scores[1].nll), "a constant scale is worse"


class _ConstantScale(TensorTable):
    """The engine's tensors, with the same scale for every head."""

    def __init__(self, engine: Engine, scale: float) -> None:
        self.source, self.scale = engine.source(), scale

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        found = self.source.get(name, shape, dtype)
        return torch.full_like(found, self.scale) if name.endswith(("key_scale", "value_scale")) else found


def test_the_accuracy_check_reports_and_rejects(checkpoint: Path, tmp_path: Path) -> None:
    config = BuildConfig(quantization="WEIGHTS_ONLY_INT4", quantization_settings={"group_size": 128, "zero": "none"}, **QUICK)
    engine = build(checkpoint, tmp_path / "engine", msgspec.structs.replace(config, max_perplexity_increase=9.0))
    found = engine.config.checks["accuracy"]
    assert found["tokens"] > 100 and found["skipped"] == ""
    assert found["increase"] == pytest.approx(found["perplexity_after"] / found["perplexity_before"] - 1)
    assert 0 < found["greedy_agreement"] < 1
    strict = msgspec.structs.replace(config, max_perplexity_increase=found["increase"] - 0.01)
    with pytest.raises(EngineError, match=r"WEIGHTS_ONLY_INT4 increases perplexity by .*% is allowed.*--max-perplexity-increase"):
        build(checkpoint, tmp_path / "rejected", strict)
    assert not (tmp_path / "rejected").exists()


@pytest.mark.parametrize(
    ("after", "message"), [(math.nan, "results in an infinite or undefined perplexity"), (0.0, None), (1e-3, "and 0.0% is allowed")]
)
def test_the_accuracy_check_at_its_edges(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: float, message: str | None
) -> None:
    """With an allowed increase of 0, no increase passes, and an undefined perplexity fails."""
    runs = iter((Scores(nll=100.0, count=50), Scores(nll=100.0 + after, count=50)))
    monkeypatch.setattr("stoker.builder.verification.accuracy._score", lambda *_: next(runs))
    config = BuildConfig(quantization="WEIGHTS_ONLY_INT8", max_perplexity_increase=0.0, **QUICK)
    with pytest.raises(EngineError, match=message) if message else contextlib.nullcontext():
        build(checkpoint, tmp_path / "engine", config)
    assert (tmp_path / "engine").exists() is (message is None)


@pytest.mark.parametrize("recipe", ["FP8", "WEIGHTS_KV_INT8"])
def test_the_accuracy_of_engines_with_several_ranks_is_that_of_one_rank(recipe: str, checkpoint: Path, tmp_path: Path) -> None:
    config = BuildConfig(quantization=recipe, max_perplexity_increase=9.0, **QUICK)
    split = msgspec.structs.replace(config, mapping=Mapping(tensor_parallel=2))
    one, two = (build(checkpoint, tmp_path / str(i), each).config.checks["accuracy"] for i, each in enumerate((config, split)))
    assert one["tokens"] == two["tokens"] > 100
    assert two["perplexity_after"] == pytest.approx(one["perplexity_after"], rel=1e-6)
    assert two["perplexity_after"] != two["perplexity_before"]


def test_the_accuracy_of_a_quantized_cache_is_measured(checkpoint: Path, tmp_path: Path) -> None:
    engine = build(checkpoint, tmp_path / "engine", BuildConfig(kv_cache_dtype="int8", **QUICK))
    found = engine.config.checks["accuracy"]
    assert 0 < abs(found["increase"]) < 0.01


def test_perplexity_equals_that_of_transformers(checkpoint: Path, tmp_path: Path) -> None:
    engine = build(checkpoint, tmp_path / "engine", BuildConfig(device="cpu"), verify="files")
    ids = torch.randint(0, 320, (100,), generator=torch.Generator().manual_seed(5)).tolist()
    ours = LayerwiseModel(engine.config.model, split_windows(ids, 40)).run(engine.loader())
    model = tiny.model()
    with torch.inference_mode():
        losses = [
            (model(torch.tensor([part]), labels=torch.tensor([part])).loss, len(part) - 1) for part in (ids[:40], ids[40:80], ids[80:])
        ]
    assert ours.count == 97
    assert ours.nll == pytest.approx(float(sum(loss * count for loss, count in losses)), rel=1e-4)


def test_without_a_tokenizer_the_accuracy_check_is_skipped(checkpoint: Path, tmp_path: Path) -> None:
    prepared = prepare(checkpoint, BuildConfig(quantization="WEIGHTS_ONLY_INT8", **QUICK))
    assert check_accuracy(prepared, tmp_path, even_if_slow=True, progress=lambda *_: None).skipped == "there is no tokenizer"


def test_calibration_data_comes_from_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "b.jsonl").write_text('{"text": "second"}\n{"article": "third"}\n')
    (tmp_path / "c.json").write_text('["fourth"]')
    assert read_text(str(tmp_path)) == "first\n\nsecond\n\nthird\n\nfourth"
    (tmp_path / "c.json").write_text('[{"label": 1}]')
    with pytest.raises(ConfigError, match=r"c\.json: a row has no text, content or article"):
        read_text(str(tmp_path))
    (tmp_path / "d.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"d\.bin is not a text file"):
        read_text(str(tmp_path / "d.bin"))


def test_calibration_data_comes_from_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that are no paths are downloaded from the hub, text files only."""
    (tmp_path / "train.jsonl").write_text('{"text": "first"}\n{"content": "second"}\n')
    requests = []

    def download(name: str, *, repo_type: str, allow_patterns: list[str]) -> str:
        requests.append((name, repo_type, sorted(allow_patterns)))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert read_text("someone/prose") == "first\n\nsecond"
    assert requests == [("someone/prose", "dataset", ["*.json", "*.jsonl", "*.md", "*.txt"])]


def test_calibration_data_without_text_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, message in (
        ("[1, 2]", "a row has no text"),
        ("null", "a row has no text"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "holds no text"),
    ):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_text(str(tmp_path / "a.json"))
    with pytest.raises(ConfigError, match="calibration_data='' is empty"):
        read_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no text"):
        read_text(str(tmp_path / "empty"))
    monkeypatch.setattr(calibration_text, "MAX_BYTES", 100)
    rows = [{"text": "four words and ten"}] * 20
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_text(str(tmp_path / "b.jsonl")) == "\n\n".join(["four words and ten"] * 3), "the first complete rows of a long file"
    (tmp_path / "c.json").write_text(json.dumps(rows))
    with pytest.raises(ConfigError, match=r"c\.json is larger than the 100 bytes of text that are read"):
        read_text(str(tmp_path / "c.json"))


@pytest.mark.parametrize("text", ["the quick brown fox " * 2000, " " * 50_000, "x\n" * 20_000, "\x00\xff" * 9000, "one line"])
def test_windows_of_a_long_text_do_not_depend_on_what_follows(checkpoint: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = split_windows(Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode(text, add_special_tokens=False).ids, 32, 4)
    monkeypatch.setattr(calibration_text, "CHARS_PER_TOKEN", 1)
    found = calibration_text.tokenize_windows(checkpoint, text, 4, 32)
    assert len(found) == len(whole) and all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))
