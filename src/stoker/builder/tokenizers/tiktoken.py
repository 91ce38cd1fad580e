"""Vocabularies in tiktoken's form (a line is a token in base64 and its rank) as byte-level BPE, checked against tiktoken itself."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

import tiktoken
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.weights import FETCH
from stoker.builder.tokenizers.probe_texts import PROBES

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# How text is cut before merging: digits three by three (cl100k, Llama 3, GLM-4), or one by one (Qwen).
THREE_DIGITS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
ONE_DIGIT = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"


def from_ranks(file: Path, pattern: str, special: Sequence[str], *, nfc: bool = False) -> Tokenizer:
    """The tokenizer of a file of ranks; `special` tokens get the ids after them. `nfc`: text is composed first.

    Raises CheckpointError for a damaged file, and when the result splits the probes otherwise than tiktoken.
    """
    ranks = read_ranks(file)
    spelled = {token: _spell(token) for token in ranks}
    vocab = {spelled[token]: rank for token, rank in ranks.items()}
    # tiktoken takes a whole word that is a token as it is, whether or not merges lead there.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=_merges(ranks, spelled), ignore_merges=True))
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence(cuts), decoders.ByteLevel()
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    _check(tokenizer, tiktoken.Encoding("checkpoint", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}), file)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def read_ranks(file: Path) -> dict[bytes, int]:
    """Tokens and their ranks 0, 1, …, every byte among them. Raises CheckpointError naming the line that is wrong."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            if line.strip():
                raise CheckpointError(f"{file}, line {number}: not a token in base64 and a rank.", cure=FETCH) from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(f"{file}: the ranks of its {len(ranks)} tokens are not 0 to {len(ranks) - 1}.", cure=FETCH)
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise CheckpointError(f"{file} has no token for byte 0x{missing[0]:02X}.", cure=FETCH)
    return ranks


def _merges(ranks: dict[bytes, int], spelled: dict[bytes, str]) -> list[tuple[str, str]]:
    """Every split of a token into two tokens, in the order of ranks, as Hugging Face's converter makes them."""
    ranked = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = ranks.get(token[:cut]), ranks.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((rank, left, right, (spelled[token[:cut]], spelled[token[cut:]])))
    return [pair for *_, pair in sorted(ranked)]


def _alphabet() -> list[str]:
    """GPT-2's character for each byte: those of Latin-1 that print are themselves, the rest follow from U+0100."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printed)
    found = {byte: chr(byte) for byte in printed} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    return [found[byte] for byte in range(256)]


_BYTES = _alphabet()


def _spell(token: bytes) -> str:
    return "".join([_BYTES[byte] for byte in token])


def _check(tokenizer: Tokenizer, original: tiktoken.Encoding, file: Path) -> None:
    for text in PROBES:
        ids, wanted = tokenizer.encode(text, add_special_tokens=False).ids, original.encode_ordinary(text)
        if ids != wanted:
            raise CheckpointError(f"{file}: converted, it splits {text!r} into {ids}, not {wanted}.", cure="Add a tokenizer.json.")
