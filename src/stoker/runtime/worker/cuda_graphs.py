"""CUDA graphs of whole steps: inputs are copied into static buffers, and one replay runs the model and the sampler.

`graph_shapes.py` has the padded shapes of graphs. Some are captured at the start, and the others by and by: when the executor is idle, or
when the padding to larger graphs has cost as much as a capture. A capture has three parts, between which requests are served.

With a drafter, a step is captured in several graphs: the model and the sampler, the drafter's pass over the tokens of the step, and each
draft. A step replays as many of them as it needs, so that drafts which no step verifies are not computed. Together they have the kernels
of one graph, and need no more memory than it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stoker.base.logging import get_logger
from stoker.base.process import without_garbage_collection
from stoker.layers.state_cache import StateCache
from stoker.runtime.sampling.verification import Verified
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.worker.dummy_step import Bounds, fill_dummy_step, static_buffer_size
from stoker.runtime.worker.graph_shapes import GraphShapes
from stoker.runtime.worker.inputs import InputBuilder, PackedStep, Shape, StepInputs

log = get_logger(__name__)

_COST_OF_PADDING = 1 / 32  # what a step loses with a larger graph than its own, as a share of the time of a capture: about 4 of 120 ms


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
        self.shapes = GraphShapes(max_rows, max_tokens, max_drafts)
        blocks = inputs.tables.table.shape[1]
        size = static_buffer_size(self.shapes.max_tokens, max_rows, blocks)
        self._static = torch.zeros(size, dtype=torch.int32, device=device)
        self._tables = torch.zeros(max_rows, blocks, dtype=torch.int32, device=device)
        self._captured: dict[tuple[Shape, bool], CapturedStep] = {}
        self._launched: set[Shape] = set()  # shapes whose capture has begun
        self._pending: dict[Shape, float] = {}  # shapes to capture → what steps have lost without them, in captures
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def is_captured(self, shape: Shape) -> bool:
        """Whether the graphs of a shape exist, those of greedy sampling and those of any sampling."""
        return (shape, True) in self._captured and (shape, False) in self._captured

    def shape_for(self, plan: StepPlan) -> Shape | None:
        """The shape of the captured graph that runs `plan`. None: the step runs without a graph."""
        shape = self.shapes.shape_of(plan)
        if shape is None or self.is_captured(shape):
            return shape
        found = next(filter(self.is_captured, self.shapes.larger(shape)), None)
        if shape in self._pending:
            self._pending[shape] += _COST_OF_PADDING
        return found

    @property
    def is_due(self) -> bool:
        """Whether steps have lost as much without a shape as its capture costs."""
        return max(self._pending.values(), default=0.0) >= 1.0

    def next_shape(self) -> Shape | None:
        """The shape to capture next, None if none is left.

        One that is due goes first, then one that is begun, then the one without which steps have lost most, or else the most likely one.
        """
        pending = self._pending
        return max(pending, key=lambda shape: (pending[shape] >= 1.0, shape in self._launched, pending[shape]), default=None)

    def give_up(self) -> None:
        """Capture no further shapes."""
        self._pending.clear()

    def run(self, packed: PackedStep, all_greedy: bool, num_wanted: int | None = None) -> PlainStep:
        """Copy the inputs to the static buffers and replay the graphs. Returns the results of all rows of the shape.

        `num_wanted`: the number of drafts to compute for each row; None: the drafter does not run.
        """
        shape = packed.shape
        captured = self._captured[shape, all_greedy]
        copies = self.inputs.send(packed, self._static, self._tables[: shape.rows])
        with nullcontext() if self.states is None else self.states.around_step(*copies):
            return captured.replay(num_wanted)

    def capture(self, shape: Shape) -> None:
        """Capture the step of a shape, with greedy sampling and with any sampling."""
        while not self.advance(shape):
            pass

    def advance(self, shape: Shape) -> bool:
        """Perform the next part of the capture of a shape. Returns whether it is complete.

        First the kernels of the step are launched, which compiles them and allocates workspaces of libraries. Then the step is captured
        with greedy sampling, and at last with any sampling. Ranks that do not sample capture both, too, because NCCL may exchange the
        addresses of buffers when a collective is captured.
        """
        step = self._dummy_step(shape)
        # One stream for all captures, because libraries keep a workspace per stream.
        stream = self._stream = self._stream or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            # A collection may destroy a graph of another engine, which would make the capture fail.
            with torch.cuda.stream(stream), without_garbage_collection():
                if shape not in self._launched:
                    self.launch(step, shape.max_drafts)
                    self._launched.add(shape)
                else:
                    all_greedy = (shape, True) not in self._captured
                    self._captured[shape, all_greedy] = self._capture_parts(self.forward(step, shape.max_drafts, all_greedy), stream)
        finally:  # also after an error: kernels that were launched read the static buffers, which the next step overwrites
            torch.cuda.current_stream().wait_stream(stream)
        if self.is_captured(shape):
            self._pending.pop(shape, None)
            self._launched.discard(shape)
        return self.is_captured(shape)

    def _capture_parts(self, parts: Iterator[PlainStep], stream: torch.cuda.Stream) -> CapturedStep:
        """Capture a graph of each part of a step. The iterator holds the tensors that later parts read, until all are captured."""
        graphs: list[torch.cuda.CUDAGraph] = []
        result: PlainStep | None = None
        while result is None or len(graphs) < result.num_parts:
            graph = torch.cuda.CUDAGraph()
            # "relaxed": other threads may allocate memory and query events meanwhile, those of transfers and of the caller of the Python
            # API. In this thread, a kernel that was not launched before is loaded, and a library may allocate what it needs.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="relaxed"):
                result = next(parts)
            graphs.append(graph)
            self._pool = self._pool or graph.pool()
        return CapturedStep(graphs, result)

    def trace(self, shape: Shape) -> None:
        """Launch the kernels that `capture` would record, on meta tensors."""
        self.launch(self._dummy_step(shape), shape.max_drafts)

    def warm_up(self) -> None:
        """Capture the shapes of the start. From now on, `next_shape` names the others."""
        started = time.monotonic()
        for shape in self.shapes.initial():
            self.capture(shape)
        self._pending = dict.fromkeys(self.shapes.later(), 0.0)
        log.info("captured %d steps in %.1f s", len({shape for shape, _ in self._captured}), time.monotonic() - started)

    def footprint(self) -> int:
        """Estimate the bytes that all graphs will need: the size of the largest ones, plus that of a small one for each other graph.

        The small one has prompts, if there are such steps, because these have the most kernels. The graphs are captured for the measurement
        and discarded.
        """
        largest = self.shapes.largest()
        others = [shape for shape in self.shapes.all() if shape not in largest]
        smallest = sorted(others, key=lambda shape: (shape.is_decode, shape.tokens))[:1]
        num_bytes = self._capture_all(largest) + len(others) * self._capture_all(smallest)
        self._captured.clear()
        self._pool = None
        return num_bytes

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
