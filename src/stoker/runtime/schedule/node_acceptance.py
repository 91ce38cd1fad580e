"""How often each node of a draft tree is accepted, from which the number of nodes is chosen.

In a chain, draft i is accepted with probability aⁱ if each draft is accepted with probability a. The nodes of a tree have different
probabilities, which are measured one by one, over all sequences. A node is accepted or not whatever nodes follow it, so that a measurement
holds for every number of nodes. Nodes that were never verified have a high initial value, so that they are tried.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

DECAY = 0.95  # of the averages, per step of a sequence with drafts
FIRST = 0.7  # the initial value of the first node; that of node i (from 0) is FIRST ÷ (1 + i ÷ 4)


class NodeAcceptance:
    """The average acceptance of each of the nodes of a tree; recent steps count more. Those of a dynamic tree are numbered from the most
    probable one on. `depth` is that of the tree."""

    def __init__(self, num_nodes: int, depth: int) -> None:
        self.rates = [FIRST / (1.0 + i / 4.0) for i in range(num_nodes)]
        self.num_passes = depth  # of the drafter, which computes all nodes of one depth at once

    def record(self, num_drafts: int, path: Seq[int]) -> None:
        """Count a step of a sequence that verified the first `num_drafts` nodes. `path`: the accepted nodes, from 1."""
        accepted = set(path)
        for i in range(num_drafts):
            self.rates[i] = self.rates[i] * DECAY + (1.0 - DECAY) * (i + 1 in accepted)
