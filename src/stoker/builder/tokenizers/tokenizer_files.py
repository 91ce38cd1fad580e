"""Writes tokenizer.json and tokenizer_config.json of an engine, from any tokenizer that a checkpoint can have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from stoker.base.errors import CheckpointError, first_line
from stoker.builder.checkpoint.checkpoint import Checkpoint
from stoker.builder.checkpoint.json_file import read_json_object
from stoker.builder.tokenizers.gguf import convert_gguf_tokenizer
from stoker.builder.tokenizers.probe_texts import PROBE_TEXTS
from stoker.builder.tokenizers.published import convert_published_tokenizer
from stoker.builder.tokenizers.sentencepiece import convert_sentencepiece

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_VOCABULARY_FILES = ("tokenizer.model", "vocab.json", "merges.txt", "tiktoken.model", "spiece.model", "vocab.txt")


def write_tokenizer(checkpoint: Checkpoint, directory: str | None, out: Path, *, trust_remote_code: bool) -> None:
    """Write tokenizer.json and tokenizer_config.json to directory `out`.

    `directory` is the tokenizer's directory if it is not the checkpoint's. Raises CheckpointError for missing files, for a tokenizer that
    does not restore texts, and for one whose ids exceed the model's vocabulary.
    """
    if checkpoint.gguf is not None and directory is None:
        tokenizer, config = convert_gguf_tokenizer(checkpoint.gguf)
    else:
        source = Path(directory) if directory else checkpoint.path
        tokenizer, config = _read_directory(source, trust_remote_code)
    _check_round_trip(tokenizer, checkpoint.name)
    _check_vocabulary_size(tokenizer, checkpoint)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_round_trip(tokenizer: Tokenizer, name: str) -> None:
    """Raise CheckpointError if decoding does not restore the probe texts, although the vocabulary contains every byte."""
    if not _contains_every_byte(tokenizer):
        return
    for text in PROBE_TEXTS:
        decoded = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)
        if decoded != text:
            raise CheckpointError(f"{name}: the tokenizer turns {text!r} into {decoded!r}.", cure="Name another one with --tokenizer.")


def _contains_every_byte(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer can represent every byte, as byte-level BPE or by the tokens <0x00> to <0xFF>."""
    kinds = _decoder_types(json.loads(tokenizer.to_str()).get("decoder") or {})
    if "ByteLevel" in kinds:
        return all(tokenizer.token_to_id(symbol) is not None for symbol in pre_tokenizers.ByteLevel.alphabet())
    return "ByteFallback" in kinds and all(tokenizer.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))


def _decoder_types(decoder: dict[str, Any]) -> set[str]:
    """The types of a decoder and of all decoders that it consists of."""
    return {str(decoder.get("type"))}.union(*map(_decoder_types, decoder.get("decoders", [])))


def _check_vocabulary_size(tokenizer: Tokenizer, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError when the probe texts use ids beyond the model's embeddings. Unused ids may exceed them."""
    rows = checkpoint.setting("vocab_size")
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    used = max((max(tokenizer.encode(text).ids, default=0) for text in PROBE_TEXTS), default=0)
    if isinstance(rows, int) and used >= rows:
        message = f"{checkpoint.name}: the tokenizer has ids up to {highest}, and the model {rows} embeddings"
        raise CheckpointError(f"{message}.", cure="Name the model's own tokenizer with --tokenizer.")


def _read_directory(path: Path, trust_remote_code: bool) -> tuple[Tokenizer, dict[str, Any]]:
    """(tokenizer, content of tokenizer_config.json) of a directory, with special tokens as strings and the chat template."""
    config = read_json_object(path / "tokenizer_config.json") if (path / "tokenizer_config.json").is_file() else {}
    file = path / "tokenizer.json"
    tokenizer, defaults = (_load_tokenizer(file), {}) if file.is_file() else _convert(path, config, trust_remote_code)
    if (path / "special_tokens_map.json").is_file():
        config = read_json_object(path / "special_tokens_map.json") | config
    for name in _SPECIAL_TOKENS:
        if isinstance(config.get(name), dict):
            config[name] = config[name].get("content")
    config = defaults | {key: value for key, value in config.items() if value is not None}
    template = _chat_template(path, config)
    return tokenizer, config | ({"chat_template": template} if template else {})


def _load_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer in a tokenizer.json. Raises CheckpointError for a damaged file."""
    try:
        return Tokenizer.from_file(str(file))
    except Exception as problem:  # the library raises bare Exception for every defect
        raise CheckpointError(f"{file} is not a tokenizer ({problem}).", cure="Download it again.") from None


def _convert(path: Path, config: dict[str, Any], trust_remote_code: bool) -> tuple[Tokenizer, dict[str, Any]]:
    """(tokenizer, default tokenizer_config) of a directory without tokenizer.json.

    Publishers' own classes and sentencepiece models are converted here. tiktoken files, and vocabularies with merges, are converted by
    transformers.
    """
    if published := convert_published_tokenizer(path, config):
        return published
    if not any((path / name).is_file() for name in _VOCABULARY_FILES) and "auto_map" not in config:
        files = ", ".join(_VOCABULARY_FILES)
        raise CheckpointError(f"{path} has no tokenizer: neither tokenizer.json nor {files}.", cure="Name one with --tokenizer.")
    model = path / "tokenizer.model"
    if model.is_file() and (converted := convert_sentencepiece(model, config)) is not None:
        return converted, {}
    if "auto_map" in config and not trust_remote_code:
        raise CheckpointError(
            f"{path}: the tokenizer {config.get('tokenizer_class')} is Python code in the checkpoint.",
            cure="Add tokenizer.json, name another one with --tokenizer, or allow the code to run: --trust-remote-code.",
        )
    return _convert_with_transformers(path, trust_remote_code), {}


def _convert_with_transformers(path: Path, trust_remote_code: bool) -> Tokenizer:
    """The tokenizer as transformers converts it. Raises CheckpointError if it cannot."""
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(path), use_fast=True, trust_remote_code=trust_remote_code, local_files_only=True)
        return loaded.backend_tokenizer
    except AttributeError:
        reason = "it is a Python tokenizer without a fast equivalent"
    except Exception as problem:
        reason = first_line(problem)
    raise CheckpointError(
        f"{path}: the tokenizer cannot be converted to tokenizer.json ({reason}).", cure="Add tokenizer.json, or name one with --tokenizer."
    )


def _chat_template(path: Path, config: dict[str, Any]) -> str | list[dict[str, str]] | None:
    """The chat template: chat_template.jinja before chat_template.json before tokenizer_config.json; None if there is none.

    Several named templates are a list of {name, template}.
    """
    files = {"default": path / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    templates = {name: _read_text(file) for name, file in files.items() if file.is_file()}
    if templates:
        is_single = set(templates) == {"default"}
        return templates["default"] if is_single else [{"name": name, "template": text} for name, text in templates.items()]
    if (path / "chat_template.json").is_file():
        return read_json_object(path / "chat_template.json").get("chat_template")
    template = config.get("chat_template")
    if isinstance(template, dict):
        return [{"name": name, "template": text} for name, text in template.items()]
    return template


def _read_text(file: Path) -> str:
    """The text of a UTF-8 file. Raises CheckpointError for another encoding."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise CheckpointError(f"{file} is not UTF-8 ({problem}).", cure="Download it again.") from None
