"""Text for calibration and for the accuracy check, as windows of token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.engine.layerwise import split_windows
from stoker.quant.calibration.sample_text import default_text

SUFFIXES = (".txt", ".md", ".jsonl", ".json")
MAX_BYTES = 64 << 20  # of text that is read
_FIELDS = ("text", "content", "article")  # of a JSON row, in the order of preference
CHARS_PER_TOKEN = 8  # first guess
_MARGIN = 64  # tokens, so that the last word that is used is not cut
_CURE = "Name a .txt, .md, .json or .jsonl file, a folder of such files, or a hub dataset that has some."


def calibration_windows(engine: Path, data: str | None, size: int, length: int) -> list[Tensor]:
    """At most `size` windows of `length` tokens from `data` (see `read_text`), or from the text that Stoker contains.

    `engine` is the directory of the tokenizer. Raises ConfigError when there is no tokenizer or no text.
    """
    return tokenize_windows(engine, default_text() if data is None else read_text(data), size, length)


def tokenize_windows(engine: Path, text: str, size: int, length: int) -> list[Tensor]:
    """At most `size` windows of `length` tokens from `text`. Raises ConfigError when there is no tokenizer or not enough text."""
    file = engine / "tokenizer.json"
    if not file.is_file():
        raise ConfigError("calibration reads text, and there is no tokenizer.", cure="Name one with --tokenizer.")
    windows = split_windows(_encode_beginning(Tokenizer.from_file(str(file)), text, size * length), length, size)
    if not windows:
        raise ConfigError("the calibration text has less than two tokens.", cure=_CURE)
    return windows


def _encode_beginning(tokenizer: Tokenizer, text: str, count: int) -> list[int]:
    """At least the first `count` ids of a text. Only a part that is long enough is encoded, which takes a hundred bytes per token."""
    num_chars = count * CHARS_PER_TOKEN
    while True:
        ids = tokenizer.encode(text[:num_chars], add_special_tokens=False).ids
        if num_chars >= len(text) or len(ids) >= count + _MARGIN:
            return ids
        num_chars *= 2


def read_text(data: str) -> str:
    """The text of a file, of all files in a folder, or of a hub dataset. Raises ConfigError when there is none."""
    if not data:
        raise ConfigError("calibration_data='' is empty.", cure=_CURE)
    path = Path(data)
    path = path if path.exists() else _download_dataset(data)
    files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.suffix in SUFFIXES and f.is_file())
    documents, bytes_left = [], MAX_BYTES
    for file in files:
        if file.suffix not in SUFFIXES:
            raise ConfigError(f"{file} is not a text file.", cure=_CURE)
        with file.open("rb") as opened:
            raw = opened.read(bytes_left)
        bytes_left -= len(raw)
        is_complete = len(raw) == file.stat().st_size
        documents += list(_documents(file, raw.decode("utf-8", errors="replace"), is_complete=is_complete))
        if bytes_left <= 0:
            break
    if not any(documents):
        raise ConfigError(f"{data} holds no text.", cure=_CURE)
    return "\n\n".join(documents)


def _documents(file: Path, text: str, *, is_complete: bool) -> Iterator[str]:
    """The documents in the text of a file: the text itself, or the rows of JSON.

    Without `is_complete`, `text` is only the beginning of the file; ConfigError is then raised for .json.
    """
    if file.suffix not in (".json", ".jsonl"):
        yield text
        return
    if not is_complete and file.suffix == ".json":
        raise ConfigError(f"{file} is larger than the {MAX_BYTES} bytes of text that are read.", cure="Use a .jsonl or .txt file.")
    lines = text.splitlines() if is_complete else text.splitlines()[:-1]
    try:
        rows = json.loads(text) if file.suffix == ".json" else [json.loads(line) for line in lines if line.strip()]
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"{file} is not JSON ({problem}).", cure=_CURE) from None
    for row in rows if isinstance(rows, list) else [rows]:
        fields = row if isinstance(row, dict) else {"text": row}
        document = next((fields[key] for key in _FIELDS if isinstance(fields.get(key), str)), None)
        if document is None:
            raise ConfigError(f"{file}: a row has no {', '.join(_FIELDS[:-1])} or {_FIELDS[-1]}.", cure=_CURE)
        yield document


def _download_dataset(name: str) -> Path:
    """Download a dataset of the Hugging Face hub, and return its folder. Raises ConfigError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=[f"*{suffix}" for suffix in SUFFIXES]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as problem:
        raise ConfigError(
            f"{name} is not a local path, and the hub has no such dataset or cannot be reached ({type(problem).__name__}).", cure=_CURE
        ) from None
