"""The prefix of a prompt as hashes of its blocks: of token ids as replicas compute them, or of text if it cannot be tokenized."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence as Seq
from typing import NamedTuple

from stoker.runtime.kv.prefix_index import pack, root_digest
from stoker.runtime.request import PrefixRoot

TEXT_BLOCK_CHARS = 256
CHARS_PER_TOKEN = 4  # estimate for the cost of text, whose number of tokens is not known
MAX_BLOCKS = 1 << 14  # hashed blocks of one prompt; the rest of a longer one does not influence the decision
_ID_BYTES = 4


class PromptPrefix(NamedTuple):
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
    num_blocks = min((len(token_ids) - 1) // tokens_per_block, MAX_BLOCKS)
    chunks = pack(token_ids[: num_blocks * tokens_per_block])
    size = tokens_per_block * _ID_BYTES
    sha256, digest = hashlib.sha256, root_digest(root)
    digests = [digest := sha256(digest + chunks[start : start + size]).digest() for start in range(0, num_blocks * size, size)]
    return PromptPrefix(_hashes(digests), tokens_per_block, len(token_ids), True)


def text_prefix(text: str, root: str = "") -> PromptPrefix:
    """The prefix of a prompt of which only the text is known. `root` separates models, adapters and cache salts."""
    num_blocks = min(len(text) // TEXT_BLOCK_CHARS, MAX_BLOCKS)
    digest = hashlib.sha256(f"text {root}".encode("utf-8", "surrogatepass")).digest()
    digests = []
    for start in range(0, num_blocks * TEXT_BLOCK_CHARS, TEXT_BLOCK_CHARS):
        digest = hashlib.sha256(digest + text[start : start + TEXT_BLOCK_CHARS].encode("utf-8", "surrogatepass")).digest()
        digests.append(digest)
    return PromptPrefix(_hashes(digests), TEXT_BLOCK_CHARS // CHARS_PER_TOKEN, len(text) // CHARS_PER_TOKEN, False)


def _hashes(digests: list[bytes]) -> tuple[int, ...]:
    """The block hash of each digest: its last eight bytes as an unsigned number."""
    return struct.unpack(">" + "24xQ" * len(digests), b"".join(digests))
