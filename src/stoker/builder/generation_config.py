"""Writes generation_config.json of an engine: the checkpoint's settings, with all end tokens in one list."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.checkpoint import Checkpoint

_FILE = "generation_config.json"
_MAX_ID = 1 << 31  # where config.json has no vocab_size


def write_generation_config(checkpoint: Checkpoint, out: Path) -> None:
    """Write generation_config.json to directory `out`, which already contains the tokenizer.

    `eos_token_id` is a list; `bos_token_id` and `pad_token_id` are ids, or absent. Raises CheckpointError for an id that is not a token.
    """
    (out / _FILE).write_text(json.dumps(_generation_config(checkpoint, out), indent=1) + "\n")


def _generation_config(checkpoint: Checkpoint, tokenizer: Path) -> dict[str, Any]:
    """The content of generation_config.json.

    Ids come from the checkpoint's generation_config.json, else from config.json, else from the tokenizer's end token, as in transformers.
    """
    given, vocab_size = checkpoint.read_json(_FILE), checkpoint.setting("vocab_size")
    vocab_size = vocab_size if type(vocab_size) is int else _MAX_ID
    data = {name: value for name, value in given.items() if not name.startswith("_") and name != "transformers_version"}
    for name in ("bos_token_id", "pad_token_id"):
        ids = _token_ids(checkpoint, _FILE, name, data.pop(name, None))
        first = ids[0] if ids else checkpoint.setting(name)
        if type(first) is int and 0 <= first < vocab_size:  # some files have -1 for none
            data[name] = first
    end_ids = (
        _token_ids(checkpoint, _FILE, "eos_token_id", given.get("eos_token_id"))
        or _token_ids(checkpoint, "config.json", "eos_token_id", checkpoint.setting("eos_token_id"))
        or _id_of_special_token(tokenizer, "eos_token")
    )
    for end_id in end_ids:
        if not 0 <= end_id < vocab_size:
            raise CheckpointError(
                f"{checkpoint.name}: eos_token_id {end_id} is outside the vocabulary of {vocab_size}.",
                cure="Correct generation_config.json.",
            )
    return data | {"eos_token_id": end_ids}


def _token_ids(checkpoint: Checkpoint, file: str, name: str, value: Any) -> list[int]:
    """A list of token ids from an id, a list or null. Raises CheckpointError for anything else."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    if wrong := [v for v in values if type(v) is not int]:
        raise CheckpointError(f"{checkpoint.name}: {file} has {name}={wrong[0]!r}, which is not a token id.", cure=f"Correct {file}.")
    return list(dict.fromkeys(values))


def _id_of_special_token(directory: Path, name: str) -> list[int]:
    """A list with the id of the special token called `name` in tokenizer_config.json; empty when there is none."""
    config, file = directory / "tokenizer_config.json", directory / "tokenizer.json"
    if not (config.is_file() and file.is_file()):
        return []
    from tokenizers import Tokenizer

    token = json.loads(config.read_text(encoding="utf-8")).get(name)
    token_id = Tokenizer.from_file(str(file)).token_to_id(token) if isinstance(token, str) else None
    return [] if token_id is None else [token_id]
