"""The header of GGUF files: values equal to the gguf library's, and every count bounded by the bytes of the file."""

from __future__ import annotations

import contextlib
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import gguf_files
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.gguf.file import GGUFFile
from stoker.builder.checkpoint.gguf.header import Header
from stoker.builder.checkpoint.gguf.weights import GGUFWeights

MAGIC = struct.pack("<4sI", b"GGUF", 3)


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def test_values_and_tensors_equal_those_of_the_library(tmp_path: Path) -> None:
    metadata = {
        "t.u8": 200, "t.int": 5, "t.f32": 1e-5, "t.bool": True, "t.ints": [1, 2, 3], "t.floats": [0.5, 0.1], "t.bools": [True, False],
        "t.texts": ["", "ä", "x" * 1000],
    }  # fmt: skip
    path = gguf_files.write(tmp_path / "m.gguf", tiny.model(), metadata=metadata)
    reader, found = gguf.GGUFReader(path), GGUFFile(path)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert found.metadata.keys() == fields.keys()
    for name, field in fields.items():
        expected = field.contents()
        if field.types == [gguf.GGUFValueType.FLOAT32]:
            assert np.float32(found.metadata[name]) == np.float32(expected)
        else:
            assert found.metadata[name] == expected and type(found.metadata[name]) is type(expected), name
    assert {name: (t.kind, t.shape, t.offset, t.num_bytes) for name, t in found.tensors.items()} == {
        t.name: (t.tensor_type, tuple(int(n) for n in reversed(t.shape)), t.data_offset, t.n_bytes) for t in reader.tensors
    }


@pytest.mark.parametrize("kind", [0, 4, 8, 9, 12])
def test_an_array_that_claims_more_than_the_file_allocates_nothing(tmp_path: Path, kind: int) -> None:
    """A file of 49 bytes whose array claims 2^62 elements, is rejected before anything is allocated."""
    path = tmp_path / "small.gguf"
    path.write_bytes(MAGIC + struct.pack("<QQ", 0, 1) + string(b"k") + struct.pack("<IIQ", 9, kind, 1 << 62))
    assert path.stat().st_size == 49
    with pytest.raises(CheckpointError, match=r"small\.gguf is not a complete GGUF file \((it claims|an array of arrays)"):
        GGUFFile(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "ends within its header"),
        (b"GGML", "does not begin with GGUF"),
        (struct.pack("<4sI", b"GGUF", 1), "version 1 is not supported"),
        (struct.pack(">4sI", b"GGUF", 3), "big-endian"),
        (MAGIC + struct.pack("<QQ", 1 << 62, 0), "claims 4611686018427387904 tensors"),
        (MAGIC + struct.pack("<QQ", 0, 1 << 62), "metadata values"),
        (MAGIC + struct.pack("<QQQ", 0, 1, 1 << 40) + bytes(20), "a string claims"),
        (MAGIC + struct.pack("<QQ", 0, 1) + string(b"k") + struct.pack("<I", 99), "99 is not a type"),
        (MAGIC + struct.pack("<QQ", 0, 2) + (string(b"k") + struct.pack("<IB", 0, 1)) * 2 + bytes(9), "'k' exists twice"),
        (MAGIC + struct.pack("<QQ", 1, 0) + string(b"t") + struct.pack("<I", 9) + bytes(99), "has 9 dimensions"),
        (MAGIC + struct.pack("<QQ", 0, 1) + string(b"general.alignment") + struct.pack("<II", 4, 0), "general.alignment=0"),
    ],
)
def test_damaged_headers_name_the_defect(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Header(data)


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_random_damage_raises_only_value_errors(data: st.DataObject) -> None:
    whole = bytearray(MAGIC + struct.pack("<QQ", 1, 2) + string(b"a") + struct.pack("<II", 4, 32))
    whole += string(b"b") + struct.pack("<IIQ", 9, 8, 2) + string(b"x") + string(b"yy")
    whole += string(b"t") + struct.pack("<IQQIQ", 2, 4, 4, 0, 0)
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        Header(bytes(whole[: data.draw(st.integers(0, len(whole)))]))


def test_a_large_vocabulary_takes_the_memory_of_its_strings(tmp_path: Path) -> None:
    """A file of an unsupported architecture with 262,144 tokens is rejected with less than 100 MB beyond the imports."""
    count = 1 << 18
    tokens = b"".join(string(b"token%d" % i) for i in range(count))
    values = string(b"general.architecture") + struct.pack("<I", 8) + string(b"rwkv6")
    values += string(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, count) + tokens
    values += string(b"tokenizer.ggml.scores") + struct.pack("<IIQ", 9, 6, count) + bytes(4 * count)
    values += string(b"tokenizer.ggml.token_type") + struct.pack("<IIQ", 9, 5, count) + bytes(4 * count)
    path = tmp_path / "large.gguf"
    path.write_bytes(MAGIC + struct.pack("<QQ", 0, 4) + values)
    code = (
        "import resource, sys\n"
        "from stoker.builder.checkpoint.gguf.weights import GGUFWeights\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    GGUFWeights(__import__('pathlib').Path(sys.argv[1]))\n"
        "except Exception as error:\n    print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    message, growth = done.stdout.rsplit("\n", 2)[:2]
    assert "GGUF architecture 'rwkv6' is not supported" in message
    assert int(growth) < 100_000  # kilobytes


def test_all_tokens_that_end_a_generation_are_end_ids(tmp_path: Path) -> None:
    tokenizer = gguf_files.byte_level(tiny.byte_level())
    tokens = list(tokenizer["ggml.tokens"])
    tokens[7], tokens[9] = "<|im_end|>", "<|eom_id|>"
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 7}
    path = gguf_files.write(tmp_path / "m.gguf", tiny.model(), metadata=metadata)
    assert GGUFWeights(path).config["eos_token_id"][:3] == [5, 7, 9]
