"""Any tokenizer becomes tokenizer.json, checked by a round trip; its chat template and special tokens go along."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.checkpoint import Checkpoint
from stoker.builder.checkpoint.json_file import read_json
from stoker.builder.checkpoint.weights import reason
from stoker.builder.gguf.tokenizer import gguf_tokenizer
from stoker.builder.tokenizers.probe_texts import PROBES
from stoker.builder.tokenizers.published import published_tokenizer
from stoker.builder.tokenizers.sentencepiece import from_sentencepiece

SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def write_tokenizer(checkpoint: Checkpoint, directory: str | None, out: Path, *, trust_remote_code: bool) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    `directory`: where the tokenizer is when not in the checkpoint. Raises CheckpointError naming the files that are missing.
    """
    if checkpoint.gguf is not None and directory is None:
        tokenizer, config = gguf_tokenizer(checkpoint.gguf)
    else:
        source = Path(directory) if directory else checkpoint.path
        tokenizer, config = _from_directory(source, trust_remote_code)
    check_round_trip(tokenizer, checkpoint.name)
    _check_vocabulary(tokenizer, checkpoint)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def check_round_trip(tokenizer: Tokenizer, name: str) -> None:
    """Raise CheckpointError when a vocabulary that has every byte does not give text back as it was."""
    if not _has_every_byte(tokenizer):
        return
    for text in PROBES:
        back = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)
        if back != text:
            raise CheckpointError(f"{name}: the tokenizer turns {text!r} into {back!r}.", cure="Name another one with --tokenizer.")


def _has_every_byte(tokenizer: Tokenizer) -> bool:
    """Byte-level BPE with its whole alphabet, or <0x00> to <0xFF> behind a decoder that joins them."""
    kinds = _decoders(json.loads(tokenizer.to_str()).get("decoder") or {})
    if "ByteLevel" in kinds:
        return all(tokenizer.token_to_id(symbol) is not None for symbol in pre_tokenizers.ByteLevel.alphabet())
    return "ByteFallback" in kinds and all(tokenizer.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))


def _decoders(decoder: dict[str, Any]) -> set[str]:
    """The kinds of decoder that a decoder is made of."""
    return {str(decoder.get("type"))}.union(*map(_decoders, decoder.get("decoders", [])))


def _check_vocabulary(tokenizer: Tokenizer, checkpoint: Checkpoint) -> None:
    rows = checkpoint.config.get("vocab_size")
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    used = max((max(tokenizer.encode(text).ids, default=0) for text in PROBES), default=0)
    if isinstance(rows, int) and used >= rows:
        message = f"{checkpoint.name}: the tokenizer has ids up to {highest}, and the model {rows} embeddings"
        raise CheckpointError(f"{message}.", cure="Name the model's own tokenizer with --tokenizer.")


def _from_directory(path: Path, trust_remote_code: bool) -> tuple[Tokenizer, dict[str, Any]]:
    config = read_json(path / "tokenizer_config.json") if (path / "tokenizer_config.json").is_file() else {}
    file = path / "tokenizer.json"
    tokenizer, defaults = (_load(file), {}) if file.is_file() else _convert(path, config, trust_remote_code)
    if (path / "special_tokens_map.json").is_file():
        config = read_json(path / "special_tokens_map.json") | config
    for name in SPECIAL:
        if isinstance(config.get(name), dict):
            config[name] = config[name].get("content")
    config = defaults | {key: value for key, value in config.items() if value is not None}
    template = _chat_template(path, config)
    return tokenizer, config | ({"chat_template": template} if template else {})


def _load(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(file))
    except Exception as problem:  # the library raises bare Exception for every defect
        raise CheckpointError(f"{file} is not a tokenizer ({problem}).", cure="Download it again.") from None


def _convert(path: Path, config: dict[str, Any], trust_remote_code: bool) -> tuple[Tokenizer, dict[str, Any]]:
    """(tokenizer, what its configuration says by default): publishers' own classes and sentencepiece here, others by transformers."""
    made = published_tokenizer(path, config)
    return made or (_converted(path, config, trust_remote_code), {})


def _converted(path: Path, config: dict[str, Any], trust_remote_code: bool) -> Tokenizer:
    """Sentencepiece here; tiktoken, and vocabulary with merges, through transformers' converters."""
    kinds = ("tokenizer.model", "vocab.json", "merges.txt", "tiktoken.model", "spiece.model", "vocab.txt")
    if not any((path / name).is_file() for name in kinds) and "auto_map" not in config:
        raise CheckpointError(f"{path} has no tokenizer: neither tokenizer.json nor {', '.join(kinds)}.", cure="Name one with --tokenizer.")
    model = path / "tokenizer.model"
    if model.is_file() and (found := from_sentencepiece(model, config)) is not None:
        return found
    if "auto_map" in config and not trust_remote_code:
        what = f"{path}: the tokenizer {config.get('tokenizer_class')} is code of the checkpoint's own"
        raise CheckpointError(f"{what}.", cure="Add tokenizer.json, name another with --tokenizer, or let it run: --trust-remote-code.")
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(path), use_fast=True, trust_remote_code=trust_remote_code, local_files_only=True)
        return loaded.backend_tokenizer
    except AttributeError:
        why = "it is a Python tokenizer without a fast twin"
    except Exception as problem:
        why = reason(problem)
    raise CheckpointError(
        f"{path}: the tokenizer cannot become tokenizer.json ({why}).", cure="Add tokenizer.json, or name one with --tokenizer."
    )


def _chat_template(path: Path, config: dict[str, Any]) -> str | list[dict[str, str]] | None:
    """chat_template.jinja before chat_template.json before tokenizer_config.json; several named ones stay a list of {name, template}."""
    files = {"default": path / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    found = {name: _text(file) for name, file in files.items() if file.is_file()}
    if found:
        return found["default"] if set(found) == {"default"} else [{"name": name, "template": text} for name, text in found.items()]
    if (path / "chat_template.json").is_file():
        return read_json(path / "chat_template.json").get("chat_template")
    template = config.get("chat_template")
    if isinstance(template, dict):
        return [{"name": name, "template": text} for name, text in template.items()]
    return template


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise CheckpointError(f"{file} is not UTF-8 ({problem}).", cure="Download it again.") from None
