"""Draft trees: several candidates for the same position, of which verification accepts at most one.

A tree is a list of nodes. A node is named by its path of ranks: [0] is the most likely next token, [1] the second most likely one, and
[0, 2] the third most likely token after [0]. FasterDecoding's and TensorRT-LLM's `medusa_choices`, TensorRT-LLM's `eagle_choices` and
vLLM's `speculative_token_tree` have this form, with brackets, braces or parentheses. `mc_sim_7b_63` is the tree of the Medusa paper (arXiv
2401.10774), which TensorRT-LLM uses by default.

In a step, node 0 is the newest token of a sequence, and node i + 1 is the draft i. Parents precede their children, so that the first drafts
of a tree are a tree, too. A chain is the tree in which node i is the parent of node i + 1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.base.errors import ConfigError

MAX_TREE_NODES = 63  # with the newest token, the nodes of a path are the bits of a 64-bit mask
_MAX_RANK = 63
_MAX_TEXT = 16_384  # characters; 63 nodes in a chain, with ranks of two digits and spaces, have 8,190
_PATH = re.compile(r"[\[({]\s*\d{1,4}(?:\s*,\s*\d{1,4})*\s*,?\s*[\])}]")
_PATHS = re.compile(r"[\[({]?#(?:,#)*,?[\])}]?")  # without spaces
MC_SIM_7B_63 = (
    "[0], [0,0], [1], [0,1], [2], [0,0,0], [1,0], [0,2], [3], [0,3], [4], [0,4], [2,0], [0,5], [0,0,1], [5], [0,6], [6], [0,7], [0,1,0], "
    "[1,1], [7], [0,8], [0,0,2], [3,0], [0,9], [8], [9], [1,0,0], [0,2,0], [1,2], [0,0,3], [4,0], [2,1], [0,0,4], [0,0,5], [0,0,0,0], "
    "[0,1,1], [0,0,6], [0,3,0], [5,0], [1,3], [0,0,7], [0,0,8], [0,0,9], [6,0], [0,4,0], [1,4], [7,0], [0,1,2], [2,0,0], [3,1], [2,2], "
    "[8,0], [0,5,0], [1,5], [1,0,1], [0,2,1], [9,0], [0,6,0], [0,0,0,1], [1,6], [0,7,0]"
)
PARENT_SHIFT = 24  # an element of a dynamic tree is token id + (parent << PARENT_SHIFT), so that both reach the host at once
_DYNAMIC = re.compile(r"dynamic:(\d{1,4}),(\d{1,4}),(\d{1,4})")
NAMED_TREES = {"mc_sim_7b_63": MC_SIM_7B_63}
_CURE = f"Use paths such as [0],[0,0],[1], each after that of its parent, {' or '.join(NAMED_TREES)}, or dynamic:DEPTH,WIDTH,TOKENS."


@dataclass(frozen=True, slots=True)
class DraftTree:
    """The shape of a tree of drafts, the most useful nodes first."""

    parents: tuple[int, ...]  # the node after which each draft is proposed: 0 is the newest token, i the draft i - 1
    ranks: tuple[int, ...]  # of each draft among the candidates after its parent; 0 is the most likely one

    @staticmethod
    def chain(count: int) -> DraftTree:
        """The chain of `count` drafts."""
        return DraftTree(tuple(range(count)), (0,) * count)

    def prefix(self, count: int) -> DraftTree:
        """The first `count` drafts."""
        return DraftTree(self.parents[:count], self.ranks[:count])

    def parents_of(self, proposal: Sequence[int], count: int) -> Sequence[int]:
        """The parents of the first `count` drafts, whatever was proposed."""
        return self.parents[:count]

    def __len__(self) -> int:
        """The number of drafts."""
        return len(self.parents)

    @property
    def max_depth(self) -> int:
        """The length of the longest path."""
        return max(self.depths, default=0)

    @property
    def max_rank(self) -> int:
        """The largest rank of a draft."""
        return max(self.ranks, default=0)

    @property
    def num_places(self) -> int:
        """The largest number of drafts of a sequence whose keys a drafter stores, or more."""
        return len(self)

    @property
    def is_chain(self) -> bool:
        """Whether every draft follows the one before it."""
        return chain_length(self.parents) == len(self.parents)

    def ranks_by_depth(self) -> list[list[int]]:
        """The ranks of the drafts at each depth, from 1 on."""
        depths = self.depths
        return [[rank for rank, at in zip(self.ranks, depths, strict=True) if at == depth] for depth in range(1, 1 + self.max_depth)]

    @property
    def depths(self) -> list[int]:
        """The distance of each draft from the newest token, at least 1."""
        return node_depths(self.parents)[1:]


@dataclass(frozen=True, slots=True)
class DynamicTree:
    """Trees whose shape follows the probabilities of the drafts. Each sequence and step has its own."""

    max_depth: int
    width: int  # the nodes that are expanded at each depth, and the candidates after each of them
    num_nodes: int  # of all candidates, the most probable ones

    def prefix(self, count: int) -> DynamicTree:
        """The trees of the `count` most probable drafts."""
        return DynamicTree(self.max_depth, self.width, count)

    def parents_of(self, proposal: Sequence[int], count: int) -> Sequence[int]:
        """The parents of the first `count` drafts of a proposal, whose elements have them (see `PARENT_SHIFT`)."""
        return tuple(draft >> PARENT_SHIFT for draft in proposal[:count])

    def __len__(self) -> int:
        """The number of drafts."""
        return self.num_nodes

    @property
    def is_chain(self) -> bool:
        """False: the shape is not known in advance."""
        return False

    @property
    def max_rank(self) -> int:
        """The largest rank of a draft among the candidates after its parent."""
        return self.width - 1

    @property
    def num_places(self) -> int:
        """The largest number of drafts of a sequence whose keys a drafter stores, or more."""
        return max(self.num_nodes, self.num_expanded)

    @property
    def num_expanded(self) -> int:
        """The number of nodes whose candidates are computed, without the newest token."""
        return self.width * (self.max_depth - 1)


def chain_length(parents: Sequence[int]) -> int:
    """The number of leading drafts that form a chain."""
    return next((i for i, parent in enumerate(parents) if parent != i), len(parents))


def node_depths(parents: Sequence[int]) -> list[int]:
    """The distance of each node from the newest token, which is node 0 and has 0."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths


def parse_tree(text: str) -> DraftTree | DynamicTree:
    """Read the paths of a tree, the name of one, or the sizes of dynamic trees. Raises ConfigError, which names `draft_tree`."""
    if text.strip().startswith("dynamic"):
        return _parse_dynamic(text)
    paths = _parse_paths(NAMED_TREES.get(text.strip(), text))
    if len(paths) > MAX_TREE_NODES:
        raise ConfigError(f"draft_tree has {len(paths)} nodes, and may have {MAX_TREE_NODES}.", cure="Leave out the last ones.")
    nodes: dict[tuple[int, ...], int] = {(): 0}
    parents = []
    for path in paths:
        if path in nodes:
            raise ConfigError(f"draft_tree contains the path {list(path)} twice.", cure="Leave out one of them.")
        if path[:-1] not in nodes:
            raise ConfigError(f"draft_tree contains {list(path)}, and not {list(path[:-1])} before it.", cure=_CURE)
        if path[-1] > _MAX_RANK:
            raise ConfigError(f"draft_tree contains the rank {path[-1]}.", cure=f"Use ranks from 0 to {_MAX_RANK}.")
        parents.append(nodes[path[:-1]])
        nodes[path] = len(nodes)
    return DraftTree(tuple(parents), tuple(path[-1] for path in paths))


def _parse_dynamic(text: str) -> DynamicTree:
    """Read dynamic:DEPTH,WIDTH,TOKENS. Raises ConfigError."""
    match = _DYNAMIC.fullmatch("".join(text[:60].split()))
    if match is None:
        raise ConfigError(f"draft_tree={text[:60]!r} is refused.", cure="Use dynamic:DEPTH,WIDTH,TOKENS, such as dynamic:6,8,40.")
    tree = DynamicTree(*map(int, match.groups()))
    if not tree.max_depth or not tree.width or tree.num_expanded > MAX_TREE_NODES or tree.width > MAX_TREE_NODES:
        limit = f"DEPTH and WIDTH are at least 1, and WIDTH and (DEPTH - 1) x WIDTH at most {MAX_TREE_NODES}"
        expanded = max(tree.num_expanded, 0)
        raise ConfigError(f"draft_tree={text!r} expands {expanded} nodes of width {tree.width}; {limit}.", cure="Change DEPTH or WIDTH.")
    most = min(MAX_TREE_NODES, tree.width + tree.num_expanded * tree.width)
    if not 1 <= tree.num_nodes <= most:
        limit = f"TOKENS is from 1 to {most} for this depth and width"
        raise ConfigError(f"draft_tree={text!r} has {tree.num_nodes} nodes; {limit}.", cure="Change TOKENS.")
    return tree


def _parse_paths(text: str) -> list[tuple[int, ...]]:
    """The paths in a text. Raises ConfigError."""
    if len(text) > _MAX_TEXT:
        raise ConfigError(f"draft_tree has {len(text)} characters, and may have {_MAX_TEXT}.", cure=_CURE)
    text = " ".join(text.split())  # so that the expressions, which try each number of spaces, are fast
    found = _PATH.findall(text)
    if not found or not _PATHS.fullmatch("".join(_PATH.sub("#", text).split())):
        raise ConfigError(f"draft_tree={text[:60]!r} is refused.", cure=_CURE)
    return [tuple(map(int, re.findall(r"\d+", path))) for path in found]
