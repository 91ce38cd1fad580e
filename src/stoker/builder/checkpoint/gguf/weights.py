"""The tensors of a GGUF file under their GGUF names, with each expert of a layer as a tensor of its own."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.base.logging import get_logger
from stoker.builder.checkpoint import chunked_file
from stoker.builder.checkpoint.gguf.blocks import FLOAT_DTYPES, PREQUANTIZED_BLOCKS, SUPPORTED_KINDS, WIDENED_BLOCKS, dequantize_rows
from stoker.builder.checkpoint.gguf.config import read_config
from stoker.builder.checkpoint.gguf.file import GGUFFile, GGUFTensor
from stoker.builder.checkpoint.gguf.metadata import Metadata
from stoker.builder.checkpoint.gguf.names import tensor_names
from stoker.builder.checkpoint.gguf.registry import find_architecture
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN
from stoker.builder.checkpoint.weights import CheckpointWeights, TensorInfo
from stoker.engine.byte_io import as_bytes, read_into
from stoker.models import Architecture

log = get_logger(__name__)

_MAX_EXPERTS = 4096  # of a layer
_MAX_EXPERT_TENSORS = 1 << 18  # of a file: 61 layers of 384 experts have 70,272

# Of a chunk, including intermediate results. 2^20 values fit the caches of a CPU: repacking Q3_K and IQ4_XS takes 25 to 40 % less
# CPU time than with 2^22.
_BYTES_PER_VALUE = 16

# Tensors without effect, as fnmatch patterns: rotary tables of old files.
_IGNORED_TENSORS = ("blk.*.attn_rot_embd.*", "blk.*.rope_freqs.*")
_EXPERTS = re.compile(r"(blk\.\d+\.ffn_(?:gate|up|down|gate_up)_exps)\.(weight|bias)")
_ONE_EXPERT = re.compile(r"(blk\.\d+\.ffn_(?:gate|up|down))\.(\d+)\.(weight|bias)")  # in files of early 2024


class GGUFWeights(CheckpointWeights):
    """The tensors of a GGUF file. Quantized blocks are dequantized to float32, or imported unchanged (`prequantized`)."""

    def __init__(self, path: Path) -> None:
        self.file = GGUFFile(path)
        self.files = self.file.paths
        self.row = find_architecture(self.file)
        self._opened = [part.open("rb") for part in self.files]
        _check_kinds(self.file)
        self._computed: dict[str, Tensor] = {}  # tensors of the row that are stored as metadata
        self._tensors = _with_experts_apart(self.file, self.row.name)
        metadata = Metadata(self.file, self.row.name, self.read)
        self.tensors = {
            name: TensorInfo(tensor.shape, FLOAT_DTYPES.get(tensor.kind, torch.float32)) for name, tensor in self._tensors.items()
        }
        self.config = read_config(self.file, self.row, metadata)
        self._computed = self.row.computed(metadata)
        self.tensors |= {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in self._computed.items()}
        self._unused = tuple(metadata.unused)
        kinds = {name: tensor.kind for name, tensor in self._tensors.items() if len(tensor.shape) == 2}
        self.prequantized = {name: PREQUANTIZED_BLOCKS[kind].format for name, kind in kinds.items() if kind in PREQUANTIZED_BLOCKS}

    def adapt(self, architecture: Architecture) -> Architecture:
        """The row of the models table with the tensor names of this file."""
        return dataclasses.replace(
            architecture,
            tensor_names=partial(tensor_names, self.row, tensors=self.tensors),
            tensor_renames=(),
            ignored_tensors=(*_IGNORED_TENSORS, *self._unused, *self.row.ignored_tensors),
        )

    def chunks(self, name: str) -> Iterator[Tensor]:
        if name in self._computed:
            yield self._computed[name].flatten()
            return
        kind = self._tensors[name].kind
        for _, raw in self._raw_rows(name):
            yield dequantize_rows(raw.numpy(), kind).reshape(-1)

    def read_prequantized(self, name: str) -> dict[str, Tensor]:
        """The blocks of a tensor as tensors of an engine format, with its values unchanged."""
        rows, repack = self.tensors[name].shape[0], PREQUANTIZED_BLOCKS[self._tensors[name].kind].repack
        stored: dict[str, Tensor] = {}
        for start, raw in self._raw_rows(name):  # intermediate results of all rows would have several times the size of the tensor
            for suffix, part in repack(raw).items():
                if suffix not in stored:
                    stored[suffix] = torch.empty((rows, *part.shape[1:]), dtype=part.dtype)
                stored[suffix][start : start + len(part)] = part
        return stored

    def _raw_rows(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """(index of the first row, uint8 [rows, row_bytes]) of the rows of a tensor in order, in chunks of bounded size.

        Rows that the converter permuted are in the order of Hugging Face: the permutation moves whole rows, packed or not.
        """
        tensor, (rows, *rest) = self._tensors[name], self.tensors[name].shape
        row_bytes, head_rows = tensor.num_bytes // rows, self._permuted_head_rows(name)
        multiple = head_rows or 1
        step = max(1, chunked_file.CHUNK_BYTES // _BYTES_PER_VALUE // math.prod(rest) // multiple) * multiple
        for start in range(0, rows, step):
            raw = torch.empty((min(step, rows - start), row_bytes), dtype=torch.uint8)
            self._read_into(raw, tensor, start * row_bytes)
            yield start, raw if head_rows is None else _reverse_permutation(raw, head_rows)

    def location(self, name: str) -> str:
        """The file and the name of a tensor, for error messages."""
        part = 0 if name in self._computed else self._tensors[name].part
        return f"{self.files[part]}: {name}"

    def _read_into(self, out: Tensor, tensor: GGUFTensor, start: int) -> None:
        """Fill `out` with the bytes of a tensor from byte `start` of it. Raises CheckpointError when the file ends first."""
        try:
            read_into(self._opened[tensor.part].fileno(), as_bytes(out), tensor.offset + start)
        except EOFError as problem:
            path = self.files[tensor.part]
            raise CheckpointError(f"{path} was truncated while it was read: {problem}.", cure="Download it again.") from None

    def _permuted_head_rows(self, name: str) -> int | None:
        """The rows per head of a weight that the converter permutes for interleaved rotary pairs; None for all other weights."""
        found = re.search(r"\.attn_([qk])\.", name) if self.row.permuted else None
        if found is None:
            return None
        heads: int = self.config["num_attention_heads"]
        if found[1] == "k":
            heads = self.config.get("num_key_value_heads") or heads
        rows = self.tensors[name].shape[0]
        if heads <= 0 or rows % (2 * heads):
            message = f"{self.location(name)} has {rows} rows, which {heads} heads with pairs of rotated features do not divide"
            raise CheckpointError(f"{message}.", cure="Download the file again.")
        return rows // heads


def _check_kinds(file: GGUFFile) -> None:
    """Raise CheckpointError for a tensor of a type that weights do not have, and log the types that are stored in more bits."""
    for name, tensor in file.tensors.items():
        if tensor.kind not in SUPPORTED_KINDS:
            supported = ", ".join(sorted(kind.name for kind in SUPPORTED_KINDS))
            raise CheckpointError(f"{file.path}: the tensor {name[:80]} has the type {tensor.kind.name}.", cure=f"Supported: {supported}.")
        row_dims = len(tensor.shape) - bool(_EXPERTS.fullmatch(name))
        if tensor.kind not in FLOAT_DTYPES and row_dims < 2:
            problem = f"{file.path}: the tensor {name[:80]} is a vector in blocks of {tensor.kind.name}"
            raise CheckpointError(f"{problem}.", cure="Convert the model again: llama.cpp keeps vectors in F32, F16 or BF16.")
    counts = Counter(tensor.kind.name for tensor in file.tensors.values() if tensor.kind in WIDENED_BLOCKS)
    if counts:
        listed = ", ".join(f"{name} ({count} tensors)" for name, count in counts.items())
        log.info("%s: %s: stored in 8 bits per value, because no kernel reads this type. No value changes.", file.path.name, listed)


def _with_experts_apart(file: GGUFFile, architecture: str) -> dict[str, GGUFTensor]:
    """The tensors of a file, where "ffn_up_exps.weight" [experts, rows, columns] became "ffn_up_exps.0.weight" and so on.

    Raises CheckpointError for more experts than the metadata has, and for two tensors that are the same expert.
    """
    _check_experts(file, architecture)
    tensors: dict[str, GGUFTensor] = {}
    for name, tensor in file.tensors.items():
        if single := _ONE_EXPERT.fullmatch(name):
            apart = {f"{single[1]}_exps.{single[2]}.{single[3]}": tensor}
        elif found := _EXPERTS.fullmatch(name):
            apart = {f"{found[1]}.{e}.{found[2]}": tensor.row(e) for e in range(tensor.shape[0])}
        else:
            apart = {name: tensor}
        if twice := sorted(apart.keys() & tensors.keys()):
            problem = f"{file.path}: {twice[0][:80]} exists twice, the second time as {name[:80]}"
            raise CheckpointError(f"{problem}.", cure=DOWNLOAD_AGAIN)
        tensors |= apart
    return tensors


def _check_experts(file: GGUFFile, architecture: str) -> None:
    """Raise CheckpointError unless each tensor of experts has as many as the metadata, and these are not more than a model has."""
    key = f"{architecture}.expert_count"
    count, total = file.get(key, int, 0), 0
    if count > _MAX_EXPERTS:
        raise CheckpointError(f"{file.path}: {key}={count} is not supported.", cure=f"At most {_MAX_EXPERTS} experts are.")
    for name, tensor in file.tensors.items():
        if not _EXPERTS.fullmatch(name):
            continue
        if len(tensor.shape) < 2 or tensor.shape[0] != count:
            problem = f"the tensor {name[:80]} of shape {list(tensor.shape)} is not of {key}={count} experts"
            raise CheckpointError(f"{file.path}: {problem}.", cure=DOWNLOAD_AGAIN)
        total += count
        if total > _MAX_EXPERT_TENSORS:
            cure = f"At most {_MAX_EXPERT_TENSORS} are supported."
            raise CheckpointError(f"{file.path}: its layers have more than {_MAX_EXPERT_TENSORS} matrices of experts.", cure=cure)


def _reverse_permutation(rows: Tensor, head_rows: int) -> Tensor:
    """Move rows (2i, 2i + 1) of each head back to (i, i + head_rows / 2). `rows` has any number of further dimensions."""
    pairs: Tensor = rows.unflatten(0, (-1, head_rows // 2, 2))
    return pairs.transpose(1, 2).reshape(rows.shape)
