"""The tokenizer of a GGUF file, rebuilt as tokenizer.json and tokenizer_config.json.

Sources: llama.cpp's src/llama-vocab.cpp (pre-tokenizer names and their expressions), and the Hugging Face converters for the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from stoker.base.errors import CheckpointError
from stoker.builder.gguf.weights import GGUFWeights
from stoker.builder.tokenizers.sentencepiece import add_tokens, begin, bpe, spaces

_CURE = "Download the file again, or name a tokenizer with --tokenizer."
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _gpt2() -> list[Any]:
    return [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]


def _smollm() -> list[Any]:
    return [pre_tokenizers.Digits(individual_digits=True), *_gpt2()]


def _expression(pattern: str) -> Callable[[], list[Any]]:
    split = [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    return lambda: split


# tokenizer.ggml.pre → the pre-tokenizers before byte-level BPE.
PRE_TOKENIZERS: dict[str, Callable[[], list[Any]]] = {
    "gpt-2": _gpt2,
    "default": _gpt2,
    "smollm": _smollm,
    "llama-bpe": _expression(_LLAMA3),
    "llama3": _expression(_LLAMA3),
    "qwen2": _expression(_QWEN2),
}


def gguf_tokenizer(file: GGUFWeights) -> tuple[Tokenizer, dict[str, Any]]:
    """(tokenizer, tokenizer_config). Raises CheckpointError for a kind that is not known, and for a vocabulary that is not whole."""
    tokens = file.get("tokenizer.ggml.tokens", [str])
    kind = file.get("tokenizer.ggml.model", str)
    if not tokens or kind not in _KINDS:
        what = f"a tokenizer of kind {kind!r}" if tokens else "no tokenizer"
        raise CheckpointError(f"{file.files[0]} has {what}.", cure=f"Known kinds: {', '.join(_KINDS)}; or name one with --tokenizer.")
    tokenizer = _KINDS[kind](file, tokens)
    add_tokens(tokenizer, list(zip(tokens, file.get("tokenizer.ggml.token_type", [int], []), strict=False)))
    if tokenizer.get_vocab_size() != len(tokens):
        raise CheckpointError(f"{file.files[0]}: {len(tokens)} tokens make {tokenizer.get_vocab_size()}.", cure="Download the file again.")
    config = _config(file, tokens)
    if config["add_bos_token"] and "bos_token" in config:
        begin(tokenizer, config["bos_token"], file.get("tokenizer.ggml.bos_token_id", int))
    return tokenizer, config


def _byte_level(file: GGUFWeights, tokens: list[str]) -> Tokenizer:
    pre = file.get("tokenizer.ggml.pre", str, "default")
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise CheckpointError(
            f"{file.files[0]}: pre-tokenizer {pre!r} is not known.", cure=f"Known: {known}; or name a tokenizer with --tokenizer."
        )
    merges = [tuple(line.split(" ", 1)) for line in file.get("tokenizer.ggml.merges", [str], [])]
    vocab = {token: i for i, token in enumerate(tokens)}
    whole = pre in ("llama-bpe", "llama3")  # a pre-token that is in the vocabulary is one token, merges or not
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=whole))
    except Exception as problem:  # the library raises bare Exception for every defect
        raise CheckpointError(f"{file.files[0]}: tokens and merges make no tokenizer ({problem}).", cure=_CURE) from None
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[pre]())
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GGUFWeights, tokens: list[str]) -> Tokenizer:
    unknown, scores = file.get("tokenizer.ggml.unknown_token_id", int, 0), file.get("tokenizer.ggml.scores", [float], [0.0] * len(tokens))
    if not 0 <= unknown < len(tokens) or len(scores) != len(tokens):
        what = f"unknown_token_id={unknown} and {len(scores)} scores"
        raise CheckpointError(f"{file.files[0]}: {what} do not fit {len(tokens)} tokens.", cure=_CURE)
    tokenizer = Tokenizer(bpe(tokens, scores, tokens[unknown]))
    spaces(tokenizer, prefix=file.get("tokenizer.ggml.add_space_prefix", bool, True))
    return tokenizer


_KINDS: dict[str, Callable[[GGUFWeights, list[str]], Tokenizer]] = {"gpt2": _byte_level, "llama": _sentencepiece}


def _config(file: GGUFWeights, tokens: list[str]) -> dict[str, Any]:
    kind, pre = file.get("tokenizer.ggml.model", str), file.get("tokenizer.ggml.pre", str)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for key, name in (("bos", "bos_token"), ("eos", "eos_token"), ("unknown", "unk_token"), ("padding", "pad_token")):
        token_id = file.get(f"tokenizer.ggml.{key}_token_id", int)
        if token_id is not None and 0 <= token_id < len(tokens):
            config[name] = tokens[token_id]
    config["add_bos_token"] = file.get("tokenizer.ggml.add_bos_token", bool, kind == "llama" or pre in ("llama-bpe", "llama3"))
    config["add_eos_token"] = file.get("tokenizer.ggml.add_eos_token", bool, False)
    config["model_max_length"] = file.config.get("max_position_embeddings")
    if template := file.get("tokenizer.chat_template", str):
        config["chat_template"] = template
    return config
