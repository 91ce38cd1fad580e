"""Finds the weight files of a checkpoint directory."""

from __future__ import annotations

from pathlib import Path

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN, read_json_object
from stoker.builder.checkpoint.pytorch_bin import PickledWeights
from stoker.builder.checkpoint.safetensors import SafetensorsWeights
from stoker.builder.checkpoint.weights import CheckpointWeights

# (stem, suffix, reader) of the file names that transformers uses, in the order of preference.
_KINDS = (("model", ".safetensors", SafetensorsWeights), ("pytorch_model", ".bin", PickledWeights))


def open_weights(path: Path) -> CheckpointWeights:
    """The weights of a checkpoint directory: safetensors before pickles, and an index before a single file.

    Raises CheckpointError when there are none, and for an index that does not agree with its files.
    """
    for stem, suffix, reader in _KINDS:
        index, single = path / f"{stem}{suffix}.index.json", path / f"{stem}{suffix}"
        if index.is_file():
            weights = reader(_files_of_index(index))
            _check_index(weights, index)
            return weights
        if single.is_file():
            return reader([single])
    others = sorted(file for file in path.glob("*.safetensors") if file.name != "consolidated.safetensors")
    if len(others) == 1:
        return SafetensorsWeights(others)
    if len(others) > 1:
        raise CheckpointError(
            f"{path} has {len(others)} safetensors files, such as {others[0].name}, and no index that lists their tensors.",
            cure="Download model.safetensors.index.json of the checkpoint into the same directory.",
        )
    pickles = sorted(path.glob("pytorch_model-*.bin"))
    if pickles:
        raise CheckpointError(
            f"{path} has {len(pickles)} shards of pytorch_model.bin, such as {pickles[0].name}, and no index that lists their tensors.",
            cure="Download pytorch_model.bin.index.json of the checkpoint into the same directory.",
        )
    if (path / "qmodel.pt").is_file():
        raise CheckpointError(
            f"{path} has qmodel.pt, in which the hqq library saves objects of its own, and no weights as transformers saves them.",
            cure="Load the original model with transformers and HqqConfig, and use save_pretrained.",
        )
    names = "model.safetensors, model.safetensors.index.json, pytorch_model.bin or its index"
    raise CheckpointError(f"{path} has no weights: none of {names}.", cure="Download them, or build with --dummy-weights.")


def _files_of_index(index: Path) -> list[Path]:
    """The files that an index lists. Raises CheckpointError for an invalid index or files outside its directory."""
    try:
        names = sorted(set(read_json_object(index)["weight_map"].values()))
    except (CheckpointError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{index} is not an index: it has no weight_map.", cure=DOWNLOAD_AGAIN) from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index} names {name!r}, which is not a file next to it.", cure=DOWNLOAD_AGAIN)
        if not (index.parent / name).is_file():
            raise CheckpointError(f"{index} names {name}, which is missing.", cure=DOWNLOAD_AGAIN)
    return [index.parent / name for name in names]


def _check_index(weights: CheckpointWeights, index: Path) -> None:
    """Raise CheckpointError for a tensor that the index lists and no file contains."""
    listed = set(read_json_object(index)["weight_map"])
    for name in sorted(listed - set(weights.tensors)):
        raise CheckpointError(f"{index} lists tensor {name!r}, which no shard holds.", cure=DOWNLOAD_AGAIN)
