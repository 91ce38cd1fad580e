"""Kernels of recurrent states on the device against the references on the CPU, with the sizes of published models and ragged rows."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stoker.core.forward_batch import ForwardBatch
from stoker.kernels import ops
from stoker.kernels.types import DeltaParams, Mamba2Params, SelectiveScanParams

BOUND = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
SLOTS = 24


def step_of(num_decodes: int, lengths: list[int]) -> ForwardBatch:
    """A step of decodes and prefills; every third row begins its sequence."""
    counts = [1] * num_decodes + lengths
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lens = torch.tensor([count + (0 if i % 3 == 2 else random.randrange(1, 500)) for i, count in enumerate(counts)], dtype=torch.int32)
    empty = torch.zeros(int(starts[-1]), dtype=torch.int32)
    slots = torch.randperm(SLOTS)[: len(counts)].int()
    tables = torch.zeros(len(counts), 1, dtype=torch.int32)
    return ForwardBatch(empty, empty, empty, starts, lens, tables, num_decodes, max(counts), int(lens.max()), state_slots=slots)


def captured(batch: ForwardBatch) -> ForwardBatch:
    """The step as it is captured: with the numbers of decodes and of rows on the device, and padding, whose slot has the state of a row."""
    starts, slots = batch.query_starts, batch.state_slots
    assert slots is not None
    counts = [torch.tensor([count], dtype=torch.int32) for count in (batch.num_decodes, batch.num_rows)]
    return dataclasses.replace(
        batch,
        query_starts=torch.cat((starts, starts[-1:].expand(9))),
        seq_lens=torch.cat((batch.seq_lens, batch.seq_lens.new_zeros(9))),
        state_slots=torch.cat((slots, slots[:1].expand(9))),
        num_decodes=0,
        decode_count=counts[0],
        row_count=counts[1],
    )


def on_device(value: Any) -> Any:
    """Tensors, also those of a dataclass, on the device."""
    if isinstance(value, Tensor):
        return value.cuda()
    if dataclasses.is_dataclass(value):
        return type(value)(**{f.name: on_device(getattr(value, f.name)) for f in dataclasses.fields(value)})
    return {} if isinstance(value, dict) else value


def conv(num: int, dtype: torch.dtype) -> tuple[Callable[..., Tensor], tuple[Any, ...], Tensor, tuple[Any, ...]]:
    channels = 8192
    states = torch.randn(SLOTS, channels, 3).to(dtype)
    return ops.causal_conv, (torch.randn(num, channels + 96).to(dtype)[:, 96:], torch.randn(channels, 4).to(dtype), None), states, ("silu",)


def mamba2(num: int, dtype: torch.dtype) -> tuple[Callable[..., Tensor], tuple[Any, ...], Tensor, tuple[Any, ...]]:
    heads, size, groups, state = 24, 64, 8, 128
    params = Mamba2Params(-torch.rand(heads) * 16, torch.randn(heads) - 4, torch.randn(heads))
    x, dt = torch.randn(num, heads, size).to(dtype), torch.randn(num, heads).to(dtype)
    b, c = (torch.randn(num, groups, state).to(dtype) for _ in range(2))
    return ops.mamba2, (x, dt, b, c, params), torch.randn(SLOTS, heads, size, state), ()


def delta(num: int, dtype: torch.dtype) -> tuple[Callable[..., Tensor], tuple[Any, ...], Tensor, tuple[Any, ...]]:
    heads, size = 8, 128
    params = DeltaParams(-torch.rand(heads), torch.randn(heads) - 3)
    q, k = (torch.randn(num, heads // 2, size).to(dtype) for _ in range(2))
    v, dt, beta = torch.randn(num, heads, size).to(dtype), torch.randn(num, heads).to(dtype), torch.randn(num, heads).to(dtype)
    return ops.delta_rule, (q, k, v, dt, beta, params), torch.randn(SLOTS, heads, size, size), ()


def scan(num: int, dtype: torch.dtype) -> tuple[Callable[..., Tensor], tuple[Any, ...], Tensor, tuple[Any, ...]]:
    features, state = 1000, 16
    params = SelectiveScanParams(-torch.rand(features, state) * 16, torch.randn(features) - 4, torch.randn(features))
    x, dt = (torch.randn(num, features).to(dtype) for _ in range(2))
    b, c = (torch.randn(num, state).to(dtype) for _ in range(2))
    return ops.selective_scan, (x, dt, b, c, params), torch.randn(SLOTS, features, state), ()


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("case", [conv, mamba2, delta, scan])
@pytest.mark.parametrize(("decodes", "lengths"), [(1, []), (7, []), (0, [700]), (3, [1000, 5, 64, 129, 2])])
def test_outputs_and_states(case: Any, decodes: int, lengths: list[int], dtype: torch.dtype) -> None:
    batch = step_of(decodes, lengths)
    op, args, states, rest = case(batch.num_tokens, dtype)
    expected_states = states.clone()
    expected = op(*args, expected_states, batch, *rest)
    for step in (batch, captured(batch)):
        moved = states.cuda()
        out = op(*map(on_device, args), moved, on_device(step), *rest)
        for mine, theirs in ((out, expected), (moved, expected_states)):
            assert not mine.isnan().any()
            assert float((mine.cpu().double() - theirs.double()).norm() / theirs.double().norm()) < BOUND[dtype]


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(("groups", "gate_first"), [(1, True), (8, True), (32, False)])
def test_gated_norm(groups: int, gate_first: bool, dtype: torch.dtype) -> None:
    x, gate = torch.randn(77, 4096).to(dtype), torch.randn(77, 8192).to(dtype)[:, 4096:]
    weight = torch.randn(4096 if gate_first else 128).to(dtype)
    expected = ops.gated_norm(x, gate, weight, 1e-6, groups, gate_first).double()
    out = ops.gated_norm(x.cuda(), gate.cuda(), weight.cuda(), 1e-6, groups, gate_first).cpu().double()
    assert float((out - expected).norm() / expected.norm()) < BOUND[dtype]


def test_copies_of_states() -> None:
    storage = torch.randint(0, 256, (7, 3 << 20), dtype=torch.uint8, device="cuda")
    expected = storage.clone()
    expected[[3, 6, 2]] = storage[[0, 1, 5]]
    ops.copy_states(storage, torch.tensor([(0, 3), (1, 6), (5, 2)], dtype=torch.int32, device="cuda"))
    assert torch.equal(storage, expected)
