"""Converts the tokenizer in a GGUF file to tokenizer.json and tokenizer_config.json.

Sources: llama.cpp's src/llama-vocab.cpp for the names of pre-tokenizers and their expressions, and Hugging Face's converters for the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.gguf.file import GGUFFile
from stoker.builder.checkpoint.gguf.weights import GGUFWeights
from stoker.builder.tokenizers.sentencepiece import add_special_pieces, make_bpe, prepend_bos, use_space_symbol
from stoker.builder.tokenizers.split_patterns import ONE_DIGIT, THREE_DIGITS

_CURE = "Download the file again, or name a tokenizer with --tokenizer."


def _gpt2_steps() -> list[Any]:
    """The pre-tokenizers of GPT-2."""
    return [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]


def _smollm_steps() -> list[Any]:
    """The pre-tokenizers of SmolLM: single digits, then those of GPT-2."""
    return [pre_tokenizers.Digits(individual_digits=True), *_gpt2_steps()]


def _split_by(pattern: str) -> Callable[[], list[Any]]:
    """A function that creates pre-tokenizers which split by a regular expression, then map bytes to characters."""
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    return lambda: steps


# tokenizer.ggml.pre → the pre-tokenizers of byte-level BPE.
PRE_TOKENIZERS: dict[str, Callable[[], list[Any]]] = {
    "gpt-2": _gpt2_steps,
    "default": _gpt2_steps,
    "smollm": _smollm_steps,
    "llama-bpe": _split_by(THREE_DIGITS),
    "llama3": _split_by(THREE_DIGITS),
    "qwen2": _split_by(ONE_DIGIT),
}


def convert_gguf_tokenizer(weights: GGUFWeights) -> tuple[Tokenizer, dict[str, Any]]:
    """(tokenizer, content of tokenizer_config.json) of a GGUF file. Raises CheckpointError for an unknown kind or a damaged vocabulary."""
    file = weights.file
    tokens = file.get("tokenizer.ggml.tokens", [str])
    kind = file.get("tokenizer.ggml.model", str)
    if not tokens or kind not in _CONVERTERS:
        found = f"a tokenizer of kind {kind!r}" if tokens else "no tokenizer"
        raise CheckpointError(f"{file.path} has {found}.", cure=f"Known kinds: {', '.join(_CONVERTERS)}; or name one with --tokenizer.")
    tokenizer = _CONVERTERS[kind](file, tokens)
    add_special_pieces(tokenizer, list(zip(tokens, file.get("tokenizer.ggml.token_type", [int], []), strict=False)))
    if tokenizer.get_vocab_size() != len(tokens):
        raise CheckpointError(
            f"{file.path}: the vocabulary lists {len(tokens)} tokens, of which {tokenizer.get_vocab_size()} are different.",
            cure="Download the file again.",
        )
    config = _tokenizer_config(file, tokens, weights.config.get("max_position_embeddings"))
    if config["add_bos_token"] and "bos_token" in config:
        prepend_bos(tokenizer, config["bos_token"], file.get("tokenizer.ggml.bos_token_id", int))
    return tokenizer, config


def _convert_byte_level(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer from tokens and merges. Raises CheckpointError for an unknown pre-tokenizer."""
    pre = file.get("tokenizer.ggml.pre", str, "default")
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise CheckpointError(
            f"{file.path}: pre-tokenizer {pre!r} is not known.", cure=f"Known: {known}; or name a tokenizer with --tokenizer."
        )
    merges = [tuple(line.split(" ", 1)) for line in file.get("tokenizer.ggml.merges", [str], [])]
    vocab = {token: i for i, token in enumerate(tokens)}
    ignore_merges = pre in ("llama-bpe", "llama3")  # a word that is in the vocabulary is one token, even if no merges produce it
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    except Exception as problem:  # the library raises bare Exception for every defect
        raise CheckpointError(f"{file.path}: tokens and merges do not form a tokenizer ({problem}).", cure=_CURE) from None
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[pre]())
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
    config["add_bos_token"] = file.get("tokenizer.ggml.add_bos_token", bool, kind == "llama" or pre in ("llama-bpe", "llama3"))
    config["add_eos_token"] = file.get("tokenizer.ggml.add_eos_token", bool, False)
    config["model_max_length"] = max_length
    if template := file.get("tokenizer.chat_template", str):
        config["chat_template"] = template
    return config
