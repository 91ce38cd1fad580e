"""Multi-token prediction layers (DeepSeek V3, arXiv 2412.19437, section 2.2), which are part of the model's own checkpoint.

    x' = norm(layer(project([norm(embedding of the following token), norm(x)])))     MiMo: project([norm(x), norm(embedding)])
    logits = output head of the model(x')

The layer has the blocks of the model's last layer with attention. It is trained to predict one token; for further drafts it reads its own
output. A checkpoint with several such layers uses the first one. Formats: layer number L of DeepSeek V3 and GLM-4.5, `mtp_layers.0` of
MiMo, and `mtp` of Qwen3-Next and Qwen3.5.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.core.model_config import ModelConfig
from stoker.core.specs import LinearSpec
from stoker.layers.layer import RopeTables, make_layer
from stoker.layers.norm import Norm
from stoker.models.architecture import Transformed
from stoker.models.config_reader import read_model_config
from stoker.models.registry import resolve_architecture
from stoker.models.tensor_transforms import add_one, subtract_one
from stoker.runtime.heads.folder import HeadFolder
from stoker.runtime.heads.head import RecurrentHead, Target, check_equal
from stoker.runtime.heads.weights import HeadLoader, HeadTensors


@dataclass(frozen=True, slots=True)
class MtpNames:
    """The modules of one format besides those of the layer. Embedding and output head are copies of the model's, which are used instead."""

    embed_norm: str
    hidden_norm: str
    project: str
    norm: str
    copies: tuple[str, ...]
    hidden_first: bool = False  # whether `project` reads the hidden state before the embedding
    one_plus: bool = False  # whether the weights of norms are stored less one


_DEEPSEEK = MtpNames("enorm", "hnorm", "eh_proj", "shared_head.norm", ("embed_tokens", "shared_head.head"))
_MIMO = MtpNames("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", (), hidden_first=True)
_QWEN = MtpNames("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", (), one_plus=True)
_LAYER = "model.layers.0."  # the prefix of the tensors after renaming
_LATER_LAYER = re.compile(r"mtp\.layers\.[1-9]")
_ENORM = re.compile(r"model\.layers\.(\d{1,6})\.enorm\.weight")


def is_mtp(folder: HeadFolder) -> bool:
    """Whether a folder holds a multi-token prediction layer."""
    return _prefix(folder) is not None


class MtpHead(RecurrentHead):
    """The layer, its input norms and projection, and its final norm."""

    def __init__(self, config: ModelConfig, loader: HeadLoader, target: Target, names: MtpNames) -> None:
        self.config, self.target, self.hidden_first = config, target, names.hidden_first
        hidden, layer = config.hidden_size, config.layers[0]
        self.embed_norm, self.hidden_norm, self.norm = (
            Norm(layer.norm, loader, name, hidden) for name in ("embed_norm", "hidden_norm", "final_norm")
        )
        self.project = loader.linear(LinearSpec(name="project", in_features=2 * hidden, parts=(hidden,)))
        self.layer = make_layer(layer, loader, "layers.0", hidden, RopeTables(target.num_positions, loader.device))

    def begin(self, x: Tensor) -> Tensor:
        return x

    def __call__(self, x: Tensor, batch: ForwardBatch, caches: list[KVCache]) -> Tensor:
        parts = self.embed_norm(self.target.embed(batch.token_ids)), self.hidden_norm(x)
        x = self.project(torch.cat(parts[::-1] if self.hidden_first else parts, dim=-1))
        return self.norm(self.layer(x, batch, caches[0]))

    def logits(self, x: Tensor) -> Tensor:
        return self.target.logits(x)


def load_mtp(folder: HeadFolder, target: Target) -> MtpHead:
    """Load the layer from the checkpoint of its model. Raises CheckpointError for damaged files, ConfigError for that of another model."""
    prefix, names = _prefix(folder) or ("", _DEEPSEEK)
    row = resolve_architecture(folder.config)
    model = read_model_config(row, folder.config)
    for what in ("hidden_size", "vocab_size", "num_layers"):
        check_equal(folder.path, what, getattr(model, what), getattr(target.config, what))
    if model.architecture != target.config.architecture:
        raise CheckpointError(
            f"{folder.path} does not fit: it is a {model.architecture}, and the engine is a {target.config.architecture}.",
            cure="Name the checkpoint from which the engine was built.",
        )
    if row.stacks_experts:
        folder = folder.with_single_experts()
    folder = folder.renamed(lambda name: _rename(name, prefix))
    folder.ignore(*(name for name in folder.names if name.startswith(tuple(f"{_LAYER}{copy}." for copy in names.copies))))
    folder.ignore(*(name for name in folder.names if name.endswith((".rotary_emb.inv_freq", "_scale_inv"))))
    layer = next(layer for layer in reversed(model.layers) if layer.attention is not None)
    config = msgspec.structs.replace(model, layers=(layer,))  # a model that consists of the layer
    norms = {"embed_norm": names.embed_norm, "hidden_norm": names.hidden_norm, "final_norm": names.norm}
    tensor_names = row.tensor_names(config) | {"project": _LAYER + names.project}
    for key, name in norms.items():
        tensor_names[key] = Transformed((_LAYER + name,), add_one, subtract_one) if names.one_plus else _LAYER + name
    tensors = HeadTensors(folder, tensor_names, config, target.model.device)
    loader = HeadLoader(tensors, target.model.dtype, quantized=target.quantized)
    head = MtpHead(config, loader, target, names)
    folder.check_all_used()
    head.num_bytes, head.draft_bytes = loader.num_bytes, loader.num_bytes + target.head.num_bytes
    return head


def _rename(name: str, prefix: str) -> str | None:
    """The name of a tensor of the first multi-token prediction layer as one of layer 0; None for other tensors."""
    if not name.startswith(prefix) or _LATER_LAYER.match(name):
        return None
    return _LAYER + name.removeprefix(prefix).removeprefix("layers.0.")


def _prefix(folder: HeadFolder) -> tuple[str, MtpNames] | None:
    """(prefix of the tensors of the first multi-token prediction layer, its format), or None."""
    if "model.mtp_layers.0.input_proj.weight" in folder.names:
        return "model.mtp_layers.0.", _MIMO
    if "mtp.fc.weight" in folder.names:
        return "mtp.", _QWEN
    layers = [int(match[1]) for name in folder.names if (match := _ENORM.fullmatch(name))]
    return (f"model.layers.{min(layers)}.", _DEEPSEEK) if layers else None
