"""The tokens of rows on the device, in the interpreter and in PyTorch: corrected positions, and prompt lookup."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
import torch
from torch import Tensor

from stoker.core.forward_batch import ForwardBatch
from stoker.kernels.reference import row_tokens as reference
from stoker.kernels.triton import row_tokens as kernels
from stoker.kernels.types import RowTokens

EACH = pytest.mark.parametrize("module", [reference, kernels], ids=["reference", "triton"])
ROWS, SIZE, WIDTH = 6, 4, 16  # of the device buffers; tokens of a block, of the text of a row


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def known(texts: dict[int, list[int]]) -> RowTokens:
    """The tokens of some rows. Others are unknown."""
    lengths, text = torch.full((ROWS + 1,), 1 << 30, dtype=torch.int32), torch.zeros(ROWS + 1, WIDTH, dtype=torch.int32)
    for row, tokens in texts.items():
        lengths[row] = len(tokens)
        for at, token in enumerate(tokens):
            text[row, at % WIDTH] = token
    return RowTokens(lengths, text)


def looked_up(tokens: list[int], count: int) -> list[int]:
    """What followed the last earlier occurrence of the longest run of newest tokens, by comparing lists."""
    tokens = tokens[-WIDTH:]
    for size in (5, 3, 2):
        for end in reversed(range(size, len(tokens))):
            if tokens[end - size : end] == tokens[-size:]:
                return ((tokens[end:]) * count)[:count]
    return tokens[-1:] * count


@EACH
@pytest.mark.parametrize("seed", range(4))
def test_a_step_that_was_planned_too_far(module: ModuleType, seed: int) -> None:
    """Rows with and without drafts, planned before 0 to 5 drafts were rejected, a prompt, and padding."""
    rng = random.Random(seed)
    texts = {row: [rng.randrange(3) for _ in range(rng.randrange(1, 40))] for row in (4, 0, 2, 5, 1)}
    rows = list(texts)
    counts = [1, 1, 4, 6, 3]  # tokens of each row of the step
    late = [0, rng.randrange(1, 6), 0, rng.randrange(1, 6), 0]  # rejected drafts
    begins = [len(texts[row]) - 1 for row in rows]
    prompt = rows[4]
    texts[prompt] += [0] * 5
    begins[4] = len(texts[prompt]) - 3
    tables = torch.tensor([rng.sample(range(100), 16) for _ in range(len(rows) + 1)], dtype=torch.int32)
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    planned = [[begin + ahead + i for i in range(count)] for begin, ahead, count in zip(begins, late, counts, strict=True)]
    right = [[begin + i for i in range(count)] for begin, count in zip(begins, counts, strict=True)]
    slots = [[int(tables[i, at // SIZE]) * SIZE + at % SIZE for at in positions] for i, positions in enumerate(planned)]
    ids = [-9, 7, -2, 40, 41, 42, -3, -1, -2, -3, -4, -5, 1, 2, 0]
    expected_ids = [*ids[:7], *looked_up(texts[rows[3]], 5), *ids[12:]]
    flat = [at for positions in planned for at in positions]
    batch = ForwardBatch(
        token_ids=ints([*ids, 0]), positions=ints([*flat, 0]), slots=ints([*(slot for row in slots for slot in row), -1]),
        query_starts=ints([*starts, len(flat)]), seq_lens=ints([*(positions[-1] + 1 for positions in planned), 0]), block_tables=tables,
        num_decodes=0, max_query_len=6, max_seq_len=64, state_slots=ints([*rows, ROWS]),
    )  # fmt: skip
    # The prompt samples after its last token; every other row after each.
    counters = [at + 1 for positions in planned[:4] for at in positions] + [planned[4][-1] + 1]
    found = ints([*counters, 0, 0])
    firsts = ints([0, 1, 2, 6, 12, 13, 13])
    module.continue_rows(batch, ints([*rows, ROWS]), firsts, found, known(texts), SIZE)
    assert batch.token_ids.tolist() == [*expected_ids, 0]
    assert batch.positions.tolist() == [*(at for positions in right for at in positions), 0]
    assert batch.seq_lens.tolist() == [*(positions[-1] + 1 for positions in right), 0]
    expected_slots = [int(tables[i, at // SIZE]) * SIZE + at % SIZE for i, positions in enumerate(right) for at in positions]
    assert batch.slots.tolist() == [*expected_slots, -1]
    assert found.tolist() == [*(at + 1 for positions in right[:4] for at in positions), right[4][-1] + 1, 0, 0]


@EACH
def test_decodes_without_drafts(module: ModuleType) -> None:
    """Each sequence has one counter. Rows that the device does not know are not changed."""
    texts = {3: [1] * 9, 1: [2] * 5}
    batch = ForwardBatch(
        token_ids=ints([-4, -2, 5, 0]), positions=ints([11, 4, 20, 0]), slots=ints([23, 0, 7, -1]), query_starts=ints([0, 1, 2, 3, 3]),
        seq_lens=ints([12, 5, 21, 0]), block_tables=torch.arange(40, dtype=torch.int32).view(4, 10), num_decodes=4, max_query_len=1,
        max_seq_len=32, state_slots=ints([3, 1, 0, ROWS]),
    )  # fmt: skip
    counters = ints([12, 5, 21, 0])
    module.continue_rows(batch, batch.state_slots, None, counters, known(texts)._replace(text=None), SIZE)
    assert batch.token_ids.tolist() == [-4, -2, 5, 0] and batch.positions.tolist() == [8, 4, 20, 0]
    assert batch.slots.tolist() == [2 * SIZE, 0, 7, -1]
    assert batch.seq_lens.tolist() == counters.tolist() == [9, 5, 21, 0]


@EACH
@pytest.mark.parametrize("has_text", [True, False])
def test_yielded_tokens_are_appended(module: ModuleType, has_text: bool) -> None:
    tokens = known({2: list(range(14)), 0: [8]})
    tokens = tokens if has_text else tokens._replace(text=None)
    before = None if tokens.text is None else tokens.text.clone()
    ids = torch.tensor([[21, 22, 23, 24], [-1, -1, -1, -1], [9, 9, 9, 9]], dtype=torch.int32)
    module.append_tokens(tokens, ints([2, 0, ROWS]), ids, ints([3, 0, 2]))
    module.append_tokens(tokens, ints([0]), ints([30]).view(1, 1), None)
    assert tokens.lengths.tolist() == [3, 1 << 30, 18, *[1 << 30] * 4]
    if tokens.text is not None and before is not None:
        assert tokens.text[2].tolist() == [23, 24, *range(2, 14), 21, 22]
        assert tokens.text[0, :3].tolist() == [8, 0, 30]
        assert torch.equal(tokens.text[ROWS], before[ROWS])


@EACH
def test_lookup_in_a_long_text(module: ModuleType) -> None:
    """Texts of random and of repeated tokens, of which the ring has a part."""
    rng = random.Random(5)
    for _ in range(12):
        part = [rng.randrange(4) for _ in range(rng.randrange(1, 6))]
        tokens = [rng.randrange(4) for _ in range(rng.randrange(30))] + part * rng.randrange(1, 4)
        batch = ForwardBatch(
            token_ids=ints([-1] * 10), positions=torch.arange(len(tokens) - 1, len(tokens) + 9, dtype=torch.int32), slots=ints([0] * 10),
            query_starts=ints([0, 10]), seq_lens=ints([len(tokens) + 9]), block_tables=torch.zeros(1, 20, dtype=torch.int32),
            num_decodes=0, max_query_len=10, max_seq_len=80, state_slots=ints([1]),
        )  # fmt: skip
        module.continue_rows(batch, ints([1]), ints([0, 10]), batch.positions + 1, known({1: tokens}), SIZE)
        assert batch.token_ids.tolist() == [-1, *looked_up(tokens, 9)]
