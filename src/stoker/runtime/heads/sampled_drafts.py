"""Chooses drafts from the logits of heads: the most likely tokens, or tokens drawn like those of the model.

A draft is drawn with the parameters of its sequence and with the random number of its position, with which the model then draws at the same
position. Both choose the same token where their distributions agree.
"""

from __future__ import annotations

from torch import Tensor

from stoker.kernels import ops
from stoker.runtime.worker.drafter import DraftInputs


def choose(logits: Tensor, target_ids: Tensor | None, inputs: DraftInputs, counters: Tensor, vocab_size: int) -> Tensor:
    """int32 [S]: a draft for each sequence of a step, from its `logits` [S, V].

    `target_ids` int32 [V] are the ids of a draft vocabulary in that of the model, whose size is `vocab_size`; None: V is the vocabulary of
    the model. `counters` int32 [S] are the positions of the random numbers.
    """
    if inputs.all_greedy:
        found = logits.argmax(dim=-1)
        return (found if target_ids is None else target_ids[found]).int()
    if target_ids is not None:
        wide = logits.new_full((len(logits), vocab_size), float("-inf"))
        logits = wide.index_copy_(1, target_ids.long(), logits)
    return ops.sample(logits, inputs.table.gather(inputs.rows, counters, False)).clamp(min=0)
