"""The stop checker gives the result that is computed from the whole text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.frontend.stop_strings import StopChecker

ALPHABET = "ab\n"
stops = st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4)


def naive(text: str, stops: list[str], num_ignored: int, include: bool) -> tuple[str, str | None]:
    """The match that ends first after `num_ignored` characters; of those that end together, the longest."""
    for end in range(num_ignored + 1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


@settings(max_examples=600, deadline=None)
@given(pieces=st.lists(st.text(ALPHABET, max_size=5), max_size=8), stops=stops, num_ignored=st.integers(0, 4), include=st.booleans())
def test_equals_the_whole_text_answer(pieces: list[str], stops: list[str], num_ignored: int, include: bool) -> None:
    checker = StopChecker(stops, include_stop=include)
    shown, whole = "", ""
    want, matched = naive("".join(pieces), stops, len("".join(pieces[:num_ignored])), include)
    for i, piece in enumerate(pieces):
        shown += checker.push(piece, can_match=i >= num_ignored)
        whole += piece
        assert want.startswith(shown), "part of a stop string leaked"
        longest = max(map(len, stops)) - 1
        if checker.matched is None:
            assert len(whole) - len(shown) <= longest, "more was held back than a stop string can need"
    shown += checker.flush()
    assert (shown, checker.matched) == (want, matched)


def test_nothing_after_a_match() -> None:
    checker = StopChecker(["END"])
    assert checker.push("text EN") == "text "
    assert checker.push("D more") == ""
    assert (checker.matched, checker.push("more"), checker.flush()) == ("END", "", "")


def test_held_text_is_released() -> None:
    checker = StopChecker(["</answer>"])
    assert [checker.push(piece) for piece in ("a </ans", "w", "e", "ird")] == ["a ", "", "", "</answeird"]
