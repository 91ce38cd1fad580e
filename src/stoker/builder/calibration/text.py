"""Text for calibration and for the accuracy check, as windows of token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.engine.layerwise import windows
from stoker.quant.calibration import default_text

SUFFIXES = (".txt", ".md", ".jsonl", ".json")
MAX_BYTES = 64 << 20  # of text that is read
CHARS_PER_TOKEN = 8  # to begin with
MARGIN = 64  # tokens, so that no word is wanted which the end of the piece cuts
_CURE = "Name a .txt, .md, .json or .jsonl file, a folder of such files, or a hub dataset that has some."


def calibration_windows(engine: Path, data: str | None, size: int, length: int) -> list[Tensor]:
    """`size` windows of `length` tokens at most, by the tokenizer in directory `engine`, from `data` or the text that Stoker ships.

    Raises ConfigError when there is no tokenizer, or no text.
    """
    return token_windows(engine, default_text() if data is None else read_text(data), size, length)


def token_windows(engine: Path, text: str, size: int, length: int) -> list[Tensor]:
    file = engine / "tokenizer.json"
    if not file.is_file():
        raise ConfigError("calibration reads text, and there is no tokenizer.", cure="Name one with --tokenizer.")
    found = windows(_tokens(Tokenizer.from_file(str(file)), text, size * length), length, size)
    if not found:
        raise ConfigError("the calibration text has less than two tokens.", cure=_CURE)
    return found


def _tokens(tokenizer: Tokenizer, text: str, count: int) -> list[int]:
    """The first `count` ids or more. Of a long text only what they need is encoded: a token takes a hundred bytes meanwhile."""
    taken = count * CHARS_PER_TOKEN
    while True:
        ids = tokenizer.encode(text[:taken], add_special_tokens=False).ids
        if taken >= len(text) or len(ids) >= count + MARGIN:
            return ids
        taken *= 2


def read_text(data: str) -> str:
    """The text of a file, a folder's files in the order of their names, or a hub dataset's."""
    if not data:
        raise ConfigError("calibration_data='' names nothing.", cure=_CURE)
    path = Path(data)
    path = path if path.exists() else _dataset(data)
    files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.suffix in SUFFIXES and f.is_file())
    pieces, left = [], MAX_BYTES
    for file in files:
        if file.suffix not in SUFFIXES:
            raise ConfigError(f"{file} is no text.", cure=_CURE)
        with file.open("rb") as opened:
            raw = opened.read(left)
        left -= len(raw)
        pieces += list(_documents(file, raw.decode("utf-8", errors="replace"), whole=len(raw) == file.stat().st_size))
        if left <= 0:
            break
    if not any(pieces):
        raise ConfigError(f"{data} holds no text.", cure=_CURE)
    return "\n\n".join(pieces)


def _documents(file: Path, text: str, *, whole: bool) -> Iterator[str]:
    """The texts of one file; of its beginning unless `whole`."""
    if file.suffix not in (".json", ".jsonl"):
        yield text
        return
    if not whole and file.suffix == ".json":
        raise ConfigError(f"{file} is larger than the {MAX_BYTES} bytes of text that are read.", cure="Use a .jsonl or .txt file.")
    lines = text.splitlines() if whole else text.splitlines()[:-1]
    try:
        rows = json.loads(text) if file.suffix == ".json" else [json.loads(line) for line in lines if line.strip()]
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"{file} is not JSON ({problem}).", cure=_CURE) from None
    for row in rows if isinstance(rows, list) else [rows]:
        fields = row if isinstance(row, dict) else {"text": row}
        found = next((fields[k] for k in ("text", "content", "article") if isinstance(fields.get(k), str)), None)
        if found is None:
            raise ConfigError(f"{file}: a row has no text, content or article.", cure=_CURE)
        yield found


def _dataset(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=[f"*{suffix}" for suffix in SUFFIXES]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as problem:
        raise ConfigError(
            f"{name} is not a local path, and no dataset of the hub can be had ({type(problem).__name__}).", cure=_CURE
        ) from None
