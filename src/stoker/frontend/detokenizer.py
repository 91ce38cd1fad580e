"""Incremental detokenization: token ids to text as they arrive. The joined text equals the text of the whole sequence.

`tokenizers.decoders.DecodeStream` is not used: for runs of byte tokens its text differs from that of the whole sequence, and for runs
that never become valid UTF-8 the time per token grows (measured: 1 ms per token after 3000).
"""

from __future__ import annotations

import codecs
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import tokenizers

from stoker.base.errors import EngineError
from stoker.frontend.token_pieces import BytePieces, FallbackPieces

MAX_BYTE_RUN = 64  # byte tokens held back while their run continues
MAX_WINDOW = 64  # tokens that WindowDetokenizer holds back while they end inside a character
REPLACEMENT = "\ufffd"

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer(ABC):
    """The text of one sequence. `push` and `flush` return only new text. A character is never split."""

    @abstractmethod
    def push(self, token_ids: Sequence[int]) -> str:
        """The text that becomes complete with these tokens; may be empty. Ids outside the vocabulary add no text."""

    @abstractmethod
    def flush(self) -> str:
        """The text that was held back because it was incomplete. Call it at the end of the sequence.

        Incomplete characters become U+FFFD.
        """


class ByteLevelDetokenizer(Detokenizer):
    """Tokens are bytes (byte-level BPE of GPT-2). Exact for all ids: both decoders follow the Unicode rule for ill-formed UTF-8."""

    def __init__(self, pieces: BytePieces) -> None:
        self._pieces = pieces
        self._decode = _Utf8("replace").decode

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that becomes complete with these tokens. The bytes of an incomplete character are kept for the next call."""
        pieces = self._pieces
        return self._decode(b"".join([pieces[token] for token in token_ids]))

    def flush(self) -> str:
        return self._decode(b"", True)


class ByteFallbackDetokenizer(Detokenizer):
    """Tokens are text, and characters outside the vocabulary are sequences of byte tokens (sentencepiece).

    `tokenizers` decodes a run of byte tokens as a unit: to text if it is valid UTF-8, else to one U+FFFD per byte. A run is therefore
    held back until it ends or has MAX_BYTE_RUN bytes. Only longer ill-formed runs can differ from the text of the whole sequence.
    """

    def __init__(self, pieces: FallbackPieces, strip: tuple[str, int]) -> None:
        self._pieces = pieces
        self._run = bytearray()
        self._stripped, self._num_strip = strip  # a character, and how many of it are removed at the start of the text

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that becomes complete with these tokens. A run of byte tokens is kept until it has ended."""
        pieces, run = self._pieces, self._run
        text: list[str] = []
        for token in token_ids:
            piece = pieces[token]
            if isinstance(piece, int):
                run.append(piece)
                if len(run) >= MAX_BYTE_RUN:
                    text.append(self._shorten_run())
            elif piece is not None:
                if run:
                    text.append(self._end_run())
                text.append(piece)
        return self._strip("".join(text)) if self._num_strip else "".join(text)

    def flush(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        """The text of the current run of byte tokens, which ends here."""
        try:
            return self._run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(self._run)
        finally:
            self._run.clear()

    def _shorten_run(self) -> str:
        """The text of the part of a long run that is complete."""
        try:
            self._run.decode()
        except UnicodeDecodeError as error:
            if error.end == len(self._run) and error.reason == "unexpected end of data":
                text = self._run[: error.start].decode()
                del self._run[: error.start]
                return text
        return self._end_run()

    def _strip(self, text: str) -> str:
        """`text` without the characters that are removed at the start of a sequence."""
        while text and self._num_strip:
            if not text.startswith(self._stripped):
                self._num_strip = 0
                break
            text = text[1:]
            self._num_strip -= 1
        return text


class WindowDetokenizer(Detokenizer):
    """For all other decoders: decodes the tokens of the previous text again, together with the new ones, and returns the difference.

    The tokens of the previous text are the context for the decoder, which decides about spaces between words. Ids without text are dropped
    before, because the decoder would treat the next token as the first of the text. A call decodes twice.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, dropped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._dropped = dropped
        self._context: list[int] = []
        self._new: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Decode the tokens of the previous text again, together with the new ones, and return the new text."""
        self._new += [token for token in token_ids if token not in self._dropped and self._known(token)]
        return self._emit(final=False)

    def flush(self) -> str:
        return self._emit(final=True)

    def _emit(self, *, final: bool) -> str:
        """The text of the new tokens; empty while it ends in an incomplete character, unless `final`."""
        if not self._new:
            return ""
        text = self._decode(self._context + self._new)
        if not final and len(self._new) < MAX_WINDOW and (text.endswith(REPLACEMENT) or self._ends_in_byte()):
            return ""
        fresh = text[len(self._decode(self._context)) :]
        if fresh:
            self._context, self._new = self._new, []
        return fresh

    def _decode(self, token_ids: list[int]) -> str:
        """The text of the ids, special tokens included."""
        return decode(self._tokenizer, token_ids)

    def _known(self, token: int) -> bool:
        """Whether the id is in the vocabulary."""
        return 0 <= token < 1 << 32 and self._tokenizer.id_to_token(token) is not None

    def _ends_in_byte(self) -> bool:
        """Whether the newest token is a byte token."""
        return (self._tokenizer.id_to_token(self._new[-1]) or "").startswith("<0x")


def decode(tokenizer: tokenizers.Tokenizer, token_ids: list[int]) -> str:
    """The text of the ids, special tokens included. Raises EngineError if the decoder fails, as that of a damaged tokenizer.json may do."""
    try:
        return tokenizer.decode(token_ids, skip_special_tokens=False)
    except BaseException as error:
        if is_panic(error):
            raise EngineError(f"the decoder of the engine's tokenizer fails: {error}.", cure="Correct its tokenizer.json.") from None
        raise


def is_panic(error: BaseException) -> bool:
    """Whether the error is a panic of tokenizers' Rust code, whose type cannot be imported and is no Exception."""
    return type(error).__name__ == "PanicException"


class DetokenizerFactory:
    """Creates detokenizers for one tokenizer. They share tables of the text of tokens, which are filled when a token first occurs."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special)
        self._steps = _decoder_steps(tokenizer)
        self._kinds = [step["type"] for step in self._steps]
        self._pieces: dict[bool, Any] = {skip: self._table(self._special if skip else frozenset()) for skip in (False, True)}

    def make(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A detokenizer for one sequence."""
        pieces = self._pieces[skip_special_tokens]
        if isinstance(pieces, BytePieces):
            return ByteLevelDetokenizer(pieces)
        if isinstance(pieces, FallbackPieces):
            last = self._steps[-1]
            return ByteFallbackDetokenizer(pieces, (last["content"], last["start"]) if last["type"] == "Strip" else ("", 0))
        return WindowDetokenizer(self._tokenizer, pieces)

    def whole(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. Equal to the texts that a detokenizer returns, concatenated."""
        pieces = self._pieces[skip_special_tokens]
        if isinstance(pieces, BytePieces):
            return b"".join([pieces[token] for token in token_ids]).decode("utf-8", "replace")
        detokenizer = self.make(skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.flush()

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes of one token. They may be only a part of a character."""
        pieces = self._pieces[False]
        if isinstance(pieces, (BytePieces, FallbackPieces)):
            piece = pieces[token]
            return bytes([piece]) if isinstance(piece, int) else piece.encode() if isinstance(piece, str) else piece or b""
        known = self._tokenizer.id_to_token(token) is not None
        return decode(self._tokenizer, [token]).encode() if known else b""

    def _table(self, dropped: frozenset[int]) -> BytePieces | FallbackPieces | frozenset[int]:
        """The table of token texts without the ids `dropped`, or only these ids for a decoder without a table."""
        if self._kinds == ["ByteLevel"]:
            return BytePieces(self._tokenizer, dropped)
        if self._is_byte_fallback():
            replaced = [(step["pattern"]["String"], step["content"]) for step in self._steps if step["type"] == "Replace"]
            return FallbackPieces(self._tokenizer, dropped, replaced)
        return dropped

    def _is_byte_fallback(self) -> bool:
        """Whether the decoder is [Replace …, ByteFallback, Fuse] and optionally Strip, as converted sentencepiece models have it."""
        steps = list(self._steps)
        if steps and steps[-1]["type"] == "Strip" and not steps[-1]["stop"] and len(steps[-1]["content"]) == 1:
            steps.pop()
        replaces = steps[:-2]
        return [step["type"] for step in steps[-2:]] == ["ByteFallback", "Fuse"] and all(
            step["type"] == "Replace" and "String" in step["pattern"] for step in replaces
        )


def _decoder_steps(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The decoder's steps as in tokenizer.json, where a sequence of decoders is flattened; empty without a decoder."""
    if tokenizer.decoder is None:
        return []
    state = json.loads(tokenizer.decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]
