"""What an engine launches, without a device: its steps on meta tensors, with the code that runs them.

The shapes are those that are captured, and a choice of the others: sizes differ in whether they are 1 or a multiple of 16, in the tile
that they fill and in the number of splits, which is what kernels are compiled for.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from stoker.base.config import RuntimeConfig
from stoker.core.specs import LinearSpec
from stoker.distributed.group import Group
from stoker.distributed.inbox import ONE_SHOT_BYTES, Inboxes
from stoker.distributed.pipeline import Stage
from stoker.distributed.world import World, leader
from stoker.engine.reader import Engine
from stoker.kernels import ops
from stoker.kernels.triton.all_reduce import check_sums
from stoker.kernels.triton.aot.compiler import CompileJob, collecting
from stoker.layers.decoder import Decoder, layer_specs
from stoker.layers.fused_layer import FusedLayers
from stoker.layers.loader import Loader
from stoker.quant.format import TensorSource
from stoker.runtime.worker.cuda_graphs import Graphs
from stoker.runtime.worker.dummy_step import Bounds
from stoker.runtime.worker.inputs import Shape
from stoker.runtime.worker.memory import make_caches
from stoker.runtime.worker.model_runner import ModelRunner
from stoker.runtime.worker.rank import Capacity, captures_steps

META = torch.device("meta")
EAGER_ROWS = (1, 3, 16, 20, 32, 40, 64, 100)
EAGER_TOKENS = (5, 16, 40, 64, 100, 200, 500, 1000, 1500)
SHORTEST = 32  # keys of the longest row


class ShapesOnly(TensorSource):
    """Tensors without memory."""

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)


class Absent(Group):
    """A group whose other ranks are not there: collectives give the shape of their result."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        if size in ONE_SHOT_BYTES:
            self.inboxes = Inboxes([1 << 40] * size, rank, META)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.size, dim=-1)


class AbsentStage(Stage):
    def __init__(self, index: int, num_stages: int) -> None:
        self.index, self.num_stages = index, num_stages

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def send(self, x: Tensor) -> None:
        return


def kernels_of(engine: Engine, capability: int, config: RuntimeConfig = RuntimeConfig()) -> dict[str, CompileJob]:
    """The kernels that `engine` launches on a device of `capability` (90: sm_90), by their folder in Triton's cache.

    Not for a process that launches kernels meanwhile, nor one that interprets them.
    """
    ops.use_launchers()
    mapping = engine.config.mapping
    with torch.inference_mode(), collecting(capability) as jobs:
        # A stage's first rank has the biases of summed linears, and those after it are alike: of experts, too, each has as many.
        for stage, index in itertools.product(range(mapping.pipeline_parallel), range(min(mapping.tensor_parallel, 2))):
            _trace(_runner(engine, config, stage * mapping.tensor_parallel + index))
    return jobs


def _runner(engine: Engine, config: RuntimeConfig, rank: int) -> ModelRunner:
    settings = engine.config
    mapping, limits = settings.mapping, settings.limits
    capacity = Capacity.of(limits, settings.model.max_positions, config)
    stage = AbsentStage(rank // mapping.tensor_parallel, mapping.pipeline_parallel)
    group = Absent(rank % mapping.tensor_parallel, mapping.tensor_parallel)
    model = Decoder(
        settings.model, Loader(ShapesOnly(), settings.recipe, engine.dtype, META, group, settings.sharding), capacity.max_seq_len, stage
    )
    size = limits.tokens_per_block
    layers = stage.layers(settings.model.num_layers)
    caches = make_caches(settings.model, 1 << 10, size, engine.kv_dtype, META, layers, mapping.tensor_parallel)
    model.complete_caches(caches)
    first = _different(engine, layers, model.fused_layers)
    model.keep_layers(first)
    return ModelRunner(
        model, [caches[i] for i in first], num_rows=capacity.max_num_sequences,
        max_batch_size=capacity.max_batch_size, max_num_tokens=capacity.max_num_tokens,
        max_seq_len=capacity.max_seq_len, block_size=size, device=META,
        use_graphs=captures_steps(config, settings.model),
        world=World(rank, mapping.world_size, group, stage, Absent(rank, mapping.world_size), leader(mapping)),
    )  # fmt: skip


def _different(engine: Engine, layers: Sequence[int], fused_layers: FusedLayers | None) -> list[int]:
    """Indices of a stage's layers that launch other kernels than the layers before them.

    A fused layer computes the queries, keys and values of the next layer, so no layer can be left out where their widths differ.
    """
    kinds: list[Any] = [_kind(engine, layer) for layer in layers]
    if fused_layers is not None:
        if len({(one.num_heads + 2 * one.num_kv_heads) * one.head_size for one in fused_layers.attentions}) > 1:
            return list(range(len(kinds)))
        kinds = list(zip(kinds, [*kinds[1:], None], strict=True))
    return [i for i, kind in enumerate(kinds) if kinds.index(kind) == i]


def _kind(engine: Engine, layer: int) -> tuple[Any, ...]:
    """What decides a layer's launches: layers of a kind are rehearsed once."""
    model, recipe = engine.config.model, engine.config.recipe
    formats = [recipe.format_for(spec) for spec in layer_specs(model, layer).values() if isinstance(spec, LinearSpec)]
    return model.layers[layer], formats


def _trace(runner: ModelRunner) -> None:
    """All that a rank launches, from the check of its inboxes on."""
    if (inboxes := runner.world.tensor.inboxes) is not None:
        check_sums(inboxes, META, 0)
    if runner.graphs is not None:
        for shape, all_greedy in itertools.product(_captured(runner.graphs), (True, False)):
            runner.graphs.trace(shape, all_greedy)
    for shape, bounds in _eager(runner):
        runner.run_dummy_step_with_sampling(shape, bounds)


def _captured(graphs: Graphs) -> Iterator[Shape]:
    for rows in graphs.row_buckets:
        yield Shape(rows, rows, is_decode=True)
    for tokens, rows in itertools.product(graphs.token_buckets, graphs.mixed_rows):
        yield Shape(tokens, rows, is_decode=False)


def _eager(runner: ModelRunner) -> Iterator[tuple[Shape, Bounds]]:
    """Decodes that ask for more than a captured step does, prompts of such requests, and prompts longer than captured ones."""
    most_rows, most_tokens, longest = runner.max_batch_size, runner.max_num_tokens, runner.max_seq_len
    lengths = sorted({min(1 << i, longest) for i in range(SHORTEST.bit_length() - 1, longest.bit_length() + 1)})
    for rows, length in itertools.product(sorted({min(r, most_rows) for r in (*EAGER_ROWS, most_rows)}), lengths):
        yield Shape(rows, rows, is_decode=True), Bounds(rows, 1, length)
    sizes = sorted({min(t, most_tokens) for t in (*EAGER_TOKENS, most_tokens - 1, most_tokens)})
    for tokens, rows, length in itertools.product(sizes, sorted({1, min(3, most_rows), min(16, most_rows)}), lengths):
        if rows < tokens and length >= min(tokens // rows, longest):
            decodes = rows // 2
            yield Shape(tokens, rows, is_decode=False), Bounds(decodes, tokens - rows + 1, length)


def main(path: str, capability: int) -> None:
    """Write the jobs of the engine at `path` to standard output, as JSON."""
    jobs = kernels_of(Engine.open(path), capability)
    sys.stdout.buffer.write(msgspec.json.encode(list(jobs.values())))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
