"""Converts tiktoken vocabularies to byte-level BPE, and compares the result with tiktoken.

A vocabulary file has one line per token: the token in base64, and its rank.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

import tiktoken
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN
from stoker.builder.tokenizers.check_splits import check_splits
from stoker.builder.tokenizers.merges import divisions


def convert_tiktoken(file: Path, pattern: str, special: Sequence[str], *, nfc: bool = False) -> Tokenizer:
    """The tokenizer of a vocabulary file. `special` tokens follow the ranks; `nfc`: normalize text to NFC first.

    `pattern` is the regular expression that splits text into words. Raises CheckpointError for a damaged file, and when the converted
    tokenizer splits the probe texts differently from tiktoken.
    """
    ranks = read_ranks(file)
    spelled = {token: _spell(token) for token in ranks}
    vocab = {spelled[token]: rank for token, rank in ranks.items()}
    # tiktoken encodes a whole word that is in the vocabulary as one token, even if no merges produce it.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=_derive_merges(ranks, spelled), ignore_merges=True))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence(splits), decoders.ByteLevel()
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    original = tiktoken.Encoding("checkpoint", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    check_splits(tokenizer, original.encode_ordinary, file)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def read_ranks(file: Path) -> dict[bytes, int]:
    """The rank of each token. Raises CheckpointError unless the ranks are 0, 1, … and every single byte is a token."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            if line.strip():
                raise CheckpointError(f"{file}, line {number}: not a token in base64 and a rank.", cure=DOWNLOAD_AGAIN) from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(f"{file}: the ranks of its {len(ranks)} tokens are not 0 to {len(ranks) - 1}.", cure=DOWNLOAD_AGAIN)
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise CheckpointError(f"{file} has no token for byte 0x{missing[0]:02X}.", cure=DOWNLOAD_AGAIN)
    return ranks


def _derive_merges(ranks: dict[bytes, int], spelled: dict[bytes, str]) -> list[tuple[str, str]]:
    """All divisions of a token into two tokens, in the order of ranks, as Hugging Face's converter derives merges."""
    ranked = [(ranks[token], ranks[left], ranks[right], (spelled[left], spelled[right])) for token, left, right in divisions(ranks)]
    return [pair for *_, pair in sorted(ranked)]


def _byte_level_alphabet() -> list[str]:
    """GPT-2's character for each byte: printable Latin-1 characters represent themselves, other bytes are U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    return [characters[byte] for byte in range(256)]


_ALPHABET = _byte_level_alphabet()


def _spell(token: bytes) -> str:
    """A token's bytes as GPT-2's characters."""
    return "".join([_ALPHABET[byte] for byte in token])
