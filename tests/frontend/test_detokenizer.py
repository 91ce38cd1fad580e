"""The joined text equals the decode of the whole sequence, for all ids, groupings and tokenizers."""

from __future__ import annotations

import functools
import random

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import CORPUS, REAL, SMALL, real, small

from stoker.frontend.detokenizer import (
    MAX_BYTE_RUN,
    ByteFallbackDetokenizer,
    ByteLevelDetokenizer,
    DetokenizerFactory,
    WindowDetokenizer,
)

TEXTS = [
    *CORPUS[:4],
    "",
    " ",
    "  two  spaces ",
    " leading",
    "नमस्ते दुनिया",
    "👨‍👩‍👧‍👦🏳️‍🌈🇯🇵",
    "a\u0301e\u0301 한국어 \u1112\u1161\u11ab",
    "x\n\n\ny\t\tz",
]
quick = settings(max_examples=150, deadline=None)


def stream(factory: DetokenizerFactory, ids: list[int], skip: bool, sizes: list[int]) -> str:
    """The text, pushed in groups whose sizes repeat `sizes`."""
    detokenizer, text, start, count = factory.make(skip), "", 0, 0
    while start < len(ids):
        size = sizes[count % len(sizes)]
        text += detokenizer.push(ids[start : start + size])
        start, count = start + size, count + 1
    return text + detokenizer.flush()


@functools.cache
def id_kinds(core: tokenizers.Tokenizer) -> tuple[list[int], list[int], int]:
    """Byte tokens, special tokens and the highest id."""
    hexes = [core.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    single = [token for token in hexes if token is not None] or list(range(4, 260))
    return single, list(core.get_added_tokens_decoder()) or [0], max(core.get_vocab().values())


def random_ids(core: tokenizers.Tokenizer, seed: int) -> list[int]:
    """Random ids: ordinary, byte, special and unknown ones in random proportions."""
    rng = random.Random(seed)
    single, special, top = id_kinds(core)
    kinds = (lambda: rng.randint(0, top), lambda: rng.choice(single), lambda: rng.choice(special), lambda: top + rng.randint(1, 9))
    weights = rng.choice([(1, 0, 0, 0), (0, 1, 0, 0), (4, 4, 1, 1)])
    return [rng.choices(kinds, weights)[0]() for _ in range(rng.randint(0, 50))]


@pytest.mark.parametrize("kind", SMALL)
@quick
@given(seed=st.integers(0, 2**32), skip=st.booleans(), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_any_ids(kind: str, seed: int, skip: bool, sizes: list[int]) -> None:
    core = small(kind)
    ids = random_ids(core, seed)
    assert stream(DetokenizerFactory(core), ids, skip, sizes) == core.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", SMALL)
@quick
@given(text=st.text(max_size=60), size=st.integers(1, 4))
def test_any_text(kind: str, text: str, size: int) -> None:
    core = small(kind)
    ids = core.encode(text).ids
    assert stream(DetokenizerFactory(core), ids, True, [size]) == core.decode(ids)


@pytest.mark.parametrize("name", REAL)
def test_real_tokenizers(name: str) -> None:
    core = real(name)
    factory = DetokenizerFactory(core)
    for text in TEXTS:
        ids = core.encode(text).ids
        for size in (1, 3):
            assert stream(factory, ids, True, [size]) == core.decode(ids)
    for seed in range(400):
        ids, skip = random_ids(core, seed), seed % 2 == 0
        assert stream(factory, ids, skip, [seed % 4 + 1, 1]) == core.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", REAL)
def test_window_agrees_on_real_tokenizers(name: str) -> None:
    """WindowDetokenizer, which is used for unknown families, is also correct for known ones."""
    core = real(name)
    for seed in range(100):
        ids = random_ids(core, seed)
        detokenizer = WindowDetokenizer(core, frozenset())
        assert "".join(detokenizer.push([token]) for token in ids) + detokenizer.flush() == core.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_incomplete_characters_are_held_back(kind: str) -> None:
    core = small(kind)
    detokenizer = DetokenizerFactory(core).make()
    ids = core.encode("你好 🎉 ok", add_special_tokens=False).ids
    pieces = [detokenizer.push([token]) for token in ids]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + detokenizer.flush() == "你好 🎉 ok"


def test_incomplete_end_becomes_replacement() -> None:
    core = small("byte_level")
    detokenizer = DetokenizerFactory(core).make()
    token = core.token_to_id("Ã")  # byte C3
    assert detokenizer.push([token]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_spaces_after_a_skipped_special_token_stay() -> None:
    """A window that begins with a skipped token must not treat the next word as the first of the text."""
    core = small("metaspace")
    factory = DetokenizerFactory(core)
    ids = core.encode("the fox").ids
    mixed = [ids[0], 1, 1, *ids[1:]]
    assert stream(factory, mixed, True, [1]) == core.decode(mixed)


def test_long_valid_run_is_exact_and_streams() -> None:
    core = small("byte_fallback")
    detokenizer = DetokenizerFactory(core).make()
    ids = [core.token_to_id(f"<0x{byte:02X}>") for byte in ("你好" * 40).encode()]
    pieces = [detokenizer.push([token]) for token in ids]
    assert sum(map(len, pieces)) >= 80 - MAX_BYTE_RUN // 3
    assert "".join(pieces) + detokenizer.flush() == core.decode(ids) == "你好" * 40


def test_long_ill_formed_run_is_bounded() -> None:
    core = small("byte_fallback")
    detokenizer = DetokenizerFactory(core).make()
    ids = [core.token_to_id("<0xC3>")] * 1000
    assert "".join(detokenizer.push([token]) for token in ids) + detokenizer.flush() == "\ufffd" * 1000


def test_the_fast_detokenizers_are_selected() -> None:
    assert isinstance(DetokenizerFactory(small("byte_level")).make(), ByteLevelDetokenizer)
    assert isinstance(DetokenizerFactory(small("byte_fallback")).make(), ByteFallbackDetokenizer)
    assert isinstance(DetokenizerFactory(small("metaspace")).make(), WindowDetokenizer)
