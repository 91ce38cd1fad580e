"""CUDA graphs of whole steps: inputs are copied into static buffers, and one replay runs the model and the sampler.

Each graph has a padded shape. Decode steps have a graph per bucket of rows, short mixed steps a graph per bucket of tokens and rows, and
decodes that verify draft tokens a graph per bucket of rows and of tokens. Longer steps, and prefills beside draft tokens, are launched
kernel by kernel.

With a drafter, a step is captured in several graphs: the model and the sampler, the drafter's pass over the tokens of the step, and each
draft. A step replays as many of them as it needs, so that drafts which no step verifies are not computed. Together they have the kernels
of one graph, and need no more memory than it.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stoker.base.logging import get_logger
from stoker.base.process import without_garbage_collection
from stoker.layers.state_cache import StateCache
from stoker.runtime.sampling.verification import Verified
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.schedule.planner import max_sampled_tokens
from stoker.runtime.worker.dummy_step import ONE_LAUNCH_ROWS, Bounds, fill_dummy_step, static_buffer_size
from stoker.runtime.worker.inputs import InputBuilder, PackedStep, Shape, StepInputs

log = get_logger(__name__)

_TOKEN_BUCKETS = (64, 128, 256, 384, 512, 768, 1024, 1280, 1536, 2048)  # at most a third of padding from 256 on
_MIXED_ROWS = (ONE_LAUNCH_ROWS, 64, 256, 512)

_DRAFTED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_EXACT_DRAFTS = 16  # up to this number of drafts, one row has a graph for each number
_DRAFTED_PARTS = (4, 2, 1)  # graphs have room for a quarter of the drafts, for half of them, and for all


class PlainStep(NamedTuple):
    """The results of a step without sampling features."""

    yielded: Tensor | Verified  # the sampled token ids [L], or with drafts what the sequences yield
    drafts: Tensor | None  # int32 [D, S], the drafts that follow them; None without a drafter
    num_parts: int = 1  # of the step; with a drafter, also its pass over the step, and its drafts


# The captured function: (inputs, max_drafts, all_greedy) → the results after the first part of the step, and again after each further one.
Forward = Callable[[StepInputs, int, bool], Iterator[PlainStep]]
# The function that launches all kernels of a step before its capture, those of both variants of sampling: (inputs, max_drafts).
Launch = Callable[[StepInputs, int], None]


@dataclass(slots=True)
class CapturedStep:
    """The graphs of the parts of a step, and the tensors to which they write their results."""

    graphs: list[torch.cuda.CUDAGraph]  # the model and the sampler; with a drafter, then its pass over the step, and one per draft
    result: PlainStep

    def replay(self, num_wanted: int | None = None) -> PlainStep:
        """Run the step, and `num_wanted` drafts of each row; None: not the drafter."""
        return run_parts(map(torch.cuda.CUDAGraph.replay, self.graphs), self.result, num_wanted)


def _free_bytes() -> int:
    """Free memory of the device in bytes, after the allocator has returned its cached memory."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def run_parts(parts: Iterator[Any], result: PlainStep, num_wanted: int | None) -> PlainStep:
    """Run the first of the `parts` of a step: with `num_wanted` None only one, otherwise also the drafter's pass and as many drafts.

    Returns `result` with these drafts.
    """
    num_parts = 1 if num_wanted is None else 2 + num_wanted
    for _ in itertools.islice(parts, num_parts):
        pass
    return result if result.drafts is None else result._replace(drafts=result.drafts[: num_wanted or 0])


def row_buckets(max_rows: int) -> list[int]:
    """The numbers of rows for which graphs are captured, up to `max_rows`.

    They are 1 to 4 (the fused layer kernel has a variant for each), 8, and then sizes with at most a fifth of padding.
    """
    buckets = [1, 2, 3, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024]
    while buckets[-1] < max_rows:
        buckets.append(buckets[-1] + 256)
    return [*(bucket for bucket in buckets if bucket < max_rows), max_rows]


def drafted_rows(max_rows: int) -> list[int]:
    """The numbers of rows for which decodes with drafts are captured, up to `max_rows`."""
    return [*(rows for rows in _DRAFTED_ROWS if rows < max_rows), max_rows]


@lru_cache
def _drafted_shapes(rows: int, max_drafts: int, max_sampled: int) -> list[Shape]:
    """The shapes of decodes of this number of rows, with at most `max_drafts` drafts each and `max_sampled` tokens, the smallest first."""
    total = rows * max_drafts
    counts = [max(total // part, 1) for part in _DRAFTED_PARTS]
    if rows == 1:  # padding of few tokens costs more than that of many
        counts = [*range(1, min(total, _EXACT_DRAFTS) + 1), *range(_EXACT_DRAFTS + 8, total, 8), total]
    tokens = sorted({min(rows + count, max_sampled) for count in counts})
    return [Shape(count, rows, is_decode=False, max_drafts=max_drafts) for count in tokens]


class Graphs:
    """The captured graphs of one device."""

    def __init__(
        self,
        forward: Forward,
        launch: Launch,
        inputs: InputBuilder,
        *,
        max_rows: int,
        max_seq_len: int,
        max_tokens: int,
        max_drafts: int,
        device: torch.device,
        states: StateCache | None = None,
    ) -> None:
        """`max_drafts`: the largest number of drafts of a row; 0: without speculative decoding. `states`: those of recurrences."""
        self.states = states
        self.forward, self.launch = forward, launch
        self.inputs = inputs
        self.max_seq_len = max_seq_len
        self.row_buckets = row_buckets(max_rows)
        self.token_buckets = [b for b in _TOKEN_BUCKETS if b <= max_tokens]
        self.mixed_rows = sorted({min(r, max_rows) for r in _MIXED_ROWS})
        self.max_drafts = max_drafts
        self.max_sampled = min(max_sampled_tokens(max_rows), max_tokens)
        self.drafted_rows = drafted_rows(min(max_rows, self.max_sampled)) if max_drafts else []
        blocks = inputs.tables.table.shape[1]
        max_static_tokens = max([*self.token_buckets, max_rows, self.max_sampled])
        self._static = torch.zeros(static_buffer_size(max_static_tokens, max_rows, blocks), dtype=torch.int32, device=device)
        self._tables = torch.zeros(max_rows, blocks, dtype=torch.int32, device=device)
        self._captured: dict[tuple[Shape, bool], CapturedStep] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def shape_for(self, plan: StepPlan) -> Shape | None:
        """The padded shape of the graph that runs `plan`. None: the step runs without a graph.

        All data-parallel ranks have the same shape, which is that of the largest part.
        """
        if any(plan.drafts):
            return None if plan.num_prefill_tokens else self._drafted_shape(plan)
        parts = plan.parts or (plan,)
        num_rows, num_tokens = max(map(len, parts)), max(part.num_tokens for part in parts)
        if len(plan) == plan.num_decodes:
            bucket = self.row_buckets[bisect.bisect_left(self.row_buckets, num_rows)]
            return Shape(bucket, bucket, is_decode=True)
        token_at = bisect.bisect_left(self.token_buckets, num_tokens)
        row_at = bisect.bisect_left(self.mixed_rows, num_rows)
        if token_at == len(self.token_buckets) or row_at == len(self.mixed_rows):
            return None
        return Shape(self.token_buckets[token_at], self.mixed_rows[row_at], is_decode=False)

    def _drafted_shape(self, plan: StepPlan) -> Shape | None:
        """The shape of the graph that runs decodes with drafts; None if there is none."""
        row_at = bisect.bisect_left(self.drafted_rows, len(plan))
        if row_at == len(self.drafted_rows) or max(map(len, plan.drafts)) > self.max_drafts:
            return None
        shapes = self._drafted(self.drafted_rows[row_at])
        return next((shape for shape in shapes if shape.tokens >= plan.num_tokens), None)

    def _drafted(self, rows: int) -> list[Shape]:
        """The shapes of decodes with drafts that have this number of rows, the smallest first."""
        return _drafted_shapes(rows, self.max_drafts, self.max_sampled)

    def run(self, packed: PackedStep, all_greedy: bool, num_wanted: int | None = None) -> PlainStep:
        """Copy the inputs to the static buffers and replay the graphs. Returns the results of all rows of the shape.

        `num_wanted`: the number of drafts to compute for each row; None: the drafter does not run.
        """
        shape = packed.shape
        if (shape, all_greedy) not in self._captured:
            self.capture(shape)
        captured = self._captured[shape, all_greedy]
        copies = self.inputs.send(packed, self._static, self._tables[: shape.rows])
        with nullcontext() if self.states is None else self.states.around_step(*copies):
            return captured.replay(num_wanted)

    def capture(self, shape: Shape) -> None:
        """Capture the step of a shape, with greedy sampling and with any sampling.

        It is run once before, which compiles kernels and allocates workspaces of libraries. Ranks that do not sample capture both, too,
        because NCCL may exchange the addresses of buffers when a collective is captured.
        """
        step = self._dummy_step(shape)
        # One stream for all captures, because libraries keep a workspace per stream.
        stream = self._stream = self._stream or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        # A collection may destroy a graph of another engine, which would make the capture fail.
        with torch.cuda.stream(stream), without_garbage_collection():
            self.launch(step, shape.max_drafts)
            for all_greedy in (True, False):
                step.batch.shared.clear()
                self._captured[shape, all_greedy] = self._capture_parts(self.forward(step, shape.max_drafts, all_greedy), stream)
        torch.cuda.current_stream().wait_stream(stream)

    def _capture_parts(self, parts: Iterator[PlainStep], stream: torch.cuda.Stream) -> CapturedStep:
        """Capture a graph of each part of a step. The iterator holds the tensors that later parts read, until all are captured."""
        graphs: list[torch.cuda.CUDAGraph] = []
        result: PlainStep | None = None
        while result is None or len(graphs) < result.num_parts:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                result = next(parts)
            graphs.append(graph)
            self._pool = self._pool or graph.pool()
        return CapturedStep(graphs, result)

    def trace(self, shape: Shape) -> None:
        """Launch the kernels that `capture` would record, on meta tensors."""
        self.launch(self._dummy_step(shape), shape.max_drafts)

    def warm_up(self) -> int:
        """Capture decodes, short prefills and decodes with drafts, greedy and sampled. Other shapes are captured when a step needs them.

        Returns the bytes that were allocated.
        """
        started = time.monotonic()
        num_bytes = self._capture_all([*self._decodes(), *self._prefills(), *self.verifications()])
        log.info("captured %d steps in %.1f s", len({shape for shape, _ in self._captured}), time.monotonic() - started)
        return num_bytes

    def footprint(self) -> int:
        """Estimate the bytes that `warm_up` will allocate: the size of the largest graphs, plus that of the smallest for each other graph.

        The graphs are captured for the measurement and discarded.
        """
        decodes, prefills, verifications = self._decodes(), self._prefills(), self.verifications()
        largest = [*decodes[:1], *prefills[:1], *verifications[:1]]
        num_bytes = self._capture_all(largest)
        num_others = len(decodes) + len(prefills) + len(verifications) - len(largest)
        if num_others:
            num_bytes += num_others * self._capture_all(decodes[-1:])
        self._captured.clear()
        self._pool = None
        return num_bytes

    def _decodes(self) -> list[Shape]:
        """The shapes of decodes, the largest first, because later graphs reuse its memory."""
        return [Shape(rows, rows, is_decode=True) for rows in reversed(self.row_buckets)]

    def _prefills(self) -> list[Shape]:
        """The shapes of short prefills, the largest first."""
        return [Shape(tokens, self.mixed_rows[0], is_decode=False) for tokens in reversed(self.token_buckets)]

    def verifications(self) -> list[Shape]:
        """The shapes of decodes with drafts, the largest first; none without speculative decoding."""
        return [shape for rows in reversed(self.drafted_rows) for shape in reversed(self._drafted(rows))]

    def _capture_all(self, shapes: list[Shape]) -> int:
        """Capture the steps of these shapes. Returns the bytes allocated on the device."""
        before = _free_bytes()
        for shape in shapes:
            self.capture(shape)
        return max(before - _free_bytes(), 0)

    def _dummy_step(self, shape: Shape) -> StepInputs:
        """A dummy step of this shape in the static buffers."""
        bounds = Bounds.of_graph(shape, self.max_seq_len)
        return fill_dummy_step(self._static, self._tables, shape, bounds, self.inputs.num_rows, has_trees=self.inputs.has_trees)
