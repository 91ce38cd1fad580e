from __future__ import annotations

import sys
from pathlib import Path

import pytest

for folder in ("parity", "parallel"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with some tokenizer: a build wants one, and these tests look at token ids only."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("tokenizer")
    core = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text("{}")
    return path
