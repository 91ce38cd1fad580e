"""The positions of tokens in a prefix LM, whose prompt tokens attend in both directions. Plain integers, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stoker.base.errors import RequestError
from stoker.core.model_config import PrefixConfig


class BidirectionalPrefix(NamedTuple):
    """The first `length` tokens of a sequence attend to each other; all later tokens have the position `mask_position`."""

    length: int
    mask_position: int

    def position(self, index: int) -> int:
        """The position of token number `index` of the sequence, for learned and rotary embeddings."""
        return index if index < self.length else self.mask_position

    def block_position(self, index: int) -> int:
        """The block position of token number `index`: 0 in the prefix, then 1, 2, …."""
        return max(index - self.length + 1, 0)


def find_bidirectional_prefix(config: PrefixConfig, prompt: Sequence[int]) -> BidirectionalPrefix:
    """The prefix in the token ids of a prompt, which ends before the start token.

    Raises RequestError when the prompt has no start token, or no mask token before it.
    """
    length = next((i for i, token in enumerate(prompt) if token == config.start_id), None)
    if length is None:
        raise RequestError("prompt", list(prompt), f"it must contain the token {config.start_id}, which starts the answer")
    masks = [(config.mask_ids.index(prompt[i]) if config.ranked else 0, i) for i in range(length) if prompt[i] in config.mask_ids]
    if not masks:
        raise RequestError("prompt", list(prompt), f"it must contain a mask token {config.mask_ids} before {config.start_id}")
    return BidirectionalPrefix(length, min(masks)[1])
