"""generation_config.json of an engine: the checkpoint's own, with every end id in one list."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.checkpoint import Checkpoint


def write_generation(checkpoint: Checkpoint, out: Path) -> None:
    """Write generation_config.json: `eos_token_id` is a list, `bos_token_id` and `pad_token_id` are ids or absent."""
    data = generation(checkpoint, out)
    (out / "generation_config.json").write_text(json.dumps(data, indent=1) + "\n")


def generation(checkpoint: Checkpoint, tokenizer: Path) -> dict[str, Any]:
    """generation_config.json before config.json before the tokenizer's end token, as transformers reads them."""
    own, config = checkpoint.json("generation_config.json"), checkpoint.config
    rows = config.get("vocab_size")
    data = {name: value for name, value in own.items() if not name.startswith("_") and name != "transformers_version"}
    for name in ("bos_token_id", "pad_token_id"):
        found = _ids(checkpoint, "generation_config.json", name, data.pop(name, None))
        first = found[0] if found else config.get(name)
        if type(first) is int and 0 <= first < _rows(rows):  # some files say -1 for none
            data[name] = first
    ends = _ids(checkpoint, "generation_config.json", "eos_token_id", own.get("eos_token_id"))
    ends = ends or _ids(checkpoint, "config.json", "eos_token_id", config.get("eos_token_id")) or _token_id(tokenizer, "eos_token")
    for end in ends:
        if not 0 <= end < _rows(rows):
            raise CheckpointError(
                f"{checkpoint.name}: eos_token_id {end} is outside the vocabulary of {rows}.", cure="Correct generation_config.json."
            )
    return data | {"eos_token_id": ends}


def _rows(vocabulary: Any) -> int:
    return vocabulary if type(vocabulary) is int else 1 << 31


def _ids(checkpoint: Checkpoint, file: str, name: str, value: Any) -> list[int]:
    """Token ids: one, several, or none for null. Raises CheckpointError for anything else."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    if odd := [v for v in values if type(v) is not int]:
        raise CheckpointError(f"{checkpoint.name}: {file} has {name}={odd[0]!r}, which is no token id.", cure=f"Correct {file}.")
    return list(dict.fromkeys(values))


def _token_id(directory: Path, name: str) -> list[int]:
    config, file = directory / "tokenizer_config.json", directory / "tokenizer.json"
    if not (config.is_file() and file.is_file()):
        return []
    from tokenizers import Tokenizer

    token = json.loads(config.read_text(encoding="utf-8")).get(name)
    found = Tokenizer.from_file(str(file)).token_to_id(token) if isinstance(token, str) else None
    return [] if found is None else [found]
