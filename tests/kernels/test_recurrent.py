"""Kernels of recurrent states in the interpreter against the references, which tests/parity compares with transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import padded, relative_error
from torch import Tensor

from stoker.core.forward_batch import ForwardBatch, VerifiedRows
from stoker.kernels.reference import causal_conv as conv_reference
from stoker.kernels.reference import delta_rule as delta_reference
from stoker.kernels.reference import gated_norm as gated_norm_reference
from stoker.kernels.reference import mamba2 as mamba2_reference
from stoker.kernels.reference import selective_scan as scan_reference
from stoker.kernels.reference import state_copy as copy_reference
from stoker.kernels.triton.recurrent import causal_conv, delta_rule, gated_norm, mamba2, selective_scan, state_copy
from stoker.kernels.triton.recurrent.rows import Mode, launches
from stoker.kernels.types import DeltaParams, Mamba2Params, SelectiveScanParams

# (tokens of the step, tokens of the sequence before it) of each row. Rows with one token come first, as in a step.
STEPS = {
    "decodes": [(1, 5), (1, 0), (1, 63)],
    "mixed": [(1, 9), (1, 0), (67, 0), (5, 4), (2, 0), (64, 64)],
}
# Rows 2 to 4 verify drafts.
STEPS["drafts"] = [(1, 9), (1, 3), (5, 4), (1, 8), (3, 64), (7, 0)]
NUM_SLOTS = 9 + 12  # of rows, and of the tokens of a step with drafts
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def batch_of(rows: list[tuple[int, int]], num_decodes: int | None = None) -> ForwardBatch:
    """A step whose rows have slots in a random order, among others that no row has."""
    counts = torch.tensor([count for count, _ in rows], dtype=torch.int32)
    starts = torch.cat((torch.zeros(1, dtype=torch.int32), counts.cumsum(0, dtype=torch.int32)))
    lens = counts + torch.tensor([before for _, before in rows], dtype=torch.int32)
    empty = torch.zeros(int(starts[-1]), dtype=torch.int32)
    decodes = sum(count == 1 for count, _ in rows) if num_decodes is None else num_decodes
    slots = torch.randperm(len(rows) + 3)[: len(rows)].int()
    return ForwardBatch(
        empty, empty, empty, starts, lens, torch.zeros(len(rows), 1, dtype=torch.int32), decodes, int(counts.max()), int(lens.max()),
        state_slots=slots,
    )  # fmt: skip


def states_of(num_slots: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random states in a wider storage, with NaN around the slots, as in `StateCache`."""
    storage = torch.full((num_slots, 8 + int(torch.Size(shape).numel()) + 8), float("nan"), dtype=dtype)
    states = storage[:, 8:-8].unflatten(1, shape)
    states.copy_(torch.randn(num_slots, *shape))
    return states


def step_of(name: str) -> ForwardBatch:
    """The step of STEPS, whose rows 2 to 4 verify drafts in "drafts"."""
    if name != "drafts":
        return batch_of(STEPS[name])
    batch = batch_of(STEPS[name], num_decodes=2)
    batch.verified = VerifiedRows(3, 9, 5)
    return batch


def view(num_tokens: int, width: int, dtype: torch.dtype) -> Tensor:
    """Columns of a wider projection."""
    return torch.randn(num_tokens, width + 24).to(dtype)[:, 16 : 16 + width]


def check(kernel: Any, reference: Any, args: tuple[Any, ...], states: Tensor, batch: ForwardBatch, *rest: Any) -> None:
    """The kernel and the reference have the same outputs and leave the same states, and the kernel leaves other slots as they were.

    So does the kernel in a captured step, with and without a launch for decodes.
    """
    captured = padded(batch, 5)
    is_captured = batch.verified is None
    for step in (batch, captured, replace(captured, decode_count=None)) if is_captured else (batch,):
        check_step(step, kernel, reference, args, states, batch, *rest)


def check_step(
    step: ForwardBatch, kernel: Any, reference: Any, args: tuple[Any, ...], states: Tensor, batch: ForwardBatch, *rest: Any
) -> None:
    """`check` of a kernel that computes `step`, which is `batch` or that of a captured step."""
    mine, theirs, before = states.clone(), states.clone(), states.clone()
    dtype = args[0].dtype
    for slot in batch.state_slots[batch.seq_lens <= batch.query_starts.diff()]:  # a sequence begins: its slot is not read
        mine[slot] = float("nan")
    out = kernel(*args, mine, step, *rest)
    expected = reference(*args, theirs, batch, *rest)
    assert out.dtype == dtype and relative_error(out, expected) < TOLERANCE[dtype]
    used = batch.state_slots.long()
    if batch.verified is not None:  # the slots of rows with drafts are not replaced; those of their tokens are
        is_unchanged = torch.zeros(batch.num_rows, dtype=torch.bool)
        is_unchanged[batch.num_decodes : batch.num_decodes + batch.verified.num_rows] = True
        tokens = torch.arange(batch.num_decodes, batch.num_decodes + batch.verified.num_tokens)
        used = torch.cat((used[~is_unchanged], len(states) - 1 - tokens))
    assert relative_error(mine[used], theirs[used]) < max(TOLERANCE[states.dtype], 1e-5)
    unused = [slot for slot in range(len(states)) if slot not in used.tolist()]
    assert torch.equal(mine[unused], before[unused])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("taps", "bias", "activation"), [(4, True, "silu"), (2, False, "gelu")])
def test_causal_conv(step: str, taps: int, bias: bool, activation: str, dtype: torch.dtype) -> None:
    batch, channels = step_of(step), 150
    weight = torch.randn(channels, taps).to(dtype)
    args = (view(batch.num_tokens, channels, dtype), weight, torch.randn(channels).to(dtype) if bias else None)
    check(
        causal_conv.causal_conv, conv_reference.causal_conv, args, states_of(NUM_SLOTS, channels, taps - 1, dtype=dtype), batch, activation
    )  # fmt: skip


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("heads", "groups", "size", "state", "limits"), [(4, 2, 16, 32, (0.0, None)), (3, 1, 20, 24, (0.01, 0.5))])
def test_mamba2(step: str, heads: int, groups: int, size: int, state: int, limits: tuple[float, float | None], dtype: torch.dtype) -> None:
    batch = step_of(step)
    params = Mamba2Params(-torch.rand(heads) * 2, torch.randn(heads), torch.randn(heads), *limits)
    x = view(batch.num_tokens, heads * size, dtype).unflatten(-1, (heads, size))
    b, c = (view(batch.num_tokens, groups * state, dtype).unflatten(-1, (groups, state)) for _ in range(2))
    args = (x, view(batch.num_tokens, heads, dtype), b, c, params)
    check(mamba2.mamba2, mamba2_reference.mamba2, args, states_of(NUM_SLOTS, heads, size, state), batch)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("heads", "key_heads", "keys", "values"), [(4, 2, 32, 48), (2, 2, 20, 16)])
def test_delta_rule(step: str, heads: int, key_heads: int, keys: int, values: int, dtype: torch.dtype) -> None:
    batch = step_of(step)
    params = DeltaParams(-torch.rand(heads), torch.randn(heads))
    q, k = (view(batch.num_tokens, key_heads * keys, dtype).unflatten(-1, (key_heads, keys)) for _ in range(2))
    v = view(batch.num_tokens, heads * values, dtype).unflatten(-1, (heads, values))
    args = (q, k, v, view(batch.num_tokens, heads, dtype), view(batch.num_tokens, heads, dtype), params)
    check(delta_rule.delta_rule, delta_reference.delta_rule, args, states_of(NUM_SLOTS, heads, keys, values), batch)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("step", STEPS)
def test_selective_scan(step: str, dtype: torch.dtype) -> None:
    batch, features, state = step_of(step), 40, 12
    params = SelectiveScanParams(-torch.rand(features, state), torch.randn(features), torch.randn(features))
    x, dt = (view(batch.num_tokens, features, dtype) for _ in range(2))
    b, c = (view(batch.num_tokens, state, dtype) for _ in range(2))
    check(selective_scan.selective_scan, scan_reference.selective_scan, (x, dt, b, c, params), states_of(NUM_SLOTS, features, state), batch)


def test_copies_of_states() -> None:
    storage = torch.randint(0, 256, (7, 1 << 16), dtype=torch.uint8)
    pairs = torch.tensor([(0, 3), (1, 6), (5, 2)], dtype=torch.int32)
    expected = storage.clone()
    expected[[3, 6, 2]] = storage[[0, 1, 5]]
    for copy in (state_copy.copy_states, copy_reference.copy_states):
        copied = storage.clone()
        copy(copied, pairs)
        assert torch.equal(copied, expected)


def test_the_same_keys_again_and_again() -> None:
    """Equal keys with a beta near 1 are the worst case of the inverse of a chunk: its entries do not decrease."""
    batch = batch_of([(130, 0)])
    heads, size = 2, 32
    key = torch.randn(1, heads, size).expand(130, heads, size).contiguous()
    params = DeltaParams(torch.full((heads,), -1e-3), torch.zeros(heads))
    values, beta = torch.randn(130, heads, size), torch.full((130, heads), 4.0)
    args = (torch.randn(130, heads, size), key, values, torch.full((130, heads), -2.0), beta, params)
    check(delta_rule.delta_rule, delta_reference.delta_rule, args, states_of(4, heads, size, size), batch)


@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("tokens", "groups", "size", "shared"), [(5, 1, 200, False), (3, 4, 32, True), (300, 4, 24, False), (0, 2, 8, False)]
)
def test_gated_norm(tokens: int, groups: int, size: int, shared: bool, dtype: torch.dtype, gate_first: bool) -> None:
    x, gate = torch.randn(tokens, groups * size).to(dtype), view(tokens, groups * size, dtype)
    weight = torch.randn(size if shared else groups * size).to(dtype)
    out = gated_norm.gated_norm(x, gate, weight, 1e-5, groups, gate_first)
    assert out.shape == x.shape and out.dtype == dtype
    if tokens:
        assert relative_error(out, gated_norm_reference.gated_norm(x, gate, weight, 1e-5, groups, gate_first)) < TOLERANCE[dtype]


def test_rows_of_a_captured_step_may_have_any_number_of_tokens() -> None:
    """A captured step with prompts has launches of all rows. In one of few rows, none counts as a decode."""
    rows = [(1, 7), (66, 0), (1, 0), (0, 0)]
    batch = batch_of(rows, num_decodes=1)
    captured = padded(batch, 2)
    assert [(count, mode) for _, count, mode in launches(captured)] == [(6, Mode.DECODE), (6, Mode.PREFILL)]
    assert [(count, mode) for _, count, mode in launches(replace(captured, decode_count=None))] == [(6, Mode.PREFILL)]
    x, weight = torch.randn(batch.num_tokens, 40), torch.randn(40, 4)
    check(causal_conv.causal_conv, conv_reference.causal_conv, (x, weight, None), states_of(NUM_SLOTS, 40, 3), batch, "silu")


def test_states_after_drafts_are_those_of_decodes() -> None:
    """The state after each token of a row with drafts is the one that decoding its tokens one by one leaves."""
    features, state_size, count = 10, 4, 5
    params = SelectiveScanParams(-torch.rand(features, state_size), torch.randn(features), torch.randn(features))
    inputs = [torch.randn(count, width) for width in (features, features, state_size, state_size)]
    states = torch.randn(10, features, state_size)
    drafted, decoded = batch_of([(count, 7)], num_decodes=0), batch_of([(1, 7)])
    drafted.verified, drafted.state_slots[0], decoded.state_slots[0] = VerifiedRows(1, count, count), 2, 2
    mine, one_by_one = states.clone(), states.clone()
    out = scan_reference.selective_scan(*inputs, params, mine, drafted)
    for i in range(count):
        expected = scan_reference.selective_scan(*(x[i : i + 1] for x in inputs), params, one_by_one, decoded)
        torch.testing.assert_close(out[i : i + 1], expected)
        torch.testing.assert_close(mine[-1 - i], one_by_one[2])
    assert torch.equal(mine[2], states[2])
