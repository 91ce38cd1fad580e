"""The length of the splits of decode attention, from the lengths of the rows of a step."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.base.types import SamplingParams
from stoker.core.model_config import AttentionConfig, LayerConfig, MLAConfig, ModelConfig, NormConfig, RopeConfig
from stoker.kernels.types import LONG_SPLIT, SHORT_SPLIT
from stoker.runtime.request import Sequence, TokenRequest
from stoker.runtime.schedule.scheduler import Scheduler
from stoker.runtime.worker.inputs import InputBuilder, Shape
from stoker.runtime.worker.split_length import KEY_TILE, SPLIT_COST, num_resident_rows, split_length

RESIDENT = 66.0  # rows of 8 KV heads on an H200


def lengths(*rows: tuple[int, int]) -> np.ndarray:
    """The lengths of rows given as (count, length)."""
    return np.repeat([length for _, length in rows], [count for count, _ in rows]).astype(np.int32)


@pytest.mark.parametrize("rows", [48, 64, 128, 256, 1024])
@pytest.mark.parametrize("length", [300, 1100, 2100])
def test_rows_of_equal_lengths_that_fill_the_device_are_not_cut(rows: int, length: int) -> None:
    assert split_length(lengths((rows, length)), RESIDENT) == LONG_SPLIT


def test_rows_of_nearly_equal_lengths_are_not_cut() -> None:
    assert split_length(np.linspace(1032, 1160, 64).astype(np.int32), RESIDENT) == LONG_SPLIT


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (((32, 300), (1, 4000)), SHORT_SPLIT),  # measured: 24 µs, uncut 68
        (((32, 2000), (1, 4000)), 1088),  # measured: about 54 µs, uncut 75
        (((33, 2100),), 1088),  # half of the CTAs that the device holds
        (((33, 1100),), LONG_SPLIT),  # the same, but combining takes longer than it saves
        (((64, 300), (1, 4000)), SHORT_SPLIT),
        (((128, 1000), (1, 4000)), 1024),
        (((256, 1000), (1, 4000)), 1024),
        (((64, 2000), (1, 8000)), 2112),
        (((5, 4000),), SHORT_SPLIT),  # the decodes of a captured step with prompts, which has room for 64
        (((1, 100_000), (200, 100)), 640),
        (((300, 20_000), (1, 100_000)), LONG_SPLIT),
    ],
)
def test_long_rows_are_cut(rows: tuple[tuple[int, int], ...], expected: int) -> None:
    assert split_length(lengths(*rows), RESIDENT) == expected
    assert split_length(lengths(*rows)[::-1], RESIDENT) == expected


def test_no_rows_and_an_unknown_device() -> None:
    assert split_length(lengths(), RESIDENT) == LONG_SPLIT
    assert split_length(lengths((32, 300), (1, 4000)), 0.0) == LONG_SPLIT


@given(lens=st.lists(st.integers(1, 200_000), min_size=1, max_size=300), resident=st.sampled_from([4.0, 16.5, 66.0, 528.0]))
def test_a_cut_shortens_the_longest_row_by_more_than_it_costs(lens: list[int], resident: float) -> None:
    length = split_length(np.array(lens, dtype=np.int32), resident)
    assert SHORT_SPLIT <= length <= LONG_SPLIT and length % KEY_TILE == 0
    if length < LONG_SPLIT:
        assert length + SPLIT_COST < max(lens)
        assert length >= min(sum(lens) / resident, sum(lens) / len(lens))


def test_a_step_has_the_length_for_its_decodes() -> None:
    """Prompts of the step do not count, and its padding neither."""
    scheduler = Scheduler(num_blocks=256, tokens_per_block=64, max_batch_size=4, max_num_tokens=8000, max_seq_len=6000)
    builder = InputBuilder(4, 94, 64, torch.device("cpu"), resident_rows=RESIDENT)
    for i, count in enumerate((4000, 300, 200)):
        call = TokenRequest(request_id=str(i), prompt_ids=[i] * count, params=SamplingParams(max_tokens=9))
        scheduler.add(Sequence(i, call, 0, 0.0))
    found = []
    for step in range(3):
        plan = scheduler.plan(0.0)
        packed = builder.pack(plan, Shape(plan.num_tokens + 5, len(plan) + 2, is_decode=False) if step == 1 else None)
        batch = builder.unpack(packed).batch
        assert batch.split_tokens is not None and batch.split_tokens.dtype == torch.int32
        found.append((plan.num_decodes, batch.split_tokens.tolist()))
        scheduler.commit(plan, [[7] for _ in plan.samples])
        if step == 1:
            call = TokenRequest(request_id="prompt", prompt_ids=[9] * 5000, params=SamplingParams(max_tokens=9))
            scheduler.add(Sequence(9, call, 0, 0.0))
    assert found == [(0, [LONG_SPLIT]), (3, [SHORT_SPLIT]), (3, [SHORT_SPLIT])]


LATENT = MLAConfig(
    num_heads=128, q_rank=None, kv_rank=512, rope_size=64, nope_size=128, v_size=128, rope=RopeConfig(dim=64), norm=NormConfig()
)


@pytest.mark.parametrize(
    ("attention", "tensor_parallel", "expected"),
    [
        (AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128), 1, 66.0),
        (AttentionConfig(num_heads=64, num_kv_heads=8, head_size=64), 4, 264.0),
        (AttentionConfig(num_heads=32, num_kv_heads=2, head_size=128), 4, 528.0),
        (AttentionConfig(num_heads=8, num_kv_heads=4, head_size=256), 1, 66.0),
        (AttentionConfig(num_heads=40, num_kv_heads=1, head_size=128), 1, 264.0),  # two tiles of query heads
        (LATENT, 1, 33.0),
        (LATENT, 8, 132.0),
        (None, 1, 0.0),
    ],
)
def test_rows_that_are_resident_at_the_same_time(
    attention: AttentionConfig | MLAConfig | None, tensor_parallel: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = (LayerConfig(norm=NormConfig()), LayerConfig(attention=attention, norm=NormConfig()))
    model = ModelConfig(architecture="Test", vocab_size=9, hidden_size=64, max_positions=64, layers=layers, norm=None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    assert num_resident_rows(model, tensor_parallel, torch.device("cuda", 0)) == expected
    assert num_resident_rows(model, tensor_parallel, torch.device("cpu")) == 0.0
