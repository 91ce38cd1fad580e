"""What static and dynamic trees share: the passes of a drafter over the nodes of one depth, and where their keys are stored.

Drafts follow the *root*, the last token that the drafter has computed. For each depth of the tree, the drafter computes the nodes that
have children. Their keys are stored after that of the root, level by level, and a mask limits their attention to their ancestors. In a
chain this is one token:

    place        root  +1  +2  +3  +4           nodes 1 and 2 have depth 1, nodes 3 and 4 depth 2
    node            0   1   2   3   4
    position     root  +1  +1  +2  +2

Places after the step may have no block yet. Their keys are stored in spare blocks of the row, and the next step computes them again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.base.draft_tree import DraftTree
from stoker.core.forward_batch import ForwardBatch, TreeMask
from stoker.runtime.draft_trees.levels import make_levels
from stoker.runtime.draft_trees.sampled_drafts import choose
from stoker.runtime.worker.drafter import DraftInputs


@dataclass(frozen=True, slots=True)
class DraftStep:
    """Where the drafts of S sequences are computed."""

    roots: Tensor  # int32 [S], the positions of the roots
    first: Tensor  # int32 [S], the positions of the first drafts, whose random numbers they are drawn with
    tables: Tensor  # int32 [S, B], the block tables, with the spare blocks
    is_real: Tensor  # bool [S], False for padding
    longest: int  # the largest position of a root, and one more

    def counters(self, depth: int, num_parents: int) -> Tensor:
        """int32 [S × num_parents], the positions of the drafts after each of `num_parents` nodes of a sequence at `depth`."""
        found = self.first + depth
        return found if num_parents == 1 else found.repeat_interleave(num_parents)


class LevelModel(ABC):
    """Computes the nodes of a level from the states of their parents: a draft head, or a draft engine, whose states are [N, 0]."""

    target_ids: Tensor | None = None  # int32 [draft vocabulary], the ids of the model; None: logits have the vocabulary of the model
    num_ids: int  # the size of the vocabulary of the drafts
    block_size: int  # of its KV cache

    @abstractmethod
    def compute_level(self, states: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """The states [N, width] and the logits [N, draft vocabulary] of N nodes, from the states [N, width] of their parents."""


class LevelDrafts(ABC):
    """Drafts trees, or chains, with a LevelModel."""

    def __init__(self, model: LevelModel) -> None:
        self.model = model

    @abstractmethod
    def drafts(self, inputs: DraftInputs, step: DraftStep, states: Tensor, logits: Tensor) -> Iterator[Tensor]:
        """The drafts of each sequence from the states [S, width] and the logits [S, V] of the roots.

        Those of a chain one after another, int32 [S], and of a tree all at once, int32 [N, S].
        """

    def level_batch(
        self, token_ids: Tensor, step: DraftStep, depth: int, count: int, num_before: int, masks: Tensor | None
    ) -> ForwardBatch:
        """The batch of `count` nodes of each sequence at one depth, `token_ids` [S × count]. Padding stores nothing.

        The nodes have consecutive places after the root, `num_before` in the levels before. `masks` int64 [S × count] are the nodes,
        numbered by their places, to which each attends; None: a chain, in which `count` is 1.
        """
        size, device, roots = self.model.block_size, step.roots.device, step.roots
        ends = roots + 1 + num_before + count
        places = ends.unsqueeze(1) - count + torch.arange(count, dtype=torch.int32, device=device)
        slots = step.tables.gather(1, (places // size).long()) * size + places % size
        return ForwardBatch(
            token_ids=token_ids,
            positions=(roots + depth).repeat_interleave(count),
            slots=torch.where(step.is_real.unsqueeze(1), slots, -1).flatten(),
            query_starts=torch.arange(len(roots) + 1, dtype=torch.int32, device=device) * count,
            seq_lens=torch.where(step.is_real, ends, 0 if masks is None else count),
            block_tables=step.tables,
            num_decodes=len(roots) if masks is None else 0,
            max_query_len=count,
            max_seq_len=step.longest + num_before + count,
            tree=None if masks is None else TreeMask(masks, roots + 1),
        )


class StaticDrafts(LevelDrafts):
    """Drafts trees of one shape, or chains."""

    def __init__(self, model: LevelModel, tree: DraftTree, device: torch.device) -> None:
        super().__init__(model)
        self.tree = tree
        self._levels = make_levels(tree, device)

    def drafts(self, inputs: DraftInputs, step: DraftStep, states: Tensor, logits: Tensor) -> Iterator[Tensor]:
        count, found, model = len(inputs.rows), list[Tensor](), self.model
        for depth, level in enumerate(self._levels.levels):
            if depth:
                before = self._levels.levels[depth - 1]
                states = _select(states.unflatten(0, (count, before.num_parents)), before.inner_parents).flatten(0, 1)
                token_ids, masks = _select(found[-1], before.inner).flatten(), None if before.is_chain else before.masks.repeat(count)
                batch = self.level_batch(token_ids, step, depth, before.num_inner, before.num_before, masks)
                states, logits = model.compute_level(states, batch)
            counters = step.counters(depth, level.num_parents)
            drafts = choose(logits, model.target_ids, inputs, counters, model.num_ids, level.num_candidates)
            found.append(_select(drafts.view(count, -1), level.chosen))
            if self.tree.is_chain:
                yield found[-1].flatten()
        if not self.tree.is_chain:
            yield _select(torch.cat(found, dim=1), self._levels.order).t()


def _select(x: Tensor, index: Tensor | None) -> Tensor:
    """The elements of x [S, ...] at `index` of the second axis; None: all."""
    return x if index is None else x.index_select(1, index)
