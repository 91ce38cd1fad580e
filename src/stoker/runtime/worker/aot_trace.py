"""The ahead-of-time trace: runs the steps of an engine on meta tensors to list the kernels that they launch, without a device.

It runs all captured shapes and a selection of others. Kernels are compiled per tile and number of splits, and for sizes that are 1 or
a multiple of 16, so the selection covers these cases.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from stoker.base.config import RuntimeConfig
from stoker.base.nodes import leader
from stoker.distributed.group import Finish, Group
from stoker.distributed.inbox import ONE_SHOT_BYTES, Inboxes
from stoker.distributed.pipeline import Stage
from stoker.distributed.token_dispatch import TokenDispatch
from stoker.distributed.world import World
from stoker.engine.reader import Engine
from stoker.kernels import ops
from stoker.kernels.triton.all_reduce import check_sums
from stoker.kernels.triton.aot.compiler import CompileJob, collecting
from stoker.kernels.triton.attention.tiles import decode_edges
from stoker.kernels.triton.device import device_tuning, num_sms
from stoker.kernels.triton.integers import cdiv
from stoker.layers.decoder import Decoder
from stoker.layers.loader import Loader
from stoker.layers.state_cache import StateCache
from stoker.quant.format import TensorSource
from stoker.runtime.worker.capacity import Capacity
from stoker.runtime.worker.dummy_step import Bounds
from stoker.runtime.worker.inputs import Shape
from stoker.runtime.worker.layer_kinds import distinct_layers
from stoker.runtime.worker.memory import make_caches, num_verified_slots
from stoker.runtime.worker.model_runner import ModelRunner
from stoker.runtime.worker.rank import captures_steps
from stoker.runtime.worker.row_tracker import make_tracker

META = torch.device("meta")
EAGER_ROWS = (1, 3, 6, 7, 16, 20, 32, 40, 64, 100)
# One of each 64 up to 1,024, because the tiles of linears depend on how many tiles of 64, 128 or 192 rows there are.
EAGER_TOKENS = (5, 16, 40, 64, 100, 160, 200, 300, 350, 420, 500, 560, 620, 680, 740, 800, 870, 930, 1000, 1500)
MANY_DECODES = (128, 200, 320, 512, 768)  # beside a prompt; captured steps have as many without one
PROMPT_BESIDE_DECODES = 128  # new tokens of a prompt beside decodes
SHORT_PROMPTS = (1, 2, 3, 4, 8, 9)  # new tokens of prompts whose beginning is cached or was computed before
MAX_SHORT_PROMPTS = 64  # with more, no launch splits keys
MIN_KEYS = 32  # smallest length of the longest row that is traced


class MetaTensors(TensorSource):
    """A source of tensors on the meta device, which have a shape and no content."""

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of this shape without content, for any name."""
        return torch.empty(shape, dtype=dtype, device=META)


class MetaGroup(Group):
    """A group that simulates `size` ranks: collectives return a tensor of the right shape."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        if size in ONE_SHOT_BYTES:
            self.inboxes = Inboxes([1 << 40] * size, rank, META)

    def begin_sum(self, x: Tensor) -> Finish:
        """Two ranks copy their summands, and more use an all-reduce."""
        return lambda: (x, x) if self.size == 2 else (x,)

    def all_gather(self, x: Tensor) -> Tensor:
        """A tensor of the shape that a gather over `size` ranks returns."""
        return torch.cat([x] * self.size, dim=-1)

    def gather_rows(self, x: Tensor) -> Tensor:
        """A tensor of the shape that a gather along the first axis returns."""
        return torch.cat([x] * self.size)

    def reduce_scatter_rows(self, x: Tensor) -> Tensor:
        """A tensor of the shape of this rank's part."""
        return x.chunk(self.size)[self.rank]


class MetaStage(Stage):
    """A pipeline stage without neighbours: received tensors have the right shape, and sent ones are dropped."""

    def __init__(self, index: int, num_stages: int) -> None:
        self.index, self.num_stages = index, num_stages

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of this shape without content."""
        return torch.empty(shape, dtype=dtype, device=device)

    def send(self, x: Tensor) -> None:
        """Does nothing."""
        return


def kernels_of(engine: Engine, capability: int, config: RuntimeConfig = RuntimeConfig()) -> dict[str, CompileJob]:
    """The kernels that `engine` launches on a device of `capability` (90: sm_90). Keys are their folders in Triton's cache.

    The process must not launch or interpret kernels in other threads.
    """
    ops.use_launchers()
    mapping = engine.config.mapping
    with torch.inference_mode(), collecting(capability) as jobs:
        # The first rank of a stage has the biases of row-split linears. All other ranks launch the same kernels.
        for stage, index in itertools.product(range(mapping.pipeline_parallel), range(min(mapping.stage_size, 2))):
            _trace(_runner(engine, config, stage * mapping.stage_size + index))
    return jobs


def _runner(engine: Engine, config: RuntimeConfig, rank: int) -> ModelRunner:
    """A runner of one rank on the meta device, which has only the layers that differ from each other."""
    settings = engine.config
    mapping, limits = settings.mapping, settings.limits
    capacity = Capacity.of(limits, settings.model.max_positions, config)
    stage = MetaStage(rank // mapping.stage_size, mapping.pipeline_parallel)
    group, everyone = MetaGroup(rank % mapping.tensor_parallel, mapping.tensor_parallel), MetaGroup(rank, mapping.world_size)
    dispatch = TokenDispatch(everyone) if mapping.data_parallel > 1 else None
    loader = Loader(MetaTensors(), settings.recipe, engine.dtype, META, group, settings.sharding, dispatch=dispatch)
    model = Decoder(settings.model, loader, capacity.max_seq_len, stage)
    size = limits.tokens_per_block
    layers = stage.layers(settings.model.num_layers)
    max_drafts = config.max_drafts if config.speculate != "none" else 0
    num_slots = capacity.max_num_sequences + 1 + num_verified_slots(capacity.max_batch_size, max_drafts)
    dtype = getattr(torch, settings.dtype)
    states = StateCache(settings.model, layers, mapping.tensor_parallel, num_slots, dtype, META)
    caches = make_caches(settings.model, 1 << 10, size, engine.kv_dtype, META, layers, mapping.tensor_parallel, states)
    model.complete_caches(caches)
    first = distinct_layers(engine, layers, model.fused_layers)
    model.keep_layers(first)
    return ModelRunner(
        model, [caches[i] for i in first], num_rows=capacity.max_num_sequences * mapping.data_parallel,
        max_batch_size=capacity.max_batch_size, max_num_tokens=capacity.max_num_tokens,
        max_seq_len=capacity.max_seq_len, block_size=size, device=META,
        max_drafts=max_drafts,
        has_trees=config.tree is not None, use_graphs=captures_steps(config, settings.model),
        states=states if settings.model.has_state else None,
        tracker=make_tracker(
            config, settings.model, None, world_size=mapping.world_size, num_rows=capacity.max_num_sequences,
            max_seq_len=capacity.max_seq_len, block_size=size, device=META,
        ),
        world=World(rank, mapping.world_size, group, stage, everyone, leader(mapping), dispatch=dispatch),
    )  # fmt: skip


def _trace(runner: ModelRunner) -> None:
    """Run all steps of a rank that launch different kernels, and the check of its inboxes."""
    if (inboxes := runner.world.tensor.inboxes) is not None:
        check_sums(inboxes, META, 0)
    _trace_steps(runner, lambda rows: True)
    fused_layers = runner.model.fused_layers
    if fused_layers is not None and runner.world.tensor.size > 1:
        # GPUs that cannot access each other's memory compute the same steps without fused layers.
        runner.model.fused_layers = None
        _trace_steps(runner, fused_layers.supports)


def _trace_steps(runner: ModelRunner, is_traced: Callable[[int], bool]) -> None:
    """Run the steps for whose number of tokens `is_traced` returns True."""
    if runner.graphs is not None:
        for shape in filter(lambda shape: is_traced(shape.tokens), runner.graphs.shapes.all()):
            runner.graphs.trace(shape)
    for shape, bounds in _eager(runner):
        if is_traced(shape.tokens):
            runner.run_dummy_step_with_sampling(shape, bounds)


def _eager(runner: ModelRunner) -> Iterator[tuple[Shape, Bounds]]:
    """(shape, bounds) of steps that run without a graph.

    These are decodes with sampling features, their prompts, also a few new tokens beside many decodes, and prompts that are longer than
    captured ones.
    """
    max_rows, max_tokens, longest = runner.max_batch_size, runner.max_num_tokens, runner.max_seq_len
    lengths = sorted({min(1 << i, longest) for i in range(MIN_KEYS.bit_length() - 1, longest.bit_length() + 1)})
    for rows, length in itertools.product(sorted({min(r, max_rows) for r in (*EAGER_ROWS, max_rows)}), lengths):
        yield Shape(rows, rows, is_decode=True), Bounds(rows, 1, length)
    overlapped = runner.model.overlapped_layers
    whole = () if overlapped is None else (overlapped.min_tokens - 1,)  # the longest step that is not computed in halves
    sizes = sorted({min(t, max_tokens) for t in (*EAGER_TOKENS, *whole, max_tokens - 1, max_tokens)})
    for tokens, rows, length in itertools.product(sizes, sorted({1, min(3, max_rows), min(16, max_rows)}), lengths):
        if rows < tokens and length >= min(tokens // rows, longest):
            decodes = rows // 2
            yield Shape(tokens, rows, is_decode=False), Bounds(decodes, tokens - rows + 1, length)
    beside = sorted({d for d in (*EAGER_ROWS, *MANY_DECODES, *_decode_edges(runner)) if d < max_rows})
    for decodes, length in itertools.product(beside, lengths):
        new = min(PROMPT_BESIDE_DECODES, length)
        if decodes + new <= max_tokens:
            yield Shape(decodes + new, decodes + 1, is_decode=False), Bounds(decodes, new, length)
    counts = [1 << i for i in range(max_rows.bit_length()) if 1 << i <= MAX_SHORT_PROMPTS]
    for new, count, rows, length in itertools.product(SHORT_PROMPTS, counts, sorted({1, min(16, max_rows), max_rows}), lengths):
        if count <= rows and new * count + rows - count <= max_tokens and new <= length:
            yield Shape(new * count + rows - count, rows, is_decode=False), Bounds(rows - count, new, length)


def _decode_edges(runner: ModelRunner) -> set[int]:
    """The numbers of decodes at which attention over one of the caches may use another tile or number of splits than for one fewer.

    Captured steps have fixed numbers of decodes, but beside a prompt there may be any number.
    """
    edges = decode_edges(num_sms(META), device_tuning(META))
    kv_heads = {cache.keys.shape[1] for cache in runner.caches} - {0}  # a layer without attention has a cache without heads
    return {cdiv(edge, heads) for heads in kv_heads for edge in edges}
