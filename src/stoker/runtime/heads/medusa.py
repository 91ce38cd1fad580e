"""Medusa heads (arXiv 2401.10774): head i predicts, from the newest final hidden state, the token that is i + 2 positions later.

A head is residual blocks x + silu(linear(x)) and a linear to the vocabulary. Two formats are read: that of FasterDecoding (tensors
`0.0.linear.weight`), and that of vLLM (`blocks.0.layers.0.weight`), whose `token_map` lists the tokens of a smaller draft vocabulary.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.core.specs import LinearSpec
from stoker.kernels import ops
from stoker.models.architecture import TensorNames
from stoker.quant.linear_ops import LinearOp
from stoker.runtime.heads.folder import HeadFolder
from stoker.runtime.heads.head import ParallelHead, Target, check_equal
from stoker.runtime.heads.layer_config import check_size
from stoker.runtime.heads.weights import HeadLoader, HeadTensors

MAX_HEADS = 32
_COUNTS = ("medusa_num_heads", "num_heads", "medusa_num_layers", "num_hidden_layers")
_FASTER_DECODING = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(?:linear\.)?(weight|bias)")
_VLLM = re.compile(r"(?:medusa_heads\.)?((?:blocks\.\d+\.layers\.\d+|lm_heads\.\d+|lm_head)\.(?:weight|bias)|token_map)")


def is_medusa(folder: HeadFolder) -> bool:
    """Whether a folder holds Medusa heads."""
    return bool({"medusa_num_heads", "medusa_num_layers"} & set(folder.config)) or folder.config.get("model_type") == "medusa"


class MedusaHeads(ParallelHead):
    """The blocks and output linears of all heads."""

    def __init__(self, blocks: list[list[LinearOp]], heads: list[LinearOp], token_map: Tensor | None, num_bytes: int) -> None:
        self.blocks, self.heads, self.target_ids, self.num_bytes = blocks, heads, token_map, num_bytes
        self.num_drafts, self.draft_bytes = len(heads), num_bytes // len(heads)

    def logits(self, i: int, x: Tensor) -> Tensor:
        for linear in self.blocks[i]:
            x = x + ops.activate(linear(x), "silu")
        return self.heads[i](x)


def load_medusa(folder: HeadFolder, target: Target) -> MedusaHeads:
    """Load the heads of a folder. Raises CheckpointError for damaged files, and ConfigError for heads that do not fit the model."""
    folder = folder.renamed(_canonical)
    hidden, vocab = target.config.hidden_size, target.config.vocab_size
    data: dict[str, Any] = folder.config
    for key in ("hidden_size", "vocab_size", "truncated_vocab_size", *_COUNTS):
        check_size(folder.path, key, data.get(key))
    for key, expected in (("hidden_size", hidden), ("vocab_size", vocab)):
        if data.get(key) is not None:
            check_equal(folder.path, key, data[key], expected)
    count, depth = _sizes(folder)
    width = folder.shape("heads.0.weight")
    if len(width) != 2:
        raise CheckpointError(
            f"{folder.path}: heads.0.weight has shape {list(width)}, and is not a matrix.", cure="Download the heads again."
        )
    check_equal(folder.path, "hidden_size", width[-1], hidden)
    token_map = None
    if "token_map" in folder.names:
        ids = folder.read_integers("token_map", (data.get("truncated_vocab_size") or width[0],))
        if len(ids) == 0 or int(ids.min()) < 0 or int(ids.max()) >= vocab:
            raise CheckpointError(f"{folder.path}: token_map has ids that are not from 0 to {vocab - 1}.", cure="Download the heads again.")
        token_map = ids.to(torch.int32).to(target.model.device)
    else:
        check_equal(folder.path, "vocabulary", width[0], vocab)
    rows = vocab if token_map is None else len(token_map)
    names: TensorNames = {name.rpartition(".")[0]: name.rpartition(".")[0] for name in folder.names}
    loader = HeadLoader(HeadTensors(folder, names, target.config, target.model.device), target.model.dtype, quantized=target.quantized)

    def linear(name: str, size: int) -> Any:
        return loader.linear(LinearSpec(name=name, in_features=hidden, parts=(size,), bias=f"{name}.bias" in folder.names))

    blocks = [[linear(f"blocks.{i}.{j}", hidden) for j in range(depth)] for i in range(count)]
    heads = [linear(f"heads.{i}", rows) for i in range(count)]
    folder.check_all_used()
    return MedusaHeads(blocks, heads, token_map, loader.num_bytes)


def _canonical(name: str) -> str | None:
    """The name `blocks.I.J` or `heads.I` of a tensor. The output linear of FasterDecoding's heads is renamed by its missing `linear`."""
    if match := _FASTER_DECODING.fullmatch(name):
        head, layer, kind = match.groups()
        return f"blocks.{head}.{layer}.{kind}" if ".linear." in name else f"heads.{head}.{kind}"
    if match := _VLLM.fullmatch(name):
        return re.sub(r"^lm_heads\.", "heads.", re.sub(r"^blocks\.(\d+)\.layers", r"blocks.\1", match[1]))
    return name


def _sizes(folder: HeadFolder) -> tuple[int, int]:
    """(heads, residual blocks of each), from the names of the tensors. Raises CheckpointError if config.json has other numbers."""
    found = [
        len({match[1] for name in folder.names if (match := re.fullmatch(pattern, name))})
        for pattern in (r"heads\.(\d+)\.weight", r"blocks\.0\.(\d+)\.weight")
    ]
    count, depth = found
    data = folder.config
    for keys, number in ((("medusa_num_heads", "num_heads"), count), (("medusa_num_layers", "num_hidden_layers"), depth)):
        stated = next((data[key] for key in keys if data.get(key) is not None), number)
        if stated != number or not 1 <= number <= MAX_HEADS:
            raise CheckpointError(
                f"{folder.path}: config.json has {keys[0]}={stated}, and the weights have {number}.", cure="Download the heads again."
            )
    return count, depth
