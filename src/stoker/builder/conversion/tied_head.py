"""Finds out whether the output head of a checkpoint is the token embedding, where config.json says so and the head is stored, too."""

from __future__ import annotations

import msgspec
import torch

from stoker.base.logging import get_logger
from stoker.builder.checkpoint.weights import CheckpointWeights
from stoker.core.model_config import ModelConfig
from stoker.models.architecture import Architecture

log = get_logger(__name__)


def untie_different_head(architecture: Architecture, model: ModelConfig, weights: CheckpointWeights) -> ModelConfig:
    """The model with a head of its own if config.json ties it to the embedding and the checkpoint stores another one.

    transformers does the same. Reads both tensors if the checkpoint has both, up to the first difference.
    """
    names = architecture.tensor_names(model)
    embed, head = names.get("embed"), names.get("head")
    if not model.tie_head or not isinstance(embed, str) or not isinstance(head, str):
        return model
    if f"{head}.weight" not in weights.tensors or f"{embed}.weight" not in weights.tensors:
        return model
    if _are_equal(weights, f"{embed}.weight", f"{head}.weight"):
        return model
    log.warning("config.json ties the output head to the embedding, but %s.weight differs from it: the head is used as it is stored", head)
    return msgspec.structs.replace(model, tie_head=False)


def _are_equal(weights: CheckpointWeights, one: str, other: str) -> bool:
    """Whether two tensors of the checkpoint have the same shape, dtype and elements."""
    if weights.tensors[one] != weights.tensors[other]:
        return False
    flat, done = weights.read(one).view(-1), 0
    for chunk in weights.chunks(other):
        if not torch.equal(flat[done : done + chunk.numel()], chunk):
            return False
        done += chunk.numel()
    return True
