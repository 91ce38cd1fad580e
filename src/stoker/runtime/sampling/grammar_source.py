"""Compiles one guide with xgrammar. Guides above the size limits are refused before xgrammar sees them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stoker.base.errors import ConfigError
from stoker.base.types import Guide
from stoker.runtime.sampling.json_schema import MAX_VALUES, check_schema, check_size

MAX_WHITESPACE = 1  # characters between JSON tokens; without a limit, models may generate whitespace forever
# With 128,000 tokens, 8,000 rules take 0.2 s and 1 MB; 16,000 take 4 s and 20 MB.
MAX_RULES = 10_000  # of an EBNF grammar

# The characters of strings with a length limit as xgrammar writes them, and without those that JSON does not allow in a string.
_LIMITED, _LIMITED_JSON = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\\r\n]"

# Type of a decoder in tokenizer.json → xgrammar's name of the vocabulary type.
KIND_OF_DECODER = {"ByteLevel": "BYTE_LEVEL", "ByteFallback": "BYTE_FALLBACK", "Metaspace": "BYTE_FALLBACK", "Fuse": "RAW"}


def load_vocabulary(engine: Path, vocab_size: int) -> Any:
    """The xgrammar.TokenizerInfo of the engine's tokenizer.json, for logits with `vocab_size` columns.

    Raises ConfigError if text is not the concatenation of the tokens' texts.
    """
    import tokenizers
    import xgrammar

    core = tokenizers.Tokenizer.from_file(str(engine / "tokenizer.json"))
    special = {token for token, added in core.get_added_tokens_decoder().items() if added.special}
    texts = [""] * vocab_size  # tokens with empty text are never allowed
    for text, token in core.get_vocab(with_added_tokens=True).items():
        if token < vocab_size and token not in special:
            texts[token] = text
    kind = xgrammar.VocabType[_kind_of(json.loads(core.to_str()).get("decoder"))]
    return xgrammar.TokenizerInfo(texts, kind, vocab_size=vocab_size, stop_token_ids=[])


def _kind_of(decoder: dict[str, Any] | None) -> str:
    """xgrammar's vocabulary type for a tokenizer's decoder. Raises ConfigError for a decoder that it does not support."""
    steps = (decoder.get("decoders") or [decoder]) if decoder is not None else []
    names = [step["type"] for step in steps]
    for name, kind in KIND_OF_DECODER.items():
        if name in names:
            return kind
    found = ", ".join(names) or "no decoder"
    raise ConfigError(f"answers of this engine cannot be guided: its tokenizer ({found}) does not concatenate the texts of tokens.")


def compile_guide(vocabulary: Any, guide: Guide) -> Any:
    """The xgrammar.CompiledGrammar of a guide. Raises ValueError for an invalid guide or one above a size limit, or MemoryError."""
    import xgrammar

    compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)
    try:
        return _compile(compiler, guide)
    except (RuntimeError, ValueError, TypeError) as error:  # xgrammar raises these for invalid guides
        if "bad_alloc" in str(error):
            raise MemoryError from None
        raise ValueError(_first_line(error)) from None


def _compile(compiler: Any, guide: Guide) -> Any:
    """Compile a guide by its kind. Raises ValueError, or an error of xgrammar, for an invalid guide."""
    import xgrammar

    match guide.kind:
        case "json":
            return compiler.compile_json_schema("true", max_whitespace_cnt=MAX_WHITESPACE)
        case "json_schema":
            check_schema(guide.text)
            grammar = xgrammar.Grammar.from_json_schema(guide.text, max_whitespace_cnt=MAX_WHITESPACE)
            return compiler.compile_grammar(_without_control_characters(grammar))
        case "regex":
            return compiler.compile_regex(guide.text)
        case "grammar":
            if (rules := guide.text.count("::=")) > MAX_RULES:
                raise ValueError(f"it has {rules} rules, and may have {MAX_RULES}")
            return compiler.compile_grammar(guide.text)
        case "choice":
            return compiler.compile_grammar(_choices(guide.text))
        case _:
            check_size(json.loads(guide.text))
            return compiler.compile_grammar(_without_control_characters(xgrammar.Grammar.from_structural_tag(guide.text)))


def _without_control_characters(grammar: Any) -> Any:
    """The grammar, in which strings with a minLength or maxLength contain no control characters, which JSON does not allow."""
    import xgrammar

    text = str(grammar)
    return xgrammar.Grammar.from_ebnf(text.replace(_LIMITED, _LIMITED_JSON)) if _LIMITED in text else grammar


def _choices(text: str) -> str:
    """An EBNF grammar that matches exactly the strings in the JSON list `text`. Raises ValueError for anything but non-empty strings."""
    choices = json.loads(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError("it must be a JSON list of strings that are not empty")
    if len(choices) > MAX_VALUES:
        raise ValueError(f"it has {len(choices)} strings, and may have {MAX_VALUES}")
    return "root ::= " + " | ".join(_literal(choice) for choice in choices)


def _literal(text: str) -> str:
    """A string as a literal of xgrammar's EBNF."""
    return '"' + "".join(f"\\U{ord(char):08x}" if char in '"\\' or not char.isprintable() else char for char in text) + '"'


def _first_line(error: Exception) -> str:
    """The message of an xgrammar error, without its time and source file."""
    line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
    return line.partition("] ")[2].partition(": ")[2].rstrip(".") if line.startswith("[") and "] /" in line else line.rstrip(".")
