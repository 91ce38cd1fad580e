"""Which rank of an engine holds which layers and heads of the KV cache, and from which ranks another engine must read its own.

Engines of the same checkpoint may differ in the number of ranks, in the dtype of the cache and in its calibration.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated, NamedTuple

import msgspec

from stoker.base.config import Mapping
from stoker.core.model_config import ModelConfig
from stoker.distributed.pipeline import stage_layers
from stoker.layers.decoder import kv_shapes
from stoker.layers.shard import kv_heads

NO_HEAD = -1  # a head of zeros, which fills a shard

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
Index = Annotated[int, msgspec.Meta(ge=NO_HEAD, le=1 << 20)]


class LayerLayout(msgspec.Struct, frozen=True):
    """One layer of one rank."""

    heads: Annotated[list[Index], msgspec.Meta(max_length=1 << 12)]  # index in the model of each local head, or NO_HEAD
    key_size: Count  # values of one head and token
    value_size: Count  # 0: the values are a part of the keys (MLA)
    parameters: Annotated[list[bytes], msgspec.Meta(max_length=1 << 12)]  # digest of the calibration of each head; empty: not quantized


class RankLayout(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: its address, and its layers from `first_layer` on."""

    host: Annotated[str, msgspec.Meta(max_length=255)]  # empty: that of the leader
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    first_layer: Count
    layers: Annotated[list[LayerLayout], msgspec.Meta(max_length=4096)]
    nixl: bytes = b""  # metadata of its NIXL agent; empty: no NIXL
    pages: Annotated[list[tuple[int, int]], msgspec.Meta(max_length=4096)] = []  # addresses of keys and values of each layer, for NIXL
    device: Annotated[int, msgspec.Meta(ge=-1, le=1024)] = -1  # index of the GPU; -1: host memory


class EngineLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache of an engine over all ranks."""

    checkpoint: str  # fingerprint; caches of different checkpoints have nothing in common
    tokens_per_block: Count
    num_layers: Count
    dtype: str  # of the cache
    plain_dtype: str  # in which values are sent that the receiver converts
    ranks: Annotated[list[RankLayout], msgspec.Meta(max_length=1024)]


def local_layers(model: ModelConfig, mapping: Mapping, rank: int) -> tuple[int, list[tuple[list[int], int, int]]]:
    """(first layer, (heads, key size, value size) of each layer) of a rank."""
    tp = mapping.tensor_parallel
    stage = stage_layers(model.num_layers, mapping.pipeline_parallel, rank // tp)
    layers = []
    for layer in stage:
        heads, key, value = kv_shapes(model, layer)
        held = kv_heads(heads, tp, rank % tp) if value else list(range(heads))
        layers.append(([NO_HEAD if head is None else head for head in held], key, value))
    return stage.start, layers


class LayerRead(NamedTuple):
    """Heads of one layer to read from another rank. All numbers are indices in the arrays of the ranks."""

    layer: int  # of the source
    heads: list[int]  # of the source
    own_layer: int
    own_heads: list[int]


class ReadPlan(NamedTuple):
    """What a rank reads from the ranks of another engine. `is_raw`: bytes are copied; otherwise values are converted."""

    reads: dict[int, list[LayerRead]]  # by source rank
    is_raw: bool


def plan_reads(own: RankLayout, dtype: str, source: EngineLayout) -> ReadPlan:
    """The reads that fill all heads of the rank `own`, whose cache has `dtype`. Raises ValueError if the source lacks any of them."""
    holders: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)  # (layer, head) → (rank, local layer, local head)
    for number, rank in enumerate(source.ranks):
        for i, layer in enumerate(rank.layers):
            for place, head in enumerate(layer.heads):
                if head != NO_HEAD:
                    holders[rank.first_layer + i, head].append((number, i, place))
    reads: dict[int, list[LayerRead]] = defaultdict(list)
    is_raw = dtype == source.dtype
    for i, layer in enumerate(own.layers):
        by_rank: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        for place, head in enumerate(layer.heads):
            if head == NO_HEAD:
                continue
            number, source_layer, source_head = _holder(holders.get((own.first_layer + i, head), []), by_rank, own.first_layer + i, head)
            other = source.ranks[number].layers[source_layer]
            if (other.key_size, other.value_size) != (layer.key_size, layer.value_size):
                raise ValueError(f"layer {own.first_layer + i} has heads of another size")
            theirs, ours = by_rank.setdefault((number, source_layer), ([], []))
            theirs.append(source_head)
            ours.append(place)
            is_raw = is_raw and _parameter(other, source_head) == _parameter(layer, place)
        for (number, source_layer), (theirs, ours) in by_rank.items():
            reads[number].append(LayerRead(source_layer, theirs, i, ours))
    return ReadPlan(dict(reads), is_raw)


def _holder(
    holders: list[tuple[int, int, int]], chosen: dict[tuple[int, int], tuple[list[int], list[int]]], layer: int, head: int
) -> tuple[int, int, int]:
    """One of the ranks that hold a head, if possible one that another head of the layer is read from."""
    if not holders:
        raise ValueError(f"it has no head {head} of layer {layer}")
    return next((each for each in holders if each[:2] in chosen), holders[0])


def _parameter(layer: LayerLayout, head: int) -> bytes:
    """The digest of a head's calibration; empty without one."""
    return layer.parameters[head] if layer.parameters else b""
