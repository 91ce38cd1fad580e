"""EAGLE heads (arXiv 2401.15077): a Llama layer that predicts the next final hidden state of the model.

    x' = layer(fc([embedding of the following token, x]))        the first layer has no norm before its attention
    logits = output head of the model(x')

Format of SafeAILab and of vLLM: tensors `fc.weight` and `layers.0.*`, optionally with the prefix `model.`.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.core.model_config import AttentionConfig, ModelConfig
from stoker.core.specs import LinearSpec
from stoker.layers.attention import Attention
from stoker.layers.layer import RopeTables, make_layer
from stoker.layers.mlp import MLP
from stoker.layers.norm import Norm
from stoker.models.architectures.llama import llama_names
from stoker.runtime.heads.folder import HeadFolder
from stoker.runtime.heads.head import RecurrentHead, Target, check_equal
from stoker.runtime.heads.layer_config import read_layers
from stoker.runtime.heads.weights import HeadLoader, HeadTensors


def is_eagle(folder: HeadFolder) -> bool:
    """Whether a folder holds an EAGLE head."""
    return {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= {name.removeprefix("model.") for name in folder.names}


class EagleHead(RecurrentHead):
    """The layers of an EAGLE head; embedding and output head are those of the model."""

    def __init__(self, config: ModelConfig, loader: HeadLoader, target: Target, *, bias: bool) -> None:
        self.config, self.target = config, target
        hidden, first = config.hidden_size, config.layers[0]
        self.fc = loader.linear(LinearSpec(name="fc", in_features=2 * hidden, parts=(hidden,), bias=bias))
        tables = RopeTables(target.num_positions, loader.device)
        assert isinstance(first.attention, AttentionConfig)
        self.attention = Attention(first.attention, loader, "layers.0.attention", hidden, tables.get(first.attention.rope))
        self.mlp = MLP(first.mlp, loader, "layers.0.mlp", hidden)  # type: ignore[arg-type]
        self.mlp_norm = Norm(first.norm, loader, "layers.0.mlp_norm", hidden)
        self.others = [make_layer(config.layers[i], loader, f"layers.{i}", hidden, tables) for i in range(1, config.num_layers)]

    def begin(self, x: Tensor) -> Tensor:
        return x

    def __call__(self, x: Tensor, batch: ForwardBatch, caches: list[KVCache]) -> Tensor:
        x = self.fc(torch.cat((self.target.embed(batch.token_ids), x), dim=-1))
        x = self.attention(x, batch, caches[0], None, x)
        x = self.mlp(x, self.mlp_norm, x)
        for layer, cache in zip(self.others, caches[1:], strict=True):
            x = layer(x, batch, cache)
        return x

    def logits(self, x: Tensor) -> Tensor:
        return self.target.logits(x)


def load_eagle(folder: HeadFolder, target: Target) -> EagleHead:
    """Load the head of a folder. Raises CheckpointError for damaged files, and ConfigError for a head that does not fit the model."""
    folder = folder.renamed(canonical_name)
    _check_settings(folder)
    config = read_layers(folder.path, folder.config)
    check_equal(folder.path, "hidden_size", config.hidden_size, target.config.hidden_size)
    check_equal(folder.path, "vocabulary", config.vocab_size, target.config.vocab_size)
    # The reference implementation also copies the embedding of the model.
    folder.ignore(*(name for name in folder.names if name in ("embed_tokens.weight", "lm_head.weight") or name.endswith(".inv_freq")))
    tensors = HeadTensors(folder, llama_names(config) | {"fc": "fc"}, config, target.model.device)
    loader = HeadLoader(tensors, target.model.dtype, quantized=target.quantized)
    head = EagleHead(config, loader, target, bias="fc.bias" in folder.names)
    folder.check_all_used()
    head.num_bytes, head.draft_bytes = loader.num_bytes, loader.num_bytes + target.head.num_bytes
    return head


def _check_settings(folder: HeadFolder) -> None:
    """Raise CheckpointError for settings of other variants, which would change what the head computes."""
    for key in ("eagle_config", "speculators_config", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        if folder.config.get(key) not in (None, False, {}):
            raise CheckpointError(
                f"{folder.path}: {key}={str(folder.config[key])[:60]!r} of an EAGLE head is not supported.",
                cure="Use an EAGLE-3 head, or one without the setting.",
            )


def canonical_name(name: str) -> str:
    """The name of a tensor without the prefix `model.`; layers have names as in Llama."""
    return re.sub(r"^(?:midlayer|layers\.(\d+))\.", lambda match: f"model.layers.{match[1] or 0}.", name.removeprefix("model."))
