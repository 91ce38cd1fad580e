"""The tensors of a GGUF file under Hugging Face names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint import chunked_file
from stoker.builder.checkpoint.gguf.blocks import PREQUANTIZED_BLOCKS
from stoker.builder.checkpoint.gguf.config import ROPE_FACTORS, hugging_face_name, read_architecture, read_config
from stoker.builder.checkpoint.gguf.file import GGUFFile
from stoker.builder.checkpoint.weights import CheckpointWeights, TensorInfo
from stoker.engine.byte_io import as_bytes, read_into

_FLOAT_DTYPES = {
    gguf.GGMLQuantizationType.F32: torch.float32,
    gguf.GGMLQuantizationType.F16: torch.float16,
    gguf.GGMLQuantizationType.BF16: torch.bfloat16,
    gguf.GGMLQuantizationType.F64: torch.float64,
}


class GGUFWeights(CheckpointWeights):
    """The tensors of a GGUF file. Quantized blocks are dequantized to float32, or imported unchanged (`prequantized`)."""

    def __init__(self, path: Path) -> None:
        self.files = [path]
        self.file = GGUFFile(path)
        self.architecture = read_architecture(self.file)
        self._gguf_tensors = {hugging_face_name(name): tensor for name, tensor in self.file.tensors.items()}
        self.tensors = {
            name: TensorInfo(tensor.shape, _FLOAT_DTYPES.get(tensor.kind, torch.float32)) for name, tensor in self._gguf_tensors.items()
        }
        self._path, self._opened = path, path.open("rb")
        self.config = read_config(self.file, self.tensors, self.read(ROPE_FACTORS) if ROPE_FACTORS in self.tensors else None)
        self.tensors.pop(ROPE_FACTORS, None)
        kinds = {name: self._gguf_tensors[name].kind for name, info in self.tensors.items() if len(info.shape) == 2}
        self.prequantized = {name: PREQUANTIZED_BLOCKS[kind].format for name, kind in kinds.items() if kind in PREQUANTIZED_BLOCKS}

    def chunks(self, name: str) -> Iterator[Tensor]:
        tensor, (rows, *rest) = self._gguf_tensors[name], self.tensors[name].shape
        row_bytes = tensor.num_bytes // rows
        head_rows = self._permuted_head_rows(name)
        multiple = head_rows or 1
        step = max(1, chunked_file.CHUNK_BYTES // (math.prod(rest) * 4) // multiple) * multiple
        for start in range(0, rows, step):
            count = min(step, rows - start)
            raw = np.empty((count, row_bytes), dtype=np.uint8)
            self._read_into(torch.from_numpy(raw), tensor.offset + start * row_bytes)
            values = _dequantize_rows(raw, tensor.kind)
            yield (values if head_rows is None else _reverse_permutation(values, head_rows)).reshape(-1)

    def read_prequantized(self, name: str) -> dict[str, Tensor]:
        """The blocks of a tensor as tensors of an engine format, with its values unchanged."""
        tensor, rows = self._gguf_tensors[name], self.tensors[name].shape[0]
        raw = torch.empty((rows, tensor.num_bytes // rows), dtype=torch.uint8)
        self._read_into(raw, tensor.offset)
        head_rows = self._permuted_head_rows(name)  # the permutation moves whole rows, so it applies to packed rows too
        return PREQUANTIZED_BLOCKS[tensor.kind].repack(raw if head_rows is None else _reverse_permutation(raw, head_rows))

    def _read_into(self, out: Tensor, start: int) -> None:
        """Fill a tensor with the bytes from offset `start`. Raises CheckpointError when the file ends first."""
        try:
            read_into(self._opened.fileno(), as_bytes(out), start)
        except EOFError as problem:
            raise CheckpointError(f"{self._path} was truncated while it was read: {problem}.", cure="Download it again.") from None

    def _permuted_head_rows(self, name: str) -> int | None:
        """The rows per head of a weight that llama.cpp permutes for interleaved rotary pairs; None for all other weights."""
        if self.architecture != "llama" or not re.search(r"\.self_attn\.[qk]_proj\.", name):
            return None
        heads: int = self.config["num_attention_heads"]
        if ".k_proj." in name:
            heads = self.config.get("num_key_value_heads") or heads
        return self.tensors[name].shape[0] // heads


def _dequantize_rows(raw: np.ndarray, kind: gguf.GGMLQuantizationType) -> Tensor:
    """Convert raw rows uint8 [rows, row_bytes] to [rows, columns], in the tensor's dtype or, for quantized blocks, float32."""
    if kind in _FLOAT_DTYPES:
        return torch.from_numpy(raw).view(_FLOAT_DTYPES[kind])
    return torch.from_numpy(gguf.quants.dequantize(raw, kind))


def _reverse_permutation(rows: Tensor, head_rows: int) -> Tensor:
    """Move rows (2i, 2i + 1) of each head back to (i, i + head_rows / 2)."""
    return rows.view(-1, head_rows // 2, 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)
