"""The recurrence of Mamba against a loop over tokens in float64: decodes, prefills of several rows, blocks of any number, from states."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stoker.core.forward_batch import ForwardBatch
from stoker.kernels import ops
from stoker.kernels.reference import selective_scan as reference
from stoker.kernels.types import SelectiveScanParams

FEATURES, ELEMENTS, SLOTS = 6, 5, 7
# (tokens of the step, tokens before it) of each row, decodes first.
STEPS = {
    "decodes": [(1, 4), (1, 0), (1, 9)],
    "one prefill": [(50, 0)],
    "mixed": [(1, 3), (1, 7), (33, 0), (2, 5), (130, 64)],
}


def batch_of(rows: list[tuple[int, int]]) -> ForwardBatch:
    def int32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    lengths = [new for new, _ in rows]
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    tokens = torch.zeros(sum(lengths), dtype=torch.int32)
    return ForwardBatch(
        token_ids=tokens,
        positions=tokens,
        slots=tokens,
        query_starts=ends,
        seq_lens=int32([sum(row) for row in rows]),
        block_tables=tokens[:1].expand(len(rows), 1),
        num_decodes=sum(new == 1 for new in lengths),
        max_query_len=max(lengths),
        max_seq_len=max(sum(row) for row in rows),
        state_slots=int32([5, 2, 0, 6, 3][: len(rows)]),
    )


@pytest.mark.parametrize("states_at_once", [1, 3, 1000])
@pytest.mark.parametrize("step", STEPS)
def test_selective_scan_equals_a_loop_over_tokens(step: str, states_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = STEPS[step]
    num_prefills = max(sum(new > 1 for new, _ in rows), 1)
    monkeypatch.setattr(reference, "STEP_BYTES", states_at_once * num_prefills * FEATURES * ELEMENTS * 4)
    batch, generator = batch_of(rows), torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    num = batch.num_tokens
    x, dt, b, c = random(num, FEATURES), random(num, FEATURES) * 2, random(num, ELEMENTS), random(num, ELEMENTS)
    # Decays from almost none to one that underflows within a few tokens, which a quotient of cumulated decays would not survive.
    params = SelectiveScanParams(-torch.logspace(-3, 2, FEATURES * ELEMENTS).view(FEATURES, ELEMENTS), random(FEATURES), random(FEATURES))
    states = random(SLOTS, FEATURES, ELEMENTS)
    before = states.clone()
    found = ops.selective_scan(x, dt, b, c, params, states, batch)

    expected, steps = torch.zeros(num, FEATURES, dtype=torch.float64), torch.nn.functional.softplus((dt + params.dt_bias).double())
    assert batch.state_slots is not None
    for row, slot in enumerate(batch.state_slots.tolist()):
        state = before[slot].double() * (rows[row][1] > 0)
        for i in range(int(batch.query_starts[row]), int(batch.query_starts[row + 1])):
            state = state * (steps[i, :, None] * params.a.double()).exp() + (steps[i] * x[i].double())[:, None] * b[i].double()
            expected[i] = state @ c[i].double() + params.skip.double() * x[i].double()
        assert torch.allclose(states[slot].double(), state, rtol=1e-4, atol=1e-4), f"the state of row {row}"
    assert torch.allclose(found.double(), expected, rtol=1e-4, atol=1e-4)
    untouched = sorted({*range(SLOTS)} - {*batch.state_slots.tolist()})
    assert torch.equal(states[untouched], before[untouched])
