"""Converts the tokenizer in a GGUF file to tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.gguf.file import GGUFFile
from stoker.builder.checkpoint.gguf.weights import GGUFWeights
from stoker.builder.tokenizers.gguf_keys import check_tokenizer_keys
from stoker.builder.tokenizers.gguf_pre_tokenizers import BEGINS_WITH_BOS, COMPOSES, IGNORES_MERGES, PATTERNS, pre_tokenizer
from stoker.builder.tokenizers.sentencepiece import add_begin_and_end, add_special_pieces, make_bpe, use_space_symbol

_CURE = "Download the file again, or name a tokenizer with --tokenizer."


def convert_gguf_tokenizer(weights: GGUFWeights) -> tuple[Tokenizer, dict[str, Any]]:
    """(tokenizer, content of tokenizer_config.json) of a GGUF file. Raises CheckpointError for an unknown kind or key, or damage."""
    file = weights.file
    tokens = file.get("tokenizer.ggml.tokens", [str])
    kind = file.get("tokenizer.ggml.model", str)
    if not tokens or kind not in _CONVERTERS:
        found = f"a tokenizer of kind {kind!r}{_OTHER_KINDS.get(str(kind), '')}" if tokens else "no tokenizer"
        raise CheckpointError(f"{file.path} has {found}.", cure=f"Known kinds: {', '.join(_CONVERTERS)}; or name one with --tokenizer.")
    check_tokenizer_keys(file)
    tokenizer = _CONVERTERS[kind](file, tokens)
    add_special_pieces(tokenizer, list(zip(tokens, file.get("tokenizer.ggml.token_type", [int], []), strict=False)))
    if tokenizer.get_vocab_size() != len(tokens):
        raise CheckpointError(
            f"{file.path}: the vocabulary lists {len(tokens)} tokens, of which {tokenizer.get_vocab_size()} are different.",
            cure="Download the file again.",
        )
    config = _tokenizer_config(file, tokens, weights.config.get("max_position_embeddings"))
    add_begin_and_end(tokenizer, *(_added_token(file, config, name) for name in ("bos", "eos")))
    return tokenizer, config


def _added_token(file: GGUFFile, config: dict[str, Any], name: str) -> tuple[str, int] | None:
    """(text, id) of the bos or eos token if it is added to every text. Raises CheckpointError if the file requires it and names none.

    llama.cpp does not start then. A file that does not say whether bos is added may be without it.
    """
    key = f"tokenizer.ggml.add_{name}_token"
    if not config[f"add_{name}_token"]:
        return None
    if f"{name}_token" in config:
        return config[f"{name}_token"], file.get(f"tokenizer.ggml.{name}_token_id", int)
    if file.get(key, bool, False):
        id_key = f"tokenizer.ggml.{name}_token_id"
        raise CheckpointError(
            f"{file.path}: {key} is true, and {id_key}={file.get(id_key, int)} is no token.", cure="Name a tokenizer with --tokenizer."
        )
    return None


def _convert_byte_level(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer from tokens and merges. Raises CheckpointError for an unknown pre-tokenizer."""
    pre = file.get("tokenizer.ggml.pre", str, "default")
    if pre not in PATTERNS:
        known = ", ".join(PATTERNS)
        raise CheckpointError(
            f"{file.path}: pre-tokenizer {pre!r} is not known.", cure=f"Known: {known}; or name a tokenizer with --tokenizer."
        )
    merges = [tuple(line.split(" ", 1)) for line in file.get("tokenizer.ggml.merges", [str], [])]
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in IGNORES_MERGES))
    except Exception as problem:  # the library raises bare Exception for every defect
        raise CheckpointError(f"{file.path}: tokens and merges do not form a tokenizer ({problem}).", cure=_CURE) from None
    if pre in COMPOSES:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _convert_sentencepiece(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    """A sentencepiece BPE tokenizer from tokens and scores. Raises CheckpointError for scores that do not fit the tokens."""
    unknown, scores = file.get("tokenizer.ggml.unknown_token_id", int, 0), file.get("tokenizer.ggml.scores", [float], [0.0] * len(tokens))
    if not 0 <= unknown < len(tokens) or len(scores) != len(tokens):
        found = f"unknown_token_id={unknown} and {len(scores)} scores"
        raise CheckpointError(f"{file.path}: {found} do not fit {len(tokens)} tokens.", cure=_CURE)
    tokenizer = Tokenizer(make_bpe(tokens, scores, tokens[unknown]))
    use_space_symbol(tokenizer, prefix=file.get("tokenizer.ggml.add_space_prefix", bool, True))
    return tokenizer


# Kinds of tokenizers that no supported architecture has, with what they are.
_OTHER_KINDS = {"bert": " (WordPiece)", "t5": " (unigram)", "rwkv": " (a trie)", "plamo2": " (Aho-Corasick)", "gemma4": " (BPE of Gemma 4)"}
# tokenizer.ggml.model → the converter of its vocabulary.
_CONVERTERS: dict[str, Callable[[GGUFFile, list[str]], Tokenizer]] = {"gpt2": _convert_byte_level, "llama": _convert_sentencepiece}


def _tokenizer_config(file: GGUFFile, tokens: list[str], max_length: int | None) -> dict[str, Any]:
    """The content of tokenizer_config.json: special tokens, whether they are added, and the chat template."""
    kind, pre = file.get("tokenizer.ggml.model", str), file.get("tokenizer.ggml.pre", str)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for key, name in (("bos", "bos_token"), ("eos", "eos_token"), ("unknown", "unk_token"), ("padding", "pad_token")):
        token_id = file.get(f"tokenizer.ggml.{key}_token_id", int)
        if token_id is not None and 0 <= token_id < len(tokens):
            config[name] = tokens[token_id]
    config["add_bos_token"] = file.get("tokenizer.ggml.add_bos_token", bool, kind == "llama" or pre in BEGINS_WITH_BOS)
    config["add_eos_token"] = file.get("tokenizer.ggml.add_eos_token", bool, False)
    config["model_max_length"] = max_length
    if template := _chat_template(file):
        config["chat_template"] = template
    return config


def _chat_template(file: GGUFFile) -> str | list[dict[str, str]] | None:
    """The chat template, or a list of {name, template} if the file has further ones with a name; None without one."""
    prefix = "tokenizer.chat_template."
    found = {"default": file.get("tokenizer.chat_template", str)}
    found |= {key.removeprefix(prefix): file.get(key, str) for key in file.metadata if key.startswith(prefix)}
    templates = {name: template for name, template in found.items() if template}
    if set(templates) <= {"default"}:
        return templates.get("default")
    return [{"name": name, "template": template} for name, template in templates.items()]
