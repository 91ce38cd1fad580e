"""The complete embedding and output head of an engine of several ranks, for heads that run on one of them.

The rank that drafts cannot use its shards: the other ranks take part in steps only, not in drafts. It loads copies from the files of the
ranks that have the parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.base.errors import EngineError
from stoker.core.specs import LinearSpec, Spec
from stoker.distributed.group import SINGLE
from stoker.engine.reader import Engine
from stoker.layers.decoder import Decoder, embed_spec, outer_specs
from stoker.layers.loader import Loader
from stoker.layers.shard import local_shape, local_spec
from stoker.layers.vocabulary import Embedding, Head
from stoker.quant.format import TensorSource


class JoinedSource(TensorSource):
    """Whole tensors of embedding and head, joined from the shards of ranks along the axis that is split."""

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self._engine, self.num_bytes = engine, 0
        mapping = engine.config.mapping
        stages = 0, mapping.pipeline_parallel - 1
        self._sources = {
            stage: [engine.source(stage * mapping.stage_size + rank, device) for rank in range(mapping.tensor_parallel)] for stage in stages
        }
        self._local = self._layouts()

    def _layouts(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """(stage, shape of a shard) of each stored tensor."""
        config, found = self._engine.config, dict[str, tuple[int, tuple[int, ...]]]()
        for name, spec in _vocabulary_specs(self._engine).items():
            stage = 0 if name == "embed" else max(self._sources)
            if isinstance(spec, LinearSpec):
                local = local_spec(spec, config.sharding)
                layouts = config.recipe.format_for(spec).layout(local, self._engine.dtype)
                found |= {f"{spec.name}.{suffix}": (stage, layout.shape) for suffix, layout in layouts.items()}
                found[f"{spec.name}.bias"] = stage, local.bias_shape
            else:
                found[spec.name] = stage, local_shape(spec, config.sharding)
        return found

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor `name` of the whole shape. Raises EngineError for a missing or damaged file."""
        stage, local = self._local[name]
        axis = next((axis for axis, (part, whole) in enumerate(zip(local, shape, strict=True)) if part != whole), None)
        if axis is None:
            tensor = self._sources[stage][0].get(name, shape, dtype)
        else:
            tensor = torch.cat([source.get(name, local, dtype) for source in self._sources[stage]], axis)
            if tensor.shape[axis] < shape[axis]:
                raise EngineError(
                    f"{name} has {tensor.shape[axis]} rows on all ranks, and {shape[axis]} are expected.", cure="Build again."
                )
            tensor = tensor.narrow(axis, 0, shape[axis])  # without the padding of the last rank
        self.num_bytes += tensor.nbytes
        return tensor


def _vocabulary_specs(engine: Engine) -> dict[str, Spec]:
    """The specs of the embedding and of the head."""
    specs = outer_specs(engine.config.model)
    return {name: specs[name] for name in ("embed", "head", "head_bias") if name in specs}


def whole_vocabulary(engine: Engine, model: Decoder) -> tuple[Embedding, Head, int]:
    """The embedding and the output head of all tokens on the device of `model`, and the bytes that were loaded for them.

    What the rank of `model` has as a whole is used, and not loaded again. Raises EngineError if a file of another rank is missing.
    """
    config = engine.config.model
    has_embedding = model.stage.is_first and not model.embed.is_split
    has_head = engine.config.mapping.tensor_parallel == 1
    if has_embedding and has_head:
        return model.embed, model.head, 0
    source = JoinedSource(engine, model.device)
    loader = Loader(source, engine.config.recipe, engine.dtype, model.device, SINGLE)
    is_used = {"embed": not has_embedding or (config.tie_head and not has_head), "head": not has_head, "head_bias": not has_head}
    weights = loader.load({name: spec for name, spec in _vocabulary_specs(engine).items() if is_used[name]})
    embedding = model.embed if has_embedding else Embedding(weights["embed"], embed_spec(config), loader)
    if has_head:
        return embedding, model.head, source.num_bytes
    head = Head(weights.get("head") or weights["embed"], config.vocab_size, SINGLE, weights.get("head_bias"))
    return embedding, head, source.num_bytes
