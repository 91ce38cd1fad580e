"""The paged KV cache: block tables, the block pool with reference counts, and reuse of a common prefix."""

from __future__ import annotations

from svg import Drawing

SHARED = ["You", "are", "a", "helpful", "assistant", ".", "Answer"]
FIRST = ["in", "one", "line", ":", "why", "is"]
SECOND = ["with", "a", "poem", "about", "rain"]


def kv_cache() -> Drawing:
    d = Drawing(
        "The paged KV cache",
        "Two sequences with a common prefix share its full block through their block tables; a third block is cached without a user.",
        980,
        470,
    )
    d.heading("blocks of 4 tokens here; 64 by default")

    _sequence(d, 62, "Sequence A", [*SHARED[:7], *FIRST], (3, 6, 0, 7), "13 tokens")
    _sequence(d, 152, "Sequence B", [*SHARED[:7], *SECOND], (3, 5, 2), "shares block 3")

    d.text(24, 268, "Block pool", "bold")
    d.text(24, 286, "keys and values", "small soft")
    d.text(24, 302, "of all layers", "small soft")
    contents = {
        3: ("refs 2", "blue"), 6: ("refs 1", "amber"), 0: ("refs 1", "amber"), 7: ("refs 1", "amber"),
        5: ("refs 1", "rose"), 2: ("refs 1", "rose"), 4: ("cached", "grey"),
    }  # fmt: skip
    for block in range(9):
        x = 150 + 90 * block
        state, colour = contents.get(block, ("empty", "paper"))
        d.rect(x, 250, 82, 56, colour)
        d.text(x + 8, 270, f"block {block}", "bold")
        d.text(x + 8, 292, state, "small")

    d.text(24, 352, "Prefix index", "bold")
    d.text(24, 370, "full blocks only", "small soft")
    entries = (
        (150, "blue", "start", "You are a helpful", "→ block 3"),
        (420, "amber", "block 3", "assistant . Answer in", "→ block 6"),
        (690, "grey", "start", "Translate this text :", "→ block 4"),
    )
    for x, colour, parent, tokens, block in entries:
        d.rect(x, 332, 246, 46, colour)
        d.text(x + 10, 351, f"after {parent}:", "small soft")
        d.text(x + 10, 368, tokens, "mono")
        d.text(x + 236, 351, block, "small end")
    d.line((396, 355), (418, 355), arrow=True)
    notes = (
        "A full block is indexed by its parent and its token ids. A new sequence follows the index from the start and shares every match.",
        "Shared blocks are full and never written again, so nothing is copied. A block without references stays cached until the pool",
        "needs it; the least recently used one is evicted first. Attention reads keys and values through the block table of each row.",
    )
    for number, note in enumerate(notes):
        d.text(24, 410 + 19 * number, note, "small")
    return d


def _sequence(d: Drawing, y: float, name: str, tokens: list[str], table: tuple[int, ...], state: str) -> None:
    own = "amber" if name.endswith("A") else "rose"
    d.text(24, y + 18, name, "bold")
    d.text(24, y + 36, state, "small soft")
    d.text(24, y + 66, "block table", "small soft")
    x = 150.0
    for number, block in enumerate(table):
        part = tokens[4 * number : 4 * number + 4]
        width = 200.0
        colour = "blue" if number == 0 else own
        d.rect(x, y, width - 6, 32, colour)
        d.text(x + 9, y + 21, " ".join(part), "mono")
        d.rect(x, y + 48, 30, 26, colour, radius=3)
        d.text(x + 15, y + 66, str(block), "mono middle")
        d.line((x + 15, y + 48), (x + 15, y + 34), arrow=True, width=1.1)
        x += width
