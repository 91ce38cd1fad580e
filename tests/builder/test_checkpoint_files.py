"""Reading of checkpoint files. Damaged and malicious files are refused with the name of the file and the tensor."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path

import pytest
import tiny
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint import chunked_file as module
from stoker.builder.checkpoint.checkpoint import open_checkpoint
from stoker.builder.checkpoint.pytorch_bin import PickledWeights
from stoker.builder.checkpoint.safetensors import SafetensorsWeights
from stoker.builder.checkpoint.weight_files import open_weights

INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return tiny.save(tiny.model(), tmp_path / "sharded", "safetensors-sharded")


def edit_index(path: Path, change: object) -> None:
    index = json.loads((path / INDEX).read_text())
    change(index["weight_map"])  # type: ignore[operator]
    (path / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("chunk", [64, 1000 * 4, 1 << 24])
@pytest.mark.parametrize("layout", ["safetensors", "bin", "bin-sharded"])
def test_chunks_make_up_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, layout: str) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk)
    made = tiny.model().to(torch.bfloat16)
    found = open_weights(tiny.save(made, tmp_path / "c", layout))
    given_tensors = made.state_dict()
    assert set(found.tensors) == set(given_tensors)
    for name, tensor in given_tensors.items():
        assert (found.tensors[name].shape, found.tensors[name].dtype) == (tuple(tensor.shape), torch.bfloat16)
        assert torch.equal(found.read(name), tensor)
        assert str(tmp_path) in found.location(name) and name in found.location(name)


def test_an_index_that_disagrees_with_its_files_is_refused(sharded: Path) -> None:
    edit_index(sharded, lambda m: m.update(ghost="model-00001-of-00003.safetensors"))
    with pytest.raises(CheckpointError, match=rf"{INDEX} lists tensor 'ghost', which no shard holds"):
        open_weights(sharded)
    edit_index(sharded, lambda m: m.update(ghost="model-00009-of-00003.safetensors"))
    with pytest.raises(CheckpointError, match=r"names model-00009-of-00003\.safetensors, which is missing"):
        open_weights(sharded)
    edit_index(sharded, lambda m: m.update(ghost="../../etc/passwd"))
    with pytest.raises(CheckpointError, match=r"names '\.\./\.\./etc/passwd', which is not a file next to it"):
        open_weights(sharded)
    for text in ("[]", "{}", '{"weight_map": 3}', "{"):
        (sharded / INDEX).write_text(text)
        with pytest.raises(CheckpointError, match=rf"{INDEX} is not an index"):
            open_weights(sharded)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path, llama: Path) -> None:
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for file in files:
        file.write_bytes((llama / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"tensor 'lm_head\.weight' is in .*a\.safetensors and in .*b\.safetensors"):
        SafetensorsWeights(files)


class Payload:
    def __reduce__(self) -> tuple:
        return (print, ("this must never run",))


@pytest.mark.parametrize("legacy", [False, True])
def test_code_in_a_pickle_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture, legacy: bool) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"w": torch.zeros(2), "x": Payload()}, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(
        CheckpointError, match=r"pytorch_model\.bin contains Python objects other than tensors.*would run their code.*safetensors"
    ):
        PickledWeights([path])
    path.write_bytes(pickle.dumps(Payload()))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        PickledWeights([path])
    assert "never" not in capsys.readouterr().out


def test_the_advice_of_torch_to_disable_its_check_is_not_passed_on(tmp_path: Path) -> None:
    torch.save({"x": Payload()}, tmp_path / "p.bin")
    with pytest.raises(CheckpointError) as raised:
        PickledWeights([tmp_path / "p.bin"])
    assert "weights_only" not in str(raised.value)


def test_shards_without_an_index_are_named(tmp_path: Path) -> None:
    for i in (1, 2):
        save_file({f"w{i}": torch.zeros(2)}, tmp_path / f"model-0000{i}-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"has 2 safetensors files, such as model-00001-of-00002\.safetensors, and no index"):
        open_weights(tmp_path)
    (tmp_path / "bin").mkdir()
    torch.save({"w": torch.zeros(2)}, tmp_path / "bin" / "pytorch_model-00001-of-00002.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model-00001-of-00002\.bin, and no index.*pytorch_model\.bin\.index\.json"):
        open_weights(tmp_path / "bin")


def test_engines_of_tensorrt_are_rejected_with_a_way_to_migrate(tmp_path: Path) -> None:
    config = {"version": "0.9.0", "pretrained_config": {"architecture": "LlamaForCausalLM"}, "build_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"is a TensorRT engine of LlamaForCausalLM: compiled code.*--checkpoint_dir"):
        open_checkpoint(tmp_path)


def test_views_of_one_storage_are_read(tmp_path: Path) -> None:
    base = torch.arange(35.0).view(5, 7)
    views = {"whole": base, "transposed": base.t(), "rows": base[2:4], "column": base[:, 3], "half": base.to(torch.bfloat16)}
    torch.save(views, tmp_path / "v.bin")
    found = PickledWeights([tmp_path / "v.bin"])
    assert all(torch.equal(found.read(name), tensor) for name, tensor in views.items())


def test_legacy_and_wrapped_pickles_are_read(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).view(2, 3)
    torch.save({"state_dict": {"w": tensor.t()}}, tmp_path / "a.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(PickledWeights([tmp_path / "a.bin"]).read("w"), tensor.t())
    torch.save([tensor], tmp_path / "b.bin")
    with pytest.raises(CheckpointError, match=r"b\.bin is not a dictionary of tensors"):
        PickledWeights([tmp_path / "b.bin"])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(part=st.floats(0.0, 0.999))
def test_truncated_files_are_named(tmp_path: Path, part: float) -> None:
    whole = tmp_path / "whole.bin"
    if not whole.exists():
        torch.save({"w": torch.arange(600.0)}, whole)
    data = whole.read_bytes()
    cut = tmp_path / "cut.bin"
    cut.write_bytes(data[: int(part * len(data))])
    with pytest.raises(CheckpointError, match=r"cut\.bin"):
        PickledWeights([cut])


def test_directories_without_a_valid_config_are_refused(tmp_path: Path, llama: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json and is not a GGUF file"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"config\.json is not an object"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ')
    with pytest.raises(CheckpointError, match=r"config\.json is not JSON"):
        open_checkpoint(tmp_path)
    assert open_checkpoint(llama).config["model_type"] == "llama"


def test_safetensors_are_preferred_to_pickles(tmp_path: Path) -> None:
    source = tiny.save(tiny.model(seed=1), tmp_path / "c", "safetensors")
    torch.save({"w": Payload()}, source / "pytorch_model.bin")
    assert isinstance(open_weights(source), SafetensorsWeights)


def test_a_tensor_in_two_pickles_is_refused(tmp_path: Path) -> None:
    for name in "ab":
        torch.save({"w": torch.zeros(2)}, tmp_path / f"{name}.bin")
    with pytest.raises(CheckpointError, match=r"tensor 'w' is in .*a\.bin and in .*b\.bin"):
        PickledWeights([tmp_path / "a.bin", tmp_path / "b.bin"])


@pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse(), torch.zeros(2, device="meta")], ids=["sparse", "meta"])
def test_pickled_sparse_and_meta_tensors_are_refused(tmp_path: Path, tensor: torch.Tensor) -> None:
    torch.save({"w": tensor}, tmp_path / "a.bin")
    with pytest.raises(CheckpointError, match=r"a\.bin: tensor 'w' is .*, and a dense CPU tensor is expected"):
        PickledWeights([tmp_path / "a.bin"])


def copy_zip(source: Path, out: Path, compression: int = zipfile.ZIP_STORED, **changed: bytes) -> None:
    """Copy a zip with other compression, and with other contents of the records whose names end so.

    Without `.format_version`, torch looks offsets up instead of computing those that its own writer chooses.
    """
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(out, "w", compression) as new:
        for name in (name for name in old.namelist() if not name.endswith(".format_version")):
            new.writestr(name, changed.get(name.rpartition("/")[2], old.read(name)))


def test_records_that_do_not_hold_the_tensors_are_refused(tmp_path: Path) -> None:
    whole, out = tmp_path / "whole.bin", tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.arange(64.0), "b": torch.ones(4096)}, whole)
    copy_zip(whole, out)
    assert torch.equal(PickledWeights([out]).read("a"), torch.arange(64.0))
    copy_zip(whole, out, zipfile.ZIP_DEFLATED)  # torch.load decompresses it
    with pytest.raises(CheckpointError, match="compressed record"):
        PickledWeights([out])
    copy_zip(whole, out, byteorder=b"big")  # torch swaps bytes in memory, which tensors without data do not have
    with pytest.raises(CheckpointError, match="byte order b'big', and only little"):
        PickledWeights([out])
    copy_zip(whole, out)
    with zipfile.ZipFile(out, "a") as more:
        more.writestr("pytorch_model/DATA/0", bytes(256))
        more.writestr("PYTORCH_MODEL/data/0", bytes(256))
    with pytest.raises(CheckpointError, match="has two records"):
        PickledWeights([out])
    copy_zip(whole, out)
    with zipfile.ZipFile(out, "a") as more:
        more.writestr("whole/.format_version", b"1")
    with pytest.raises(CheckpointError, match="tensor 'b' has no record where torch expects it"):
        PickledWeights([out])


def test_tensors_larger_than_their_record_are_refused(tmp_path: Path) -> None:
    """torch checks this only for tensors with data. The bytes that follow would be those of other tensors."""
    whole, out = tmp_path / "whole.bin", tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.arange(64.0), "b": torch.ones(4096)}, whole)
    copy_zip(whole, out, **{"0": bytes(252)})
    with pytest.raises(CheckpointError, match="tensor 'a' needs 256 bytes, and its record has 252"):
        PickledWeights([out])


def test_negated_views_are_refused(tmp_path: Path) -> None:
    torch.save({"z": torch.ones(8, dtype=torch.complex64).conj().imag}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="negated"):
        PickledWeights([tmp_path / "pytorch_model.bin"])


class _Huge:
    def __reduce__(self) -> tuple[object, ...]:
        return bytearray, (1 << 46,)


def test_a_pickle_that_allocates_too_much_is_refused(tmp_path: Path) -> None:
    torch.save({"a": _Huge()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="damaged"):
        PickledWeights([tmp_path / "pytorch_model.bin"])


def test_deeply_nested_json_is_refused(tmp_path: Path) -> None:
    deep = '{"weight_map":' + "[" * 100_000 + "]" * 100_000 + "}"
    (tmp_path / "config.json").write_text(deep)
    with pytest.raises(CheckpointError, match=r"config\.json is not JSON \(maximum recursion depth"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / INDEX).write_text(deep)
    with pytest.raises(CheckpointError, match=rf"{INDEX} is not an index"):
        open_checkpoint(tmp_path)
    (tmp_path / INDEX).unlink()
    (tmp_path / "model.safetensors").write_bytes(len(deep).to_bytes(8, "little") + deep.encode())
    with pytest.raises(CheckpointError, match=r"model\.safetensors: the header is not JSON"):
        open_checkpoint(tmp_path)
