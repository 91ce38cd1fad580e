"""The inputs of a step: random plans are packed on the host and unpacked to a ForwardBatch."""

from __future__ import annotations

import random

import pytest
import torch
from drive import Driven, request
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.base.types import FinishReason, SamplingParams
from stoker.runtime.request import NO_ADAPTER, TokenRequest
from stoker.runtime.request import Sequence as TokenSequence
from stoker.runtime.schedule.scheduler import Scheduler
from stoker.runtime.worker.dummy_step import ONE_LAUNCH_ROWS, Bounds, fill_dummy_step, static_buffer_size
from stoker.runtime.worker.inputs import InputBuilder, Shape

SIZE, NUM_BLOCKS = 4, 64


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 32), num_adapters=st.integers(0, 3), is_padded=st.booleans())
def test_tokens_have_the_positions_slots_and_adapter_of_their_row(seed: int, num_adapters: int, is_padded: bool) -> None:
    rng = random.Random(seed)
    scheduler = Scheduler(
        num_blocks=NUM_BLOCKS, tokens_per_block=SIZE, max_batch_size=4, max_num_tokens=12, max_seq_len=40, num_adapters=num_adapters
    )
    builder = InputBuilder(num_rows=4, max_blocks=10, block_size=SIZE, device=torch.device("cpu"))
    for i in range(4):
        prompt = [rng.randrange(100) for _ in range(rng.randrange(1, 20))]
        params = SamplingParams(max_tokens=rng.randrange(1, 6))
        call = TokenRequest(request_id=str(i), prompt_ids=prompt, params=params, adapter=rng.randrange(-1, num_adapters))
        scheduler.add(TokenSequence(i, call, 0, 0.0))
    while scheduler.has_work:
        plan = scheduler.plan(0.0)
        shape = Shape(plan.num_tokens + 3, len(plan) + 1, is_decode=False) if is_padded else None
        packed = builder.pack(plan, shape)
        batch = builder.unpack(packed).batch
        rows = list(zip(plan.sequences, plan.starts, plan.num_new, strict=True))
        tokens = [(seq, position) for seq, start, num_new in rows for position in range(start, start + num_new)]
        padding = packed.shape.tokens - len(tokens)
        assert batch.token_ids.tolist() == [seq.tokens[position] for seq, position in tokens] + [0] * padding
        assert batch.positions.tolist() == [position for _, position in tokens] + [0] * padding
        slots = [seq.blocks[position // SIZE] * SIZE + position % SIZE for seq, position in tokens]
        assert batch.slots.tolist() == slots + [-1] * padding
        if all(seq.adapter == NO_ADAPTER for seq, *_ in rows):
            assert batch.adapter_ids is None
        else:
            assert batch.adapter_ids is not None and batch.adapter_ids.dtype == torch.int32
            assert batch.adapter_ids.tolist() == [seq.adapter for seq, _ in tokens] + [NO_ADAPTER] * padding
        scheduler.commit(plan, [[7] if samples else [] for samples in plan.samples])


@pytest.mark.parametrize("rows", [ONE_LAUNCH_ROWS, ONE_LAUNCH_ROWS + 3])
def test_a_captured_step_reads_its_plan(rows: int) -> None:
    """A graph reads views of a buffer, to which the inputs of each step with its shape are copied."""
    scheduler = Scheduler(num_blocks=NUM_BLOCKS, tokens_per_block=SIZE, max_batch_size=4, max_num_tokens=12, max_seq_len=40)
    builder = InputBuilder(num_rows=4, max_blocks=10, block_size=SIZE, device=torch.device("cpu"))
    params = SamplingParams(max_tokens=6)
    for i in range(4):
        scheduler.add(TokenSequence(i, TokenRequest(request_id=str(i), prompt_ids=[*range(5 + 9 * i)], params=params), 0, 0.0))
    shape, tables = Shape(16, rows, is_decode=False), torch.zeros(rows, 10, dtype=torch.int32)
    static = torch.zeros(static_buffer_size(16, rows, 10), dtype=torch.int32)
    batch = fill_dummy_step(static, tables, shape, Bounds.of_graph(shape, 40), 4).batch
    kinds = set()
    while scheduler.has_work:
        plan = scheduler.plan(0.0)
        packed = builder.pack(plan, shape)
        expected = builder.unpack(packed).batch
        builder.send(packed, static, tables)
        for name in ("positions", "slots", "query_starts", "seq_lens", "state_slots", "logits_idx", "split_tokens"):
            assert torch.equal(getattr(batch, name), getattr(expected, name)), name
        assert torch.equal(batch.block_tables[:, : packed.width], expected.block_tables)
        assert batch.row_count is not None and batch.row_count.tolist() == [len(plan)]
        if rows > ONE_LAUNCH_ROWS:
            assert batch.decode_count is not None and batch.decode_count.tolist() == [plan.num_decodes]
        else:
            assert batch.decode_count is None, "decodes are computed as prompts"
        kinds.add((plan.num_decodes > 0, plan.num_prefill_tokens > 0))
        scheduler.commit(plan, [[7] if samples else [] for samples in plan.samples])
    assert kinds == {(False, True), (True, True), (True, False)}


def test_a_request_for_an_adapter_is_rejected_without_effect_on_others(drive: type[Driven], prompts: list[list[int]]) -> None:
    driven = drive()
    call = request(prompts[0], max_tokens=2)
    call.adapter = 0
    rejected, other = driven.run(call, request(prompts[0], max_tokens=2))
    assert rejected.reason is FinishReason.ERROR and rejected.error is not None and rejected.error.status == 400
    assert rejected.error.message == "adapter=0 is refused: the engine has no such adapter; it has none. Use -1 for no adapter."
    assert other.reason is FinishReason.LENGTH


@pytest.mark.parametrize(("adapter", "is_accepted"), [(-2, False), (-1, True), (0, True), (1, True), (2, False)])
def test_the_adapter_of_a_request_must_exist(adapter: int, is_accepted: bool) -> None:
    scheduler = Scheduler(num_blocks=8, tokens_per_block=SIZE, max_batch_size=4, max_num_tokens=12, max_seq_len=30, num_adapters=2)
    call = TokenRequest(request_id="r", prompt_ids=[1], params=SamplingParams(), adapter=adapter)
    if is_accepted:
        scheduler.check(call)
    else:
        with pytest.raises(Exception, match="its indices are 0 to 1"):
            scheduler.check(call)
