"""Tables of the text of each token, computed when the token first occurs."""

from __future__ import annotations

import string
from collections.abc import Sequence

import tokenizers

HEX_DIGITS = frozenset(string.hexdigits)


class BytePieces(dict[int, bytes]):
    """The bytes of each token of a byte-level vocabulary; empty for dropped and unknown ids."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, dropped: frozenset[int]) -> None:
        super().__init__(dict.fromkeys(dropped, b""))
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> bytes:
        content = token_content(self._tokenizer, token)
        if content is None:
            return b""
        piece = self[token] = to_bytes(content)
        return piece


class FallbackPieces(dict[int, "str | int | None"]):
    """The text of each token, or the byte of a byte token such as <0x0A>; None for dropped and unknown ids."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, dropped: frozenset[int], replaced: Sequence[tuple[str, str]]) -> None:
        super().__init__(dict.fromkeys(dropped))
        self._tokenizer = tokenizer
        self._replaced = replaced

    def __missing__(self, token: int) -> str | int | None:
        content = token_content(self._tokenizer, token)
        if content is None:
            return None
        for old, new in self._replaced:
            content = content.replace(old, new)
        piece = self[token] = byte_value(content) if is_byte_token(content) else content
        return piece


def token_content(tokenizer: tokenizers.Tokenizer, token: int) -> str | None:
    """The entry of the vocabulary for an id; None for ids outside the vocabulary, which the engine's padded vocabulary has."""
    return tokenizer.id_to_token(token) if 0 <= token < 1 << 32 else None


def is_byte_token(content: str) -> bool:
    """Whether an entry of the vocabulary is a byte token, such as <0x0A>."""
    return len(content) == 6 and content.startswith("<0x") and content.endswith(">") and HEX_DIGITS.issuperset(content[3:5])


def byte_value(content: str) -> int:
    """The byte that a byte token stands for."""
    return int(content[3:5], 16)


def to_bytes(content: str) -> bytes:
    """The bytes of a vocabulary entry, by reversing GPT-2's mapping of bytes to visible characters.

    An entry with other characters (an added token) is plain text.
    """
    try:
        return bytes([BYTE_OF_CHAR[char] for char in content])
    except KeyError:
        return content.encode()


def _byte_alphabet() -> dict[str, int]:
    """The byte of each character in GPT-2's mapping (encoder.py, bytes_to_unicode).

    Visible Latin-1 characters represent themselves; the other 68 bytes are mapped to U+0100 and up.
    """
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


BYTE_OF_CHAR = _byte_alphabet()
