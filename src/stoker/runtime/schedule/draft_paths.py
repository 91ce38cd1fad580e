"""The paths of draft trees on the host: which drafts were accepted, and where their keys and values are stored.

In the step that verifies a tree, the key of node i is stored at position start + i, start being the position of the newest token. The
accepted drafts are a path of the tree, whose nodes are not consecutive. After the step their keys and values are moved, so that the
draft at depth d is at position start + d:

    position   start  +1  +2  +3  +4            accepted path: nodes 2 and 4
    node           0   1   2   3   4
    moved to       0   2   4                    moves: start + 2 → start + 1, start + 4 → start + 2

A node is never before its depth, so that a move never overwrites the source of a later one of the same sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from stoker.runtime.request import Sequence

Move = tuple[int, int]  # the slot of a key and value, and the slot to which they are copied


def accepted_path(drafts: Seq[int], parents: Seq[int], yielded: Seq[int]) -> list[int]:
    """The nodes of the accepted drafts, from the first one on. `yielded` are these drafts and the token after them."""
    if isinstance(parents, range):  # a chain
        return list(range(1, len(yielded)))
    children = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, drafts, strict=True), 1)}
    path, node = list[int](), 0
    for token in yielded[:-1]:
        node = children[node, token]
        path.append(node)
    return path


def path_moves(seq: Sequence, start: int, path: Seq[int], block_size: int) -> list[Move]:
    """The moves of the keys and values of an accepted path, in the order of their depths. `seq` has the blocks of the whole tree."""
    return [
        (_slot(seq, start + node, block_size), _slot(seq, start + depth, block_size)) for depth, node in enumerate(path, 1) if node != depth
    ]


def _slot(seq: Sequence, position: int, block_size: int) -> int:
    """The slot of a position of a sequence."""
    return seq.blocks[position // block_size] * block_size + position % block_size
