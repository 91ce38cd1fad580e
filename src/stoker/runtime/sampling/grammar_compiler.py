"""Compiles guides to grammars with xgrammar, in threads outside the step loop."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from stoker.base.errors import ConfigError, DependencyError, RequestError
from stoker.base.types import Guide
from stoker.runtime.request import TokenRequest
from stoker.runtime.sampling.json_schema import check_depth, check_schema

THREADS = 2
MAX_WHITESPACE = 1  # characters between JSON tokens; without a limit, models may generate whitespace forever
CACHE_BYTES = 256 << 20  # of compiled grammars

# Type of a decoder in tokenizer.json → xgrammar's name of the vocabulary type.
KIND_OF_DECODER = {"ByteLevel": "BYTE_LEVEL", "ByteFallback": "BYTE_FALLBACK", "Metaspace": "BYTE_FALLBACK", "Fuse": "RAW"}


class Grammars:
    """The grammar compiler of one engine, which loads the tokenizer for the first guide. `vocab_size`: the width of the logits."""

    def __init__(self, engine: Path, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._engine = engine
        self._threads: ThreadPoolExecutor | None = None
        self._compiler: Any = None
        self._lock = threading.Lock()

    def prepare(self, request: TokenRequest) -> Future[Any]:
        """Start to compile the guide of the request, in a thread. The future's result is the compiled grammar.

        Raises DependencyError if xgrammar is not installed, or RequestError if no token may end the answer (ignore_eos without stop ids).
        """
        guide = request.params.guide
        assert guide is not None
        try:
            import xgrammar  # noqa: F401
        except ImportError:
            raise DependencyError("xgrammar", "guided decoding", "guided") from None
        if not end_ids(request):
            raise RequestError("guide.kind", guide.kind, "a guided answer ends with an end id", cure="Unset ignore_eos, or give a stop id.")
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="compile-grammar")
        return self._threads.submit(self._compile, guide)

    def _compile(self, guide: Guide) -> Any:
        """Compile a guide, in a thread. Raises RequestError for an invalid guide."""
        try:
            with self._lock:
                if self._compiler is None:
                    self._compiler = make_compiler(self._engine, self.vocab_size)
            return _compile(self._compiler, guide)
        except (RuntimeError, ValueError, TypeError) as error:  # xgrammar raises these for invalid guides
            raise RequestError("guide.text", guide.text, f"{guide.kind} is not accepted: {_first_line(error)}") from None


def end_ids(request: TokenRequest) -> list[int]:
    """The token ids that end a guided answer: the end ids of the model, or else the stop ids of the request."""
    return list(request.end_ids or request.params.stop_token_ids)


def make_compiler(engine: Path, vocab_size: int) -> Any:
    """An xgrammar compiler for the engine's tokenizer.json. Raises ConfigError if text is not the concatenation of the tokens' texts."""
    import tokenizers
    import xgrammar

    core = tokenizers.Tokenizer.from_file(str(engine / "tokenizer.json"))
    special = {token for token, added in core.get_added_tokens_decoder().items() if added.special}
    texts = [""] * vocab_size  # tokens with empty text are never allowed
    for text, token in core.get_vocab(with_added_tokens=True).items():
        if token < vocab_size and token not in special:
            texts[token] = text
    kind = xgrammar.VocabType[_kind_of(json.loads(core.to_str()).get("decoder"))]
    info = xgrammar.TokenizerInfo(texts, kind, vocab_size=vocab_size, stop_token_ids=[])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES)


def _kind_of(decoder: dict[str, Any] | None) -> str:
    """xgrammar's vocabulary type for a tokenizer's decoder. Raises ConfigError for a decoder that it does not support."""
    steps = (decoder.get("decoders") or [decoder]) if decoder is not None else []
    names = [step["type"] for step in steps]
    for name, kind in KIND_OF_DECODER.items():
        if name in names:
            return kind
    found = ", ".join(names) or "no decoder"
    raise ConfigError(f"answers of this engine cannot be guided: its tokenizer ({found}) does not concatenate the texts of tokens.")


def _compile(compiler: Any, guide: Guide) -> Any:
    """Compile a guide by its kind. Raises ValueError, or an error of xgrammar, for an invalid guide."""
    match guide.kind:
        case "json":
            return compiler.compile_json_schema("true", max_whitespace_cnt=MAX_WHITESPACE)
        case "json_schema":
            check_schema(guide.text)
            return compiler.compile_json_schema(guide.text, max_whitespace_cnt=MAX_WHITESPACE)
        case "regex":
            return compiler.compile_regex(guide.text)
        case "grammar":
            return compiler.compile_grammar(guide.text)
        case "choice":
            return compiler.compile_grammar(_choices(guide.text))
        case _:
            check_depth(json.loads(guide.text))
            return compiler.compile_structural_tag(guide.text)


def _choices(text: str) -> str:
    """An EBNF grammar that matches exactly the strings in the JSON list `text`. Raises ValueError for anything but non-empty strings."""
    choices = json.loads(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError("it must be a JSON list of strings that are not empty")
    return "root ::= " + " | ".join(_literal(choice) for choice in choices)


def _literal(text: str) -> str:
    """A string as a literal of xgrammar's EBNF."""
    return '"' + "".join(f"\\U{ord(char):08x}" if char in '"\\' or not char.isprintable() else char for char in text) + '"'


def _first_line(error: Exception) -> str:
    """The message of an xgrammar error, without its time and source file."""
    line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
    return line.partition("] ")[2].partition(": ")[2].rstrip(".") if line.startswith("[") and "] /" in line else line.rstrip(".")
