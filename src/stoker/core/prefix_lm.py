"""Where a prefix language model's prompt ends and at which positions its tokens sit. Plain integers, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stoker.base.errors import RequestError
from stoker.core.model_config import PrefixConfig


class BidirectionalPrefix(NamedTuple):
    """`length` tokens see each other in both directions; those after them sit at `mask_position`."""

    length: int
    mask_position: int

    def position(self, index: int) -> int:
        """The first position of token `index` of the sequence (learned and rotary tables)."""
        return index if index < self.length else self.mask_position

    def block_position(self, index: int) -> int:
        """The second position: 0 in the prefix, then 1, 2, …"""
        return max(index - self.length + 1, 0)


def find_bidirectional_prefix(config: PrefixConfig, prompt: Sequence[int]) -> BidirectionalPrefix:
    """The prefix of `prompt`'s token ids. Raises RequestError when it lacks the start token, or a mask before it."""
    length = next((i for i, token in enumerate(prompt) if token == config.start_id), None)
    if length is None:
        raise RequestError("prompt", list(prompt), f"this model's prompts hold the token {config.start_id} that starts the answer")
    places = [(config.mask_ids.index(prompt[i]) if config.ranked else 0, i) for i in range(length) if prompt[i] in config.mask_ids]
    if not places:
        raise RequestError("prompt", list(prompt), f"this model's prompts hold a mask token {config.mask_ids} before {config.start_id}")
    return BidirectionalPrefix(length, min(places)[1])
