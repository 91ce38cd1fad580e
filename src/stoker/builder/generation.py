"""generation_config.json of an engine: the checkpoint's own, with every end id in one list."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint import Checkpoint


def write_generation(checkpoint: Checkpoint, out: Path) -> None:
    """Write generation_config.json: `eos_token_id` is a list, `bos_token_id` and `pad_token_id` are ids or absent."""
    data = generation(checkpoint, out)
    (out / "generation_config.json").write_text(json.dumps(data, indent=1) + "\n")


def generation(checkpoint: Checkpoint, tokenizer: Path) -> dict[str, Any]:
    """generation_config.json before config.json before the tokenizer's end token, as transformers reads them."""
    own, config = checkpoint.json("generation_config.json"), checkpoint.config
    data = {name: value for name, value in own.items() if not name.startswith("_") and name != "transformers_version"}
    for name in ("bos_token_id", "pad_token_id"):
        if data.get(name) is None and isinstance(config.get(name), int):
            data[name] = config[name]
    ends = _ids(own.get("eos_token_id")) or _ids(config.get("eos_token_id")) or _token_id(tokenizer, "eos_token")
    rows = config.get("vocab_size")
    for end in ends:
        if isinstance(rows, int) and not 0 <= end < rows:
            raise CheckpointError(
                f"{checkpoint.name}: eos_token_id {end} is outside the vocabulary of {rows}.", cure="Correct generation_config.json."
            )
    return data | {"eos_token_id": ends}


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return list(dict.fromkeys(v for v in values if type(v) is int))


def _token_id(directory: Path, name: str) -> list[int]:
    config, file = directory / "tokenizer_config.json", directory / "tokenizer.json"
    if not (config.is_file() and file.is_file()):
        return []
    from tokenizers import Tokenizer

    token = json.loads(config.read_text(encoding="utf-8")).get(name)
    found = Tokenizer.from_file(str(file)).token_to_id(token) if isinstance(token, str) else None
    return [] if found is None else [found]
