"""The rows of a step, arranged for ops with recurrent states: decode rows as they are, prefill rows padded to the longest one.

Everything is computed on the device, so that the ops also run on meta tensors and without waiting for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from stoker.core.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class StateRows:
    """R rows, of which the first `num_decodes` have one token each. The others, P prefill rows, have at most L tokens each."""

    num_decodes: int
    slots: Tensor  # int64 [R], the state of each row
    is_new: Tensor  # bool [R], whether the first token of the row is the first of its sequence
    lengths: Tensor  # int64 [P], the number of tokens of each prefill row
    token_index: Tensor  # int64 [P, L], the token at each place of a prefill row; any token beyond its length
    is_token: Tensor  # bool [P, L]
    place_index: Tensor  # int64 [T - num_decodes], the place of each prefill token among the P × L places

    @property
    def num_prefills(self) -> int:
        """The number P of prefill rows."""
        return self.lengths.shape[0]

    def initial(self, states: Tensor, rows: slice) -> Tensor:
        """A copy of the states of the rows [rows, …]; zeros for a row that begins its sequence, whatever its slot contains."""
        found, is_new = states[self.slots[rows]], self.is_new[rows]
        return torch.where(is_new.view(-1, *[1] * (found.dim() - 1)), torch.zeros((), dtype=found.dtype, device=found.device), found)

    def store(self, states: Tensor, rows: slice, new: Tensor) -> None:
        """Store the new states of the rows in their slots."""
        states[self.slots[rows]] = new.to(states.dtype)

    def pad(self, x: Tensor) -> Tensor:
        """The prefill tokens of x [T, …] as [P, L, …], with zeros beyond the length of each row."""
        return torch.where(self.is_token.view(*self.is_token.shape, *[1] * (x.dim() - 1)), x[self.token_index], 0)

    def unpad(self, padded: Tensor) -> Tensor:
        """The inverse of `pad`: [T - num_decodes, …] from [P, L, …]."""
        return padded.flatten(0, 1)[self.place_index]


def state_rows(batch: ForwardBatch) -> StateRows:
    """The rows of the step, computed once for all layers. The batch must have `state_slots`."""
    rows = batch.shared.get("state_rows")
    if not isinstance(rows, StateRows):
        rows = batch.shared["state_rows"] = _arrange(batch)
    return rows


def _arrange(batch: ForwardBatch) -> StateRows:
    """`state_rows` for a step that has none yet."""
    assert batch.state_slots is not None, "the model has recurrent states, and the step names no slots"
    num_decodes, num_tokens = batch.num_decodes, batch.num_tokens
    starts = batch.query_starts.long()
    counts = starts[1:] - starts[:-1]
    counts[:num_decodes] = 1
    first, lengths = starts[num_decodes:-1], counts[num_decodes:]
    device, longest = starts.device, batch.max_query_len if len(lengths) else 0
    places = torch.arange(longest, device=device)
    tokens = torch.arange(num_decodes, num_tokens, device=device)
    owner = torch.searchsorted(starts[num_decodes:], tokens, right=True).sub_(1).clamp_(0, max(len(lengths) - 1, 0))
    return StateRows(
        num_decodes=num_decodes,
        slots=batch.state_slots.long(),
        is_new=batch.seq_lens.long() <= counts,
        lengths=lengths,
        token_index=(first[:, None] + places).clamp_(max=num_tokens - 1),
        is_token=places < lengths[:, None],
        place_index=(owner * longest + tokens - first[owner]).clamp_(0, max(len(lengths) * longest - 1, 0)) if len(lengths) else owner,
    )
