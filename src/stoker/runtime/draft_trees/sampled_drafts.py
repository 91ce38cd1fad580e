"""Chooses drafts from the logits of a drafter: the most likely tokens, or a token drawn like that of the model and the most likely others.

A draft is drawn with the parameters of its sequence and with the random number of its position, with which the model then draws at the same
position. Both choose the same token where their distributions agree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.kernels import ops
from stoker.kernels.types import DrawParams
from stoker.runtime.worker.drafter import DraftInputs


def choose(logits: Tensor, target_ids: Tensor | None, inputs: DraftInputs, counters: Tensor, vocab_size: int, count: int = 1) -> Tensor:
    """int32 [S × N, count]: different drafts for each of the N rows of logits [S × N, V] of each sequence of a step, the best ones first.

    `target_ids` int32 [V] are the ids of a draft vocabulary in that of the model, whose size is `vocab_size`; None: V is the vocabulary of
    the model. `counters` int32 [S × N] are the positions of the random numbers.
    """
    if not inputs.all_greedy:
        return _draw(_widen(logits, target_ids, vocab_size), _params(inputs, counters), count)
    found = logits.argmax(dim=-1, keepdim=True) if count == 1 else logits.topk(count, dim=-1).indices
    return (found if target_ids is None else target_ids[found]).int()


def choose_scored(
    logits: Tensor, target_ids: Tensor | None, inputs: DraftInputs, counters: Tensor, vocab_size: int, count: int
) -> tuple[Tensor, Tensor]:
    """The drafts of `choose`, and the logarithms of their probabilities, float32 [S × N, count], at most 0.

    That of a drawn token is 0: the model draws it, too, wherever the distributions agree, however improbable the token is.
    """
    logprobs = logits.float().log_softmax(dim=-1).clamp(max=0.0)
    if inputs.all_greedy:
        scores, found = logprobs.topk(count, dim=-1)
        return (found if target_ids is None else target_ids[found]).int(), scores
    params = _params(inputs, counters)
    drawn = _draw(_widen(logits, target_ids, vocab_size), params, count)
    scores = _widen(logprobs, target_ids, vocab_size).gather(1, drawn.long())
    scores[:, 0] = torch.where(params.temperature == 0, scores[:, 0], 0.0)
    return drawn, scores


def _widen(logits: Tensor, target_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Logits of the vocabulary of the model from those of the draft vocabulary."""
    if target_ids is None:
        return logits
    return logits.new_full((len(logits), vocab_size), float("-inf")).index_copy_(1, target_ids.long(), logits)


def _params(inputs: DraftInputs, counters: Tensor) -> DrawParams:
    """The sampling parameters of the N rows of logits of each sequence, `counters` [S × N]."""
    return inputs.table.gather(inputs.rows.repeat_interleave(len(counters) // len(inputs.rows)), counters, False)


def _draw(logits: Tensor, params: DrawParams, count: int) -> Tensor:
    """int32 [S × N, count]: a drawn token, and the most likely other ones."""
    drawn = ops.sample(logits, params).clamp(min=0).unsqueeze(1)
    if count == 1:
        return drawn
    others = logits.scatter(1, drawn.long(), float("-inf")).topk(count - 1, dim=-1).indices
    return torch.cat((drawn, others.int()), dim=1)
