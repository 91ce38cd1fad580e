"""What an engine will take, before it is built: files, device memory, and the largest batch that fits."""

from __future__ import annotations

import math
import os

import msgspec
import torch

from stoker.builder.conversion.shard_plan import RankShare
from stoker.builder.conversion.tensor_plan import weight_names
from stoker.core.model_config import AttentionConfig, MLPConfig, ModelConfig
from stoker.distributed.pipeline import stage_layers
from stoker.engine.config import EngineConfig
from stoker.engine.reader import rank_file
from stoker.engine.tensor_file import num_bytes
from stoker.layers.decoder import declare, kv_width

USABLE = {"cuda": 0.9, "cpu": 0.5}  # of the memory, as runtime's kv_cache_fraction


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """All in bytes; but for the files, of the rank that needs the most."""

    parameters: int
    files: dict[str, int]
    weights: int
    activations: int  # of one step of max_num_tokens
    kv_token: int  # KV cache of one token
    kv_sequence: int  # of one sequence at max_seq_len, in whole blocks
    kv_limits: int  # of max_batch_size such sequences
    memory: int | None  # the device's; None: there is none here and none was given
    largest_batch: int | None  # sequences of max_seq_len that fit

    @property
    def fits(self) -> bool:
        return self.largest_batch is None or self.largest_batch > 0


def estimate(config: EngineConfig, memory: int | None = None) -> Estimate:
    """The estimate of an engine. `memory`: the device's bytes, when it is not in this machine."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    shares = [RankShare(config, rank) for rank in range(config.mapping.world_size)]
    files = {rank_file(i): sum(num_bytes(*layout) for layout in share.layouts().values()) for i, share in enumerate(shares)}
    weights = max(files.values())
    activations = activation_bytes(config, dtype)
    token = kv_token_bytes(config, dtype)
    limits = config.limits
    sequence = token * -(-limits.max_seq_len // limits.tokens_per_block) * limits.tokens_per_block
    memory = memory if memory is not None else device_memory(config.target.device)
    free = None if memory is None else int((memory - weights - activations) * USABLE[config.target.device])
    return Estimate(
        parameters=parameters(config.model),
        files={} if config.weights == "dummy" else files,
        weights=weights,
        activations=activations,
        kv_token=token,
        kv_sequence=sequence,
        kv_limits=sequence * limits.max_batch_size,
        memory=memory,
        largest_batch=None if free is None else max(0, min(free // sequence, limits.max_batch_size)),
    )


def parameters(model: ModelConfig) -> int:
    """Values of all weights before quantization."""
    return sum(math.prod(shape) for spec in declare(model).values() for shape in weight_names(spec).values())


def kv_token_bytes(config: EngineConfig, dtype: torch.dtype) -> int:
    """Bytes of keys and values of one token over the layers of the rank that has the most."""
    size = (getattr(torch, config.recipe.kv_cache) if config.recipe.kv_cache else dtype).itemsize
    tensor, stages = config.mapping.tensor_parallel, config.mapping.pipeline_parallel
    return max(
        sum(kv_width(config.model, i, tensor) * size for i in stage_layers(config.model.num_layers, stages, stage))
        for stage in range(stages)
    )


def activation_bytes(config: EngineConfig, dtype: torch.dtype) -> int:
    """The widest moment of a step: the stream and its residual, the widest layer's intermediate values, and the logits in float32 beside
    the model's dtype."""
    model, limits = config.model, config.limits
    widest = max(max(_attention_width(layer.attention), _mlp_width(layer.mlp)) for layer in model.layers)
    rows = limits.max_num_tokens * (3 * model.hidden_size + widest) * dtype.itemsize
    logits = limits.max_batch_size * limits.max_beam_width * model.vocab_size * (dtype.itemsize + 4)
    return rows + logits


def _attention_width(attention: object) -> int:
    """Values a token holds at once: qkv, rotated queries, the mixed values."""
    if isinstance(attention, AttentionConfig):
        return attention.head_size * (3 * attention.num_heads + 2 * attention.num_kv_heads)
    heads, size = attention.num_heads, attention.nope_size + attention.rope_size + attention.kv_rank  # type: ignore[attr-defined]
    return 3 * heads * size


def _mlp_width(mlp: object) -> int:
    """Gate, up and their product; for experts, of each one chosen."""
    if isinstance(mlp, MLPConfig):
        return mlp.size * (3 if mlp.gated else 2)
    shared = _mlp_width(mlp.shared) if mlp.shared is not None else 0  # type: ignore[attr-defined]
    return mlp.top_k * _mlp_width(mlp.expert) + shared  # type: ignore[attr-defined]


def device_memory(device: str) -> int | None:
    """Bytes of the device here: a GPU's memory, or what this machine has free."""
    if device == "cpu":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
