"""The rows of a step, arranged for ops with recurrent states: decode rows as they are, prefill rows padded to the longest one.

Rows that verify drafts are computed like decode rows, one token after another, because the states after each of their tokens are stored.

Everything is computed on the device, so that the ops also run on meta tensors and without waiting for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from stoker.core.forward_batch import ForwardBatch, VerifiedRows

# (state of some rows, the index of a token of each of them) → (outputs of these tokens, states after them).
Update = Callable[[Tensor, slice | Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class StateRows:
    """R rows, of which the first `num_decodes` have one token each, and the next V verify drafts (`verified`, None: V = 0).

    The others, P prefill rows, have at most L tokens each.
    """

    num_decodes: int
    verified: VerifiedRows | None
    first: Tensor  # int64 [R], the first token of each row
    counts: Tensor  # int64 [R], the number of tokens of each row
    slots: Tensor  # int64 [R], the state of each row
    is_new: Tensor  # bool [R], whether the first token of the row is the first of its sequence
    lengths: Tensor  # int64 [P], the number of tokens of each prefill row
    token_index: Tensor  # int64 [P, L], the token at each place of a prefill row; any token beyond its length
    is_token: Tensor  # bool [P, L]
    place_index: Tensor  # int64 [tokens of prefill rows], the place of each prefill token among the P × L places

    @property
    def num_prefills(self) -> int:
        """The number P of prefill rows."""
        return self.lengths.shape[0]

    @property
    def prefills(self) -> slice:
        """The prefill rows."""
        return slice(self.num_decodes + (self.verified.num_rows if self.verified is not None else 0), None)

    def token_by_token(self, states: Tensor, update: Update) -> list[Tensor]:
        """The outputs of the decode rows' tokens, and of those that verify drafts: [tokens, …] each. Stores the states."""
        outs, num = [], self.num_decodes
        if num:
            out, state = update(self.initial(states, slice(num)), slice(num))
            self.store(states, slice(num), state)
            outs.append(out)
        if self.verified is not None:
            outs.append(self._verify(states, update, self.verified))
        return outs

    def _verify(self, states: Tensor, update: Update, verified: VerifiedRows) -> Tensor:
        """The outputs of the rows that verify drafts. The states after each token are stored in the slots of the tokens."""
        rows, end = slice(self.num_decodes, self.prefills.start), self.num_decodes + verified.num_tokens
        first, counts = self.first[rows], self.counts[rows]
        state = self.initial(states, rows)
        outputs: Tensor | None = None
        for i in range(verified.max_tokens):
            # A row without further tokens repeats its last one, without a change; that of padding is `end`.
            tokens = first + (counts - 1).clamp(min=0, max=i)
            out, new = update(state, tokens.clamp(max=end - 1))
            state = torch.where((i < counts).view(-1, *[1] * (state.dim() - 1)), new, state)
            states[states.shape[0] - 1 - tokens] = state.to(states.dtype)
            if outputs is None:
                outputs = out.new_zeros(verified.num_tokens + 1, *out.shape[1:])
            places = torch.where(i < counts, tokens - self.num_decodes, verified.num_tokens)
            outputs[places] = out
        assert outputs is not None
        return outputs[:-1]

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
        """The inverse of `pad`: [tokens of prefill rows, …] from [P, L, …]."""
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
    first_row, first_token = num_decodes, num_decodes
    if batch.verified is not None:
        first_row, first_token = first_row + batch.verified.num_rows, first_token + batch.verified.num_tokens
    first, lengths = starts[first_row:-1], counts[first_row:]
    device, longest = starts.device, batch.max_query_len if len(lengths) else 0
    places = torch.arange(longest, device=device)
    tokens = torch.arange(first_token, num_tokens, device=device)
    owner = torch.searchsorted(starts[first_row:], tokens, right=True).sub_(1).clamp_(0, max(len(lengths) - 1, 0))
    return StateRows(
        num_decodes=num_decodes,
        verified=batch.verified,
        first=starts[:-1],
        counts=counts,
        slots=batch.state_slots.long(),
        is_new=batch.seq_lens.long() <= counts,
        lengths=lengths,
        token_index=(first[:, None] + places).clamp_(max=num_tokens - 1),
        is_token=places < lengths[:, None],
        place_index=(owner * longest + tokens - first[owner]).clamp_(0, max(len(lengths) * longest - 1, 0)) if len(lengths) else owner,
    )
