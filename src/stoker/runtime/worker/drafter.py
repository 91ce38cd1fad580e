"""The interface of draft engines and draft heads: they run on the device after the sampler.

The ids of their drafts are stored on the device (`ModelRunner.last_ids`), and are copied to the host with the results of the step.

A step that drafts nothing runs no drafter that can catch up later. In a captured step, the pass over the tokens of the step and each draft
are graphs of their own, of which the first ones are replayed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.runtime.sampling.sampler import DrawTable
from stoker.runtime.sampling.verification import Verified


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """What a drafter reads: the step that was computed, with S sequences that sampled. All tensors are on the device.

    In a captured graph, sequences are padded; `rows` of the padding is the index after the last row of the device buffers.
    """

    batch: ForwardBatch  # all ids are resolved
    rows: Tensor  # int32 [S], the index of each sequence in the device buffers
    newest: Tensor  # int32 [S], the newest token of each sequence, which is not computed yet
    verified: Verified | None  # the accepted drafts; None if the step had no drafts: then each sequence has one row of logits
    starts: Tensor | None  # int32 [S + 1], with drafts: the first row of logits of each sequence, and the number of rows
    table: DrawTable  # the sampling parameters of each row
    all_greedy: bool  # no sequence draws at random

    @property
    def last_indices(self) -> Tensor:
        """int32 [S]: the index in the step of the last token of each sequence that is valid: the one before `newest`."""
        logits_idx = self.batch.logits_idx
        assert logits_idx is not None
        if self.verified is None or self.starts is None:
            return logits_idx[: len(self.rows)]
        at = self.verified.last.clamp(max=len(logits_idx) - 1)  # padding starts after the last row
        return logits_idx.index_select(0, at)


class Drafter(ABC):
    """Computes draft tokens for each sequence of a step. It has its own KV caches, with the blocks of the model's caches."""

    num_drafts: int  # the largest number of drafts per sequence
    is_tree = False  # whether the drafts are a tree, and not a chain
    caches: Sequence[KVCache] = ()  # they have at least the blocks of the model's caches

    @property
    def num_parts(self) -> int:
        """The number of elements of `drafts`."""
        return 1 if self.is_tree else self.num_drafts

    @abstractmethod
    def compute(self, inputs: DraftInputs) -> Any:
        """Compute the tokens of the step, whose keys and values later drafts need. Returns what `drafts` reads.

        Neither it nor `drafts` may wait for the device.
        """

    @abstractmethod
    def drafts(self, inputs: DraftInputs, computed: Any) -> Iterator[Tensor]:
        """The drafts that follow the newest token of each sequence, one after another, at most `num_drafts`: int32 [S] each.

        A draft is computed when the iterator is advanced. A tree is computed at once: int32 [num_drafts, S]. Not called for a step in which
        no sequence samples.
        """

    def retained_states(self) -> AbstractContextManager[None]:
        """A context in which `compute` may be called several times after the model has run once."""
        return nullcontext()

    def catch_up(self, batch: ForwardBatch) -> None:
        """Compute tokens of earlier steps in which the drafter did not run. Called only if its source has `catches_up`."""
        raise NotImplementedError


class DraftSource(ABC):
    """Loaded weights that draft, before the KV caches of the drafter are allocated."""

    name: str  # of the kind, for metrics
    catches_up: ClassVar[bool]  # whether the drafter can compute tokens in a later step, because it needs only their ids
    num_drafts: int  # the largest number of drafts per sequence
    num_bytes: int  # size of the weights
    draft_bytes: int  # size of the weights that one draft reads
    has_state = False  # whether the drafter has recurrent states, so that it must compute all tokens of a sequence in their order
    layers: tuple[int, ...] = ()  # the hidden states before these layers of the model are read

    @abstractmethod
    def block_bytes(self) -> int:
        """The bytes that the drafter needs for each KV cache block of the model."""

    @abstractmethod
    def spare_bytes(self, num_rows: int) -> int:
        """The bytes of the KV cache blocks that only the drafter has, with `num_rows` rows of the device buffers."""

    @abstractmethod
    def drafter(self, num_blocks: int, num_rows: int) -> Drafter:
        """Allocate the caches, for a model whose caches have `num_blocks` blocks."""
