"""The prefix of a prompt as hashes of its blocks: of token ids as replicas compute them, or of text if it cannot be tokenized."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seq

import msgspec

from stoker.runtime.kv.events.wire import hashes_of_digests
from stoker.runtime.kv.prefix_index import block_digests, pack_blocks
from stoker.runtime.request import PrefixRoot

TEXT_BLOCK_CHARS = 256
CHARS_PER_TOKEN = 4  # estimate for the cost of text, whose number of tokens is not known
MAX_BLOCKS = 1 << 14  # hashed blocks of one prompt; the rest of a longer one does not influence the decision


class PromptPrefix(msgspec.Struct, frozen=True):
    """`hashes[i]` covers the first i + 1 blocks of a prompt. With `exact`, they equal the hashes in the block events of replicas."""

    hashes: Seq[int]
    tokens_per_block: int
    num_tokens: int
    exact: bool


NO_PREFIX = PromptPrefix((), 1, 0, False)


def token_prefix(token_ids: Seq[int], tokens_per_block: int, root: PrefixRoot = "") -> PromptPrefix:
    """The prefix of a tokenized prompt. `root` is the cache salt of the request, or (index of the adapter, cache salt).

    The last token is always computed, so that it belongs to no block here.
    """
    num_tokens = len(token_ids)
    blocks = pack_blocks(token_ids[: MAX_BLOCKS * tokens_per_block], tokens_per_block)
    return hash_prefix(hashes_of_digests(block_digests(blocks, root)), tokens_per_block, num_tokens)


def hash_prefix(hashes: tuple[int, ...], tokens_per_block: int, num_tokens: int) -> PromptPrefix:
    """The prefix of a prompt of `num_tokens` tokens from the hashes of its first blocks."""
    return PromptPrefix(hashes[: min((num_tokens - 1) // tokens_per_block, MAX_BLOCKS)], tokens_per_block, num_tokens, True)


def text_prefix(text: str, root: str = "") -> PromptPrefix:
    """The prefix of a prompt of which only the text is known. `root` separates models, adapters and cache salts."""
    num_blocks = min(len(text) // TEXT_BLOCK_CHARS, MAX_BLOCKS)
    digest = hashlib.sha256(f"text {root}".encode("utf-8", "surrogatepass")).digest()
    digests = []
    for start in range(0, num_blocks * TEXT_BLOCK_CHARS, TEXT_BLOCK_CHARS):
        digest = hashlib.sha256(digest + text[start : start + TEXT_BLOCK_CHARS].encode("utf-8", "surrogatepass")).digest()
        digests.append(digest)
    return PromptPrefix(hashes_of_digests(digests), TEXT_BLOCK_CHARS // CHARS_PER_TOKEN, len(text) // CHARS_PER_TOKEN, False)
