"""The vocabulary for xgrammar: the text of each token as it is detokenized, and no text for special tokens."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "frontend"))

import xgrammar
from small_tokenizers import small

from stoker.base.errors import ConfigError
from stoker.base.types import Guide
from stoker.runtime.sampling.grammar_source import compile_guide, load_vocabulary

TEXTS = ["the quick brown fox", 'a "quoted"\n\\ line', "é and 日本 🙂"]


def vocabulary_of(kind: str, folder: Path) -> tuple[Any, Any, int]:
    core = small(kind)
    core.save(str(folder / "tokenizer.json"))
    width = core.get_vocab_size(with_added_tokens=True) + 37  # engines pad their vocabulary
    return core, load_vocabulary(folder, width), width


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("text", TEXTS)
def test_the_tokens_of_a_text_match_its_grammar(kind: str, text: str, tmp_path: Path) -> None:
    core, vocabulary, _ = vocabulary_of(kind, tmp_path)
    literal = "".join(f"\\U{ord(char):08x}" for char in text)
    matcher = xgrammar.GrammarMatcher(compile_guide(vocabulary, Guide("grammar", f'root ::= " "? "{literal}"')), override_stop_tokens=[2])
    assert all(matcher.accept_token(token) for token in core.encode(text, add_special_tokens=False).ids)
    assert matcher.is_completed()


def test_special_tokens_and_padding_are_never_allowed(tmp_path: Path) -> None:
    core, vocabulary, width = vocabulary_of("byte_level", tmp_path)
    matcher = xgrammar.GrammarMatcher(compile_guide(vocabulary, Guide("regex", "(.|\\n)*")), override_stop_tokens=[2])
    mask = xgrammar.allocate_token_bitmask(1, width)
    matcher.fill_next_token_bitmask(mask, 0)
    special = {token for token, added in core.get_added_tokens_decoder().items() if added.special} - {2}
    banned = [token for token in range(width) if not int(mask[0, token // 32]) >> token % 32 & 1]
    assert special and special <= set(banned)
    assert set(range(core.get_vocab_size(with_added_tokens=True), width)) <= set(banned)


def test_a_tokenizer_that_inserts_spaces_is_rejected_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="WordPiece"):
        vocabulary_of("wordpiece", tmp_path)
