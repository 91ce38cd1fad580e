"""Every input of the corpus is read or refused as documented. `make fuzz` also runs inputs that are derived from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from targets import CORPUS, TARGETS

from stoker.base.errors import EngineError
from stoker.frontend.tokenizer import Tokenizer

INPUTS = sorted(path for path in CORPUS.glob("*/*") if path.is_file())


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_corpus(path: Path) -> None:
    TARGETS[path.parent.name](path.read_bytes())


def test_every_target_has_a_corpus() -> None:
    assert {path.parent.name for path in INPUTS} == set(TARGETS)


def test_a_panic_of_the_decoder_is_an_error_of_the_engine(capfd: pytest.CaptureFixture[str]) -> None:
    """The Strip decoder of tokenizers 0.23 panics at an empty token, and the type of a panic is no Exception."""
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str((CORPUS / "tokenizer_json" / "strip_of_empty_token").read_text()))
    ids = tokenizer.encode("the quick brown fox 你好 \U0001f389")
    with pytest.raises(EngineError, match="the decoder of the engine's tokenizer fails: index out of bounds"):
        tokenizer.decode(ids)
    assert "panicked" in capfd.readouterr().err
