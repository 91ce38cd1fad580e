"""Converts text to token ids and back with the tokenizer files of an engine directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from stoker.base.errors import EngineError, RequestError
from stoker.frontend.detokenizer import Detokenizer, DetokenizerFactory, is_panic

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MAX_COMPOSITION = 4  # characters that a normalizer can combine into one (NFC of Hangul and of stacked accents)


class Tokenizer:
    """Encodes and decodes text. Thread-safe; `encode` releases the global interpreter lock.

    vocab_size: the highest id + 1. The vocabulary of the engine can be larger.
    end_ids: the ids that end a sequence: eos_token_id of generation_config.json and eos_token of the tokenizer.
    max_token_chars: the largest number of characters that one token can represent.
    """

    def __init__(self, core: tokenizers.Tokenizer, config: dict[str, Any] | None = None, generation: dict[str, Any] | None = None) -> None:
        config, generation = config or {}, generation or {}
        core.no_truncation()
        core.no_padding()
        vocab = core.get_vocab(with_added_tokens=True)
        self._core = core
        self._detokenizers = DetokenizerFactory(core)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.max_token_chars = max(map(len, vocab), default=1) * (MAX_COMPOSITION if core.normalizer is not None else 1)
        self.special_tokens = {name: text for name in SPECIAL_NAMES if (text := _content(config.get(name))) is not None}
        self.special_ids = frozenset(token for token, added in core.get_added_tokens_decoder().items() if added.special)
        self.bos_id = self._special_id("bos_token", generation.get("bos_token_id"))
        self.pad_id = self._special_id("pad_token", generation.get("pad_token_id"))
        self.end_ids = self._end_ids(generation.get("eos_token_id"))
        self.chat_template = _chat_template(config.get("chat_template"))

    @classmethod
    def load(cls, directory: Path | str) -> Tokenizer:
        """Load the tokenizer of a directory: tokenizer.json, and if present its other configuration files and chat template.

        Raises EngineError with the name of a missing or damaged file.
        """
        path = Path(directory)
        if not (path / "tokenizer.json").is_file():
            raise EngineError(f"{path / 'tokenizer.json'} is missing.", cure="Build the engine again.")
        try:
            core = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # tokenizers raises plain Exception
            raise EngineError(f"{path / 'tokenizer.json'} cannot be read: {error}.", cure="Build the engine again.") from None
        config = _read_json(path / "tokenizer_config.json")
        if (template := path / "chat_template.jinja").is_file():
            config["chat_template"] = template.read_text(encoding="utf-8")
        return cls(core, config, _read_json(path / "generation_config.json"))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`, with the special tokens of the model if requested.

        Raises RequestError for invalid Unicode, and EngineError if there is no token for a part of the text, nor for unknown parts.
        """
        try:
            # Without offsets, the batch call takes half the time of encode() and releases the lock: 2 MB in 0.95 s, waits of 15 ms.
            return self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError:  # tokenizers raises it for a lone surrogate, which JSON can contain
            raise RequestError("prompt", text, "it contains a lone surrogate", cure="Send valid Unicode.") from None
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            raise EngineError(
                f"the tokenizer of the engine cannot encode this text: {error}.", cure="Correct its tokenizer.json."
            ) from None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. Equal to the texts that a detokenizer returns, concatenated."""
        return self._detokenizers.whole(token_ids, skip_special_tokens)

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A new detokenizer for one sequence."""
        return self._detokenizers.make(skip_special_tokens)

    def check_length(self, text: str, max_tokens: int) -> None:
        """Raise RequestError for a text that certainly has more than `max_tokens` tokens. The text is not tokenized."""
        if len(text) > max_tokens * self.max_token_chars:
            limit = f"it has {len(text)} characters, and the limit is {max_tokens} tokens of at most {self.max_token_chars} characters"
            raise RequestError("prompt", text, limit, cure="Shorten it.")

    def token_text(self, token_id: int) -> str | None:
        """The vocabulary entry of an id, or None."""
        return self._core.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of one id, special tokens included; empty for an unknown id."""
        return self._detokenizers.token_bytes(token_id)

    def token_id(self, content: str) -> int | None:
        """The id of a vocabulary entry, or None."""
        return self._core.token_to_id(content)

    def _special_id(self, name: str, fallback: Any) -> int | None:
        """The id of the special token called `name`, or `fallback` if that is an id, or None."""
        text = self.special_tokens.get(name)
        found = self._core.token_to_id(text) if text is not None else None
        return found if found is not None else fallback if type(fallback) is int else None

    def _end_ids(self, configured: Any) -> tuple[int, ...]:
        """The ids that end a sequence. Raises EngineError for an invalid eos_token_id."""
        ids = [configured] if type(configured) is int else list(configured or [])
        if not all(type(token) is int and token >= 0 for token in ids):
            raise EngineError(f"generation_config.json: eos_token_id={configured!r} is not an id or a list of ids.", cure="Correct it.")
        own = self._special_id("eos_token", None)
        return tuple(dict.fromkeys([*ids, *([own] if own is not None else [])]))


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no file. Raises EngineError for a damaged file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EngineError(f"{path} cannot be read: {error}.", cure="Build the engine again.") from None
    if not isinstance(value, dict):
        raise EngineError(f"{path} contains a {type(value).__name__} instead of an object.", cure="Build the engine again.")
    return value


def _content(token: Any) -> str | None:
    """The text of a special token, which the configuration has as a string or as an object."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _chat_template(value: Any) -> str | None:
    """The chat template: a string, or the entry called `default` in a list; else None."""
    if isinstance(value, list):
        value = next((entry.get("template") for entry in value if isinstance(entry, dict) and entry.get("name") == "default"), None)
    return value if isinstance(value, str) else None
