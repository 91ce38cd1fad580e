"""The levels of a draft tree, for a drafter that computes one level after another.

Level d has the nodes at depth d. Its inner nodes are those with children. The drafter computes the inner nodes of all sequences at once,
and the logits of each give the candidates for its children:

    depth                    nodes of the level              inner nodes
      0    newest token                                      0
      1                      1: [0]    2: [1]                1, 2
      2                      3: [0,0]  4: [0,1]  5: [1,0]    3
      3                      6: [0,0,0]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.base.draft_tree import DraftTree


@dataclass(frozen=True, slots=True)
class Level:
    """The n nodes of one depth, whose parents are among the P inner nodes of the level before; Q of them are inner nodes.

    Index tensors are int64 on the device. None stands for the identity.
    """

    num_parents: int  # P
    num_candidates: int  # after each parent
    chosen: Tensor | None  # [n], of the P × num_candidates candidates
    inner: Tensor | None  # [Q], of the n nodes
    inner_parents: Tensor | None  # [Q], of the P parents
    num_inner: int
    num_before: int  # inner nodes of the levels before, without the newest token
    masks: Tensor  # [Q], the inner nodes, numbered level by level, that are an inner node itself or its ancestors
    is_chain: bool  # each level up to this one has at most one inner node


@dataclass(frozen=True, slots=True)
class Levels:
    """The levels of a tree from depth 1 on, and the order in which its nodes are found in them."""

    levels: list[Level]
    order: Tensor | None  # int64 [nodes], the index of each node among those of all levels


def make_levels(tree: DraftTree, device: torch.device) -> Levels:
    """The levels of a tree, with tensors on `device`."""

    def index(values: list[int], size: int) -> Tensor | None:
        return None if values == list(range(size)) else torch.tensor(values, device=device)

    depths, with_children = [0, *tree.depths], set(tree.parents)
    parents, masks, levels, found = [0], {0: 0}, list[Level](), list[int]()
    num_before, is_chain = 0, True
    for depth in range(1, max(depths) + 1):
        nodes = [node for node, at in enumerate(depths) if at == depth]
        inner = [node for node in nodes if node in with_children]
        size = 1 + max(tree.ranks[node - 1] for node in nodes)
        at = {parent: i for i, parent in enumerate(parents)}
        chosen = [at[tree.parents[node - 1]] * size + tree.ranks[node - 1] for node in nodes]
        for i, node in enumerate(inner, num_before):
            masks[node] = masks[tree.parents[node - 1]] | 1 << i
        is_chain = is_chain and len(inner) <= 1
        levels.append(
            Level(
                len(parents),
                size,
                index(chosen, len(parents) * size),
                index([nodes.index(node) for node in inner], len(nodes)),
                index([at[tree.parents[node - 1]] for node in inner], len(parents)),
                len(inner),
                num_before,
                torch.tensor([masks[node] for node in inner], dtype=torch.int64, device=device),
                is_chain,
            )
        )
        found += nodes
        parents, num_before = inner, num_before + len(inner)
    return Levels(levels, index([found.index(node) for node in range(1, len(depths))], len(tree)))
