"""Sharding of weights, layers and messages, as arithmetic."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.base.config import Limits, Mapping, RuntimeConfig
from stoker.builder.conversion.shard_plan import slice_shard
from stoker.core.specs import LinearSpec
from stoker.deploy.lmi.rank_names import rank_names
from stoker.distributed.group import Group
from stoker.distributed.inbox import Inboxes
from stoker.distributed.pipeline import stage_layers
from stoker.layers.shard import Sharding, kv_copies, kv_heads, local_spec, query_heads
from stoker.quant.format import Layout
from stoker.runtime.worker.capacity import Capacity
from stoker.runtime.worker.inputs import PackedStep, Shape
from stoker.runtime.worker_group.leader import WorkerGroup

SIZES = st.integers(1, 9)


@given(kv=st.integers(1, 12), group=st.integers(1, 9), size=SIZES)
def test_every_query_head_is_on_one_rank_with_its_kv_head(kv: int, group: int, size: int) -> None:
    seen: list[int] = []
    for rank in range(size):
        queries, keys = query_heads(kv * group, kv, size, rank), kv_heads(kv, size, rank)
        assert len(queries) % len(keys) == 0
        group_size = len(queries) // len(keys)
        for i, head in enumerate(queries):
            if head is not None:
                seen.append(head)
                assert keys[i // group_size] == head // group
    assert sorted(seen) == list(range(kv * group))
    held = [head for rank in range(size) for head in kv_heads(kv, size, rank) if head is not None]
    assert sorted(held) == sorted(list(range(kv)) * kv_copies(kv, size))


def test_heads_of_smollm2_on_two_and_four_ranks() -> None:
    assert [query_heads(9, 3, 2, rank) for rank in range(2)] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, None, None, None]]
    assert [kv_heads(3, 4, rank) for rank in range(4)] == [[0], [1], [2], [None]]
    assert query_heads(32, 2, 4, 1) == list(range(8, 16)) and kv_heads(2, 4, 1) == [0]


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 40), columns=st.integers(1, 70), size=SIZES, unit=st.sampled_from([1, 2, 4, 8]))
def test_row_split_products_sum_to_the_product(rows: int, columns: int, size: int, unit: int) -> None:
    """Also with incomplete groups, and if some ranks get only zeros."""
    spec = LinearSpec(name="down", in_features=columns, parts=(rows,), split="row")
    sharding = Sharding(size=size, unit=unit)
    weight, x = torch.randn(rows, columns, dtype=torch.float64), torch.randn(columns, dtype=torch.float64)
    scale = torch.arange(-(-columns // unit) * rows).view(rows, -1)
    width = local_spec(spec, sharding).in_features
    total, scales = torch.zeros(rows, dtype=torch.float64), []
    for rank in range(size):
        part = slice_shard(spec, Layout(weight.shape, weight.dtype, 0, 1), weight, sharding, rank)
        scales.append(slice_shard(spec, Layout(scale.shape, scale.dtype, 0, 1, 1, unit), scale, sharding, rank))
        assert part.shape == (rows, width) and scales[-1].shape == (rows, -(-width // unit))
        mine = torch.nn.functional.pad(x, (0, size * width))[rank * width : (rank + 1) * width]
        total += part @ mine
    assert torch.allclose(total, weight @ x)
    assert torch.equal(torch.cat(scales, 1)[:, : scale.shape[1]], scale)


@given(layers=st.integers(1, 100), stages=st.integers(1, 16))
def test_stages_have_consecutive_layers_of_equal_numbers(layers: int, stages: int) -> None:
    split = [stage_layers(layers, stages, i) for i in range(stages)]
    assert [layer for part in split for layer in part] == list(range(layers))
    assert max(map(len, split)) - min(map(len, split)) <= 1 and len(split[-1]) <= len(split[0])


@pytest.mark.parametrize(
    ("kib", "ranks", "is_two_shot"),
    [(16, 4, False), (256, 4, True), (4096, 2, False), (32, 8, False), (256, 8, True), (4097, 4, None), (0, 2, None)],
)
def test_the_algorithm_of_an_all_reduce_depends_on_the_message_size(kib: int, ranks: int, is_two_shot: bool | None) -> None:
    group = Group()
    assert group.inbox(kib << 10) is None
    group.inboxes = Inboxes([0] * ranks, 0, torch.device("cpu"))
    inbox = group.inbox(kib << 10)
    assert (inbox and inbox.is_two_shot) is is_two_shot


@pytest.mark.parametrize("num_sequences", [1, 8, 4096])
def test_a_record_holds_every_padded_step(num_sequences: int, tmp_path: Path) -> None:
    """Captured steps may have more rows than sequences, and every row has a block table of the largest width."""
    capacity = Capacity(max_batch_size=256, max_num_sequences=num_sequences, max_num_tokens=2048, max_seq_len=1 << 17)
    engine = SimpleNamespace(config=SimpleNamespace(mapping=Mapping(), limits=Limits(tokens_per_block=64)), path=tmp_path)
    ranks = WorkerGroup(engine, RuntimeConfig(), capacity, {0: torch.device("cpu")})  # type: ignore[arg-type]  # without followers
    try:
        for rows, tokens in ((8, 2048), (64, 2048), (256, 2048), (256, 256)):
            packed = PackedStep(torch.empty(0), Shape(tokens, rows, tokens == rows), 2048, rows, rows, 0, tokens, 1 << 17, True, [])
            assert packed.buffer_size <= ranks.record_size
    finally:
        ranks.close()


def test_names_of_rank_engines_in_lmi_repositories() -> None:
    assert rank_names("float16", Mapping(tensor_parallel=2)) == ["trt_llm_model_float16_tp2_rank0", "trt_llm_model_float16_tp2_rank1"]
    both = Mapping(tensor_parallel=2, pipeline_parallel=2)
    assert rank_names("bfloat16", both)[3] == "trt_llm_model_bfloat16_tp2_pp2_rank3"
