"""GGUF files that describe more than they hold, or the same thing twice, are refused when they are opened."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import numpy as np
import pytest

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.gguf import weights as module
from stoker.builder.checkpoint.gguf.file import GGUFFile
from stoker.builder.checkpoint.gguf.registry import ARCHITECTURES
from stoker.builder.checkpoint.gguf.weights import GGUFWeights

Q8_0 = gguf.GGMLQuantizationType.Q8_0
VECTOR = np.zeros(256, np.float32)
EXPERTS = np.zeros((2, 1, 4), np.float32)


def write(path: Path, tensors: dict[str, np.ndarray], arch: str = "llama", **metadata: Any) -> Path:
    """A file with only these tensors, and the metadata that every architecture must have."""
    writer = gguf.GGUFWriter(path, arch)
    for key in ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"):
        writer.add_key_value(f"{arch}.{key}", metadata.pop(key.replace(".", "_"), 8), gguf.GGUFValueType.UINT32)
    for key, value in metadata.items():
        writer.add_key_value(f"{arch}.{key}", *gguf_files.typed(value))
    for name, data in tensors.items():
        writer.add_tensor(name, data, raw_dtype=Q8_0 if data.dtype == np.uint8 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_tensors_that_share_bytes_are_refused(tmp_path: Path) -> None:
    """Many records of one small tensor, which would be 4096 experts in each of 1000 layers."""
    names = [f"blk.{i}.ffn_up_exps.weight".encode() for i in range(1000)]
    records = b"".join(struct.pack("<Q", len(name)) + name + struct.pack("<IQQQIQ", 3, 1, 1, 4096, 0, 0) for name in names)
    key, value = b"general.architecture", b"llama"
    metadata = struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(value)) + value
    (tmp_path / "m.gguf").write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, len(names), 1) + metadata + records + bytes(32 + 4 * 4096))
    with pytest.raises(CheckpointError, match=r"'blk\.1\.ffn_up_exps\.weight' begins at byte \d+, before the end of 'blk\.0\.ffn_up_exps"):
        GGUFFile(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"blk.0.ffn_up_exps.weight": EXPERTS}, {}, r"shape \[2, 1, 4\] is not of llama\.expert_count=0 experts"),
        ({"blk.0.ffn_up_exps.weight": EXPERTS}, {"expert_count": 3}, r"shape \[2, 1, 4\] is not of llama\.expert_count=3 experts"),
        ({"blk.0.ffn_up_exps.bias": VECTOR}, {"expert_count": 256}, r"shape \[256\] is not of llama\.expert_count=256 experts"),
        ({}, {"expert_count": 4097}, r"llama\.expert_count=4097 is not supported.*At most 4096"),
        (
            {f"blk.{i}.ffn_up_exps.weight": EXPERTS for i in range(3)},
            {"expert_count": 2},
            "its layers have more than 5 matrices of experts",
        ),
        (
            {"blk.0.ffn_up.1.weight": EXPERTS[0], "blk.0.ffn_up_exps.weight": EXPERTS},
            {"expert_count": 2},
            r"blk\.0\.ffn_up_exps\.1\.weight exists twice, the second time as blk\.0\.ffn_up_exps\.weight",
        ),
        (
            {"blk.0.attn_norm.weight": gguf.quants.quantize(VECTOR, Q8_0)},
            {},
            r"blk\.0\.attn_norm\.weight is a vector in blocks of Q8_0",
        ),
    ],
)
def test_tensors_that_are_not_those_of_a_model_are_refused(
    tmp_path: Path, tensors: dict, metadata: dict, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_EXPERT_TENSORS", 5)
    with pytest.raises(CheckpointError, match=message):
        GGUFWeights(write(tmp_path / "m.gguf", tensors, **metadata))


@pytest.mark.parametrize("layers", [0, 4097, 1 << 31])
def test_the_number_of_layers_is_checked_first(tmp_path: Path, layers: int) -> None:
    """Before the row of an architecture makes a list of this length."""
    for arch in ARCHITECTURES:
        path = write(tmp_path / f"{arch}.gguf", {"token_embd.weight": EXPERTS[0]}, arch, block_count=layers)
        with pytest.raises(CheckpointError, match=rf"{arch}\.block_count={layers} is not supported.*from 1 to 4096"):
            GGUFWeights(path)
