"""The interface of sampling features, over which the sampler iterates. Each has its own state per sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
from torch import Tensor

from stoker.base.types import SamplingParams
from stoker.runtime.request import Sequence


class SampledRow(NamedTuple):
    """A row of logits: it gives the token that follows the known tokens of `seq` and then `drafts`.

    A sequence that verifies k drafts has k + 1 consecutive rows: after its newest token, and after each draft. A row follows that of its
    parent, which in a chain is the row before it.
    """

    at: int  # index of the row in the logits
    seq: Sequence
    num_tokens: int  # prompt and generated tokens before the sampled one, drafts included
    drafts: Seq[int] = ()  # the drafts before the sampled token; -1 for an id that only the device knows

    @property
    def num_generated(self) -> int:
        """The number of generated tokens before the sampled one, drafts included."""
        return self.num_tokens - self.seq.num_prompt

    def newest(self, count: int) -> tuple[int, ...]:
        """The newest `count` (at least 1) generated tokens before the sampled one, drafts included; fewer if fewer were generated."""
        drafts, tokens = tuple(self.drafts[-count:]), self.seq.tokens
        if len(drafts) == count:
            return drafts
        return (*tokens[max(len(tokens) - count + len(drafts), self.seq.num_prompt) :], *drafts)


class Feature(ABC):
    """Changes the logits of the sequences that use it, before a token is sampled.

    `gather` runs on the host; the arrays of all features are copied to the device with one copy. `apply` and `observe` only launch kernels:
    they must not copy from the host or wait for the device (assigning a Python number through an index does both). State is stored by
    seq_id, so that preemption and a change of row do not affect it. State on the host that depends on tokens must not include drafts, which
    may be rejected.
    """

    reads_drafts = False
    """Whether the first input of `apply` and `observe` is the drafts before each row (`StepDrafts.before`), on the device."""

    reads_tokens = False
    """Whether `gather` reads the generated tokens, or how many there are. The host knows neither while a step with drafts is in flight."""

    @abstractmethod
    def applies_to(self, params: SamplingParams) -> bool:
        """Whether a sequence with these parameters uses this feature."""

    def add(self, seq: Sequence) -> None:
        """Called before the first step of a sequence that uses the feature."""
        return

    def remove(self, seq_id: int) -> None:
        """Called when a sequence has ended. Unknown ids are ignored."""
        return

    @abstractmethod
    def gather(self, rows: list[SampledRow]) -> list[np.ndarray]:
        """The arrays that `apply` and `observe` need on the device, for the rows of this step that use the feature."""

    @abstractmethod
    def apply(self, logits: Tensor, *inputs: Tensor) -> None:
        """Change contiguous logits [L, V] float32 in place. `inputs` are the arrays of `gather`, on the device."""

    def observe(self, token_ids: Tensor, *inputs: Tensor) -> None:
        """Called after sampling with the token ids [L], which are on the device, and the same inputs as `apply`.

        An id is -1 where no token was sampled, and in rows after a draft that was rejected.
        """
        return


class Ban(Feature):
    """A feature that bans tokens."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    @abstractmethod
    def banned(self, row: SampledRow) -> Iterable[int]:
        """The token ids that are banned in a row. Ids outside the vocabulary are ignored."""

    def gather(self, rows: list[SampledRow]) -> list[np.ndarray]:
        """The indices of the banned tokens in the flattened logits [L × V]."""
        size = self.vocab_size
        return [np.array([row.at * size + token for row in rows for token in self.banned(row) if 0 <= token < size], dtype=np.int64)]

    def apply(self, logits: Tensor, *inputs: Tensor) -> None:
        """Set the logits of the banned tokens to -inf."""
        (indices,) = inputs
        logits.view(-1).index_fill_(0, indices, float("-inf"))
