"""Estimates for an engine before it is built: file sizes, device memory, and the largest batch that fits."""

from __future__ import annotations

import math
import os

import msgspec
import torch

from stoker.builder.conversion.shard_plan import ShardPlan
from stoker.builder.conversion.tensor_plan import dense_shapes
from stoker.core.model_config import AttentionConfig, LayerConfig, MLAConfig, MLPConfig, ModelConfig, MoEConfig
from stoker.distributed.pipeline import stage_layers
from stoker.engine.config import EngineConfig
from stoker.engine.config_file import rank_file_name
from stoker.engine.safetensors_header import num_bytes
from stoker.layers.decoder import declare, kv_width
from stoker.layers.state_cache import state_bytes

USABLE_FRACTION = {"cuda": 0.9, "cpu": 0.5}  # of free memory, as the runtime's kv_cache_fraction


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in bytes. All except `files` are of the rank that needs the most memory."""

    parameters: int  # number of weights, before quantization
    files: dict[str, int]  # by file name
    weights: int
    activations: int  # of one step of max_num_tokens
    kv_token: int  # KV cache of one token
    kv_sequence: int  # of one sequence of max_seq_len, in whole blocks, with its recurrent states
    kv_limits: int  # of max_batch_size such sequences
    memory: int | None  # of the device; None when this machine has no such device and no size was given
    largest_batch: int | None  # sequences of max_seq_len that fit; None when the memory is unknown

    @property
    def fits(self) -> bool:
        """Whether at least one sequence fits into memory, or the memory is unknown."""
        return self.largest_batch is None or self.largest_batch > 0


def estimate(config: EngineConfig, memory: int | None = None) -> Estimate:
    """The estimate for an engine. `memory` is the device's memory in bytes; None: that of this machine's device."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    shards = [ShardPlan(config, rank) for rank in range(config.mapping.world_size)]
    files = {rank_file_name(i): sum(num_bytes(*layout) for layout in shard.layouts().values()) for i, shard in enumerate(shards)}
    weights = max(files.values())
    activations = activation_bytes(config, dtype)
    kv_token = kv_token_bytes(config, dtype)
    limits = config.limits
    kv_sequence = kv_token * -(-limits.max_seq_len // limits.tokens_per_block) * limits.tokens_per_block + state_slot_bytes(config, dtype)
    memory = memory if memory is not None else device_memory(config.target.device)
    free = None if memory is None else int((memory - weights - activations) * USABLE_FRACTION[config.target.device])
    return Estimate(
        parameters=num_parameters(config.model),
        files={} if config.weights == "dummy" else files,
        weights=weights,
        activations=activations,
        kv_token=kv_token,
        kv_sequence=kv_sequence,
        kv_limits=kv_sequence * limits.max_batch_size,
        memory=memory,
        largest_batch=None if free is None else max(0, min(free // kv_sequence, limits.max_batch_size)),
    )


def num_parameters(model: ModelConfig) -> int:
    """The number of weights before quantization."""
    return sum(math.prod(shape) for spec in declare(model).values() for shape in dense_shapes(spec).values())


def kv_token_bytes(config: EngineConfig, dtype: torch.dtype) -> int:
    """The bytes of keys and values of one token on one rank, in the pipeline stage that needs the most."""
    size = (getattr(torch, config.recipe.kv_cache) if config.recipe.kv_cache else dtype).itemsize
    tensor, stages = config.mapping.tensor_parallel, config.mapping.pipeline_parallel
    return max(
        sum(kv_width(config.model, i, tensor) * size for i in stage_layers(config.model.num_layers, stages, stage))
        for stage in range(stages)
    )


def state_slot_bytes(config: EngineConfig, dtype: torch.dtype) -> int:
    """The bytes of the recurrent states of one sequence on one rank, in the pipeline stage that needs the most."""
    tensor, stages, num_layers = config.mapping.tensor_parallel, config.mapping.pipeline_parallel, config.model.num_layers
    return max(state_bytes(config.model, stage_layers(num_layers, stages, stage), tensor, dtype) for stage in range(stages))


def activation_bytes(config: EngineConfig, dtype: torch.dtype) -> int:
    """The peak size in bytes of activations in one step.

    It consists of hidden states, residual and norm output, the intermediate values of the widest layer, and logits in float32 and in the
    model's dtype. With data-parallel ranks, experts have the tokens of all ranks, and the leader has the logits of all.
    """
    model, limits, replicas = config.model, config.limits, config.mapping.data_parallel
    widest = max(max(_attention_width(layer), _mlp_width(layer.mlp, replicas)) for layer in model.layers)
    gathered = 2 * replicas * model.hidden_size if replicas > 1 else 0  # the tokens of all ranks, and their sums
    hidden = limits.max_num_tokens * (3 * model.stream_width + gathered + widest) * dtype.itemsize
    logits = replicas * limits.max_batch_size * limits.max_beam_width * model.vocab_size * (dtype.itemsize + 4)
    return hidden + logits


def _attention_width(layer: LayerConfig) -> int:
    """The number of values per token that exist at the same time: qkv, the rotated queries, and the output of attention.

    For a block with a state: its projected inputs, those after the convolution, and the output.
    """
    attention, state = layer.attention, layer.state
    width = 0
    if state is not None:
        width = 2 * state.local_channels() + 2 * state.inner_size + state.num_heads
    if attention is None:
        return width
    return width + _kv_width(attention)


def _kv_width(attention: AttentionConfig | MLAConfig) -> int:
    """`_attention_width` of attention alone."""
    if isinstance(attention, AttentionConfig):
        return attention.head_size * (3 * attention.num_heads + 2 * attention.num_kv_heads)
    return 3 * attention.num_heads * (attention.nope_size + attention.rope_size + attention.kv_rank)


def _mlp_width(mlp: MLPConfig | MoEConfig | None, replicas: int = 1) -> int:
    """The number of values per token that exist at the same time: gate, up and their product; for experts, those of each chosen one.

    Experts have `replicas` times as many tokens as the rest of the layer.
    """
    if mlp is None:
        return 0
    if isinstance(mlp, MLPConfig):
        return mlp.size * (3 if mlp.gated else 2)
    shared = _mlp_width(mlp.shared) if mlp.shared is not None else 0
    return replicas * mlp.top_k * _mlp_width(mlp.expert) + shared


def device_memory(device: str) -> int | None:
    """The memory of this machine's GPU, or its available main memory for "cpu", in bytes. None if there is no GPU."""
    if device == "cpu":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
