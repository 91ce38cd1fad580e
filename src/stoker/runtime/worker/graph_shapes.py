"""The padded shapes of the steps that are captured as CUDA graphs, and which of them are captured before the first request.

Decode steps have a shape per bucket of rows, short mixed steps a shape per bucket of tokens and rows, and decodes that verify draft tokens
a shape per bucket of rows and of tokens. Longer steps, and prefills beside draft tokens, are launched kernel by kernel.

A few shapes are captured at the start, with which all these steps have a graph, but mostly a larger one than they need. The others follow
when the executor is idle.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from functools import lru_cache

from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.schedule.planner import max_sampled_tokens
from stoker.runtime.worker.dummy_step import ONE_LAUNCH_ROWS
from stoker.runtime.worker.inputs import Shape

_TOKEN_BUCKETS = (64, 128, 256, 384, 512, 768, 1024, 1280, 1536, 2048)  # at most a third of padding from 256 on
_MIXED_ROWS = (ONE_LAUNCH_ROWS, 64, 256, 512)

_DRAFTED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_EXACT_DRAFTS = 16  # up to this number of drafts, one row has a graph for each number
_DRAFTED_PARTS = (4, 2, 1)  # graphs have room for a quarter of the drafts, for half of them, and for all

# The largest ratio between two sizes that are captured at the start. Decodes read the weights whatever their number, but the time of
# prompts is proportional to their tokens.
_DECODE_RATIO, _TOKEN_RATIO = 4, 2


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


def thinned(buckets: list[int], ratio: int) -> list[int]:
    """The largest of these ascending sizes, then as few of the others as let no two neighbours differ by more than `ratio` times.

    The result is descending. Sizes that are further apart in `buckets` remain.
    """
    chosen = buckets[-1:]
    while chosen and chosen[-1] > buckets[0]:
        smaller = buckets[: bisect.bisect_left(buckets, chosen[-1])]
        chosen.append(next((size for size in smaller if size * ratio >= chosen[-1]), smaller[-1]))
    return chosen


@lru_cache
def _drafted_shapes(rows: int, max_drafts: int, max_sampled: int) -> list[Shape]:
    """The shapes of decodes of this number of rows, with at most `max_drafts` drafts each and `max_sampled` tokens, the smallest first."""
    total = rows * max_drafts
    counts = [max(total // part, 1) for part in _DRAFTED_PARTS]
    if rows == 1:  # padding of few tokens costs more than that of many
        counts = [*range(1, min(total, _EXACT_DRAFTS) + 1), *range(_EXACT_DRAFTS + 8, total, 8), total]
    tokens = sorted({min(rows + count, max_sampled) for count in counts})
    return [Shape(count, rows, is_decode=False, max_drafts=max_drafts) for count in tokens]


class GraphShapes:
    """The shapes of all graphs of an engine."""

    def __init__(self, max_rows: int, max_tokens: int, max_drafts: int = 0) -> None:
        """`max_drafts`: the largest number of drafts of a row; 0: without speculative decoding."""
        self.row_buckets = row_buckets(max_rows)
        self.token_buckets = [b for b in _TOKEN_BUCKETS if b <= max_tokens]
        self.mixed_rows = sorted({min(r, max_rows) for r in _MIXED_ROWS})
        self.max_drafts = max_drafts
        self.max_sampled = min(max_sampled_tokens(max_rows), max_tokens)
        self.drafted_rows = drafted_rows(min(max_rows, self.max_sampled)) if max_drafts else []

    @property
    def max_tokens(self) -> int:
        """The largest number of tokens of a shape."""
        return max([*self.token_buckets, self.row_buckets[-1], self.max_sampled])

    def shape_of(self, plan: StepPlan) -> Shape | None:
        """The smallest shape that `plan` fits. None: no graph can run the step.

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

    def larger(self, shape: Shape) -> Iterator[Shape]:
        """Other shapes whose graph can run the steps of `shape`, the smallest first. Prompts are padded to at most twice their tokens."""
        if shape.is_decode:
            yield from (Shape(rows, rows, is_decode=True) for rows in self.row_buckets if rows > shape.rows)
        elif not shape.max_drafts:
            tokens = (size for size in self.token_buckets if shape.tokens <= size <= _TOKEN_RATIO * shape.tokens)
            rows = [count for count in self.mixed_rows if count >= shape.rows]
            shapes = (Shape(*size, is_decode=False) for size in itertools.product(tokens, rows))
            yield from (found for found in shapes if found != shape)

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

    def initial(self) -> list[Shape]:
        """The shapes that are captured at the start: a choice of decodes and of mixed steps, and all decodes with drafts.

        The largest of each kind come first, because later graphs reuse their memory.
        """
        decodes = [Shape(rows, rows, is_decode=True) for rows in thinned(self.row_buckets, _DECODE_RATIO)]
        mixed = [Shape(tokens, self.mixed_rows[-1], is_decode=False) for tokens in thinned(self.token_buckets, _TOKEN_RATIO)]
        return [*decodes, *mixed, *self.verifications()]

    def later(self) -> list[Shape]:
        """The other shapes in the order in which they are captured: those of few sequences first."""
        initial = set(self.initial())
        ordered = dict.fromkeys([*self._mixed(self.mixed_rows[:2]), *self._decodes(), *self._mixed()])
        return [shape for shape in ordered if shape not in initial]

    def all(self) -> list[Shape]:
        """All shapes."""
        return [*self._decodes(), *self._mixed(), *self.verifications()]

    def largest(self) -> list[Shape]:
        """The largest shape of each kind."""
        return [*self._decodes()[-1:], *self._mixed()[-1:], *self.verifications()[:1]]

    def verifications(self) -> list[Shape]:
        """The shapes of decodes with drafts, the largest first; none without speculative decoding."""
        return [shape for rows in reversed(self.drafted_rows) for shape in reversed(self._drafted(rows))]

    def _decodes(self) -> list[Shape]:
        """The shapes of decodes, the smallest first."""
        return [Shape(rows, rows, is_decode=True) for rows in self.row_buckets]

    def _mixed(self, rows: list[int] | None = None) -> list[Shape]:
        """The shapes of short mixed steps with these numbers of rows, by default all, the smallest first."""
        sizes = itertools.product(self.mixed_rows if rows is None else rows, self.token_buckets)
        return [Shape(tokens, count, is_decode=False) for count, tokens in sizes]
