"""The step plan and the step outcome: plain data, without torch."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from stoker.runtime.kv.tiers import NO_TRANSFERS, BlockTransfer
from stoker.runtime.request import Sequence
from stoker.runtime.schedule.draft_paths import Move

NO_DRAFTS: Seq[int] = ()


class StepPlan:
    """One step, as parallel lists over its rows.

    Rows are in this order: decodes (one new token after a completed prefill), decodes that also verify draft tokens, prefills.

    sequences[i]: the sequence of row i.
    starts[i]: the position of the row's first new token. While an earlier step that verifies drafts of the same sequence is not
        committed, this is an upper bound: the position is lower by the number of drafts that the earlier step rejects.
    num_new[i]: the number of tokens to compute, drafts included.
    samples[i]: whether the row yields tokens, that is, whether its last token is the newest of the sequence.
    drafts[i]: ids of the draft tokens that follow the newest token; -1 for an id that only the device knows. A row with k drafts
        computes k + 1 tokens and yields 1 to k + 1 tokens: the accepted drafts, and the token sampled after them.
    parents[i]: the node after which each of these drafts is proposed: 0 is the newest token, j the draft j - 1. A `range` is a chain.
        Drafts with the same parent are different tokens.
    adapters: the adapter index of each row, NO_ADAPTER for none; None if no row has an adapter.
    state_restores: (sequence, slot) of snapshots that are copied to the states of the sequences before the step is computed.
    state_saves: (sequence, number of its tokens, slot) of the states that are copied to slots for snapshots after it was computed.
    moves: copies of keys and values between slots, which are performed in order before the step is computed: those of the accepted
        drafts of trees (see `draft_paths`).
    transfers: copies between tiers of the KV cache, which are performed in order before the step is computed.
    num_wanted: the largest number of drafts of a row that the next step can verify, which a drafter computes in this step. With 0 it
        computes the tokens of the step only; with None it does not run.
    catch_up: the rows of another step, which the drafter computes before: tokens of earlier steps in which it did not run.
    num_decodes: the number of rows that have one new token after a completed prefill.
    num_tokens, num_prefill_tokens: the tokens of all rows, and those of prefill rows.
    parts: with data-parallel ranks, the plan of each rank, which may have no rows. The lists of this plan then have the rows of rank 0, in
        the order above, followed by those of rank 1, and so on.
    """

    __slots__ = (
        "adapters", "catch_up", "drafts", "moves", "num_decodes", "num_new", "num_prefill_tokens", "num_tokens", "num_wanted", "parents",
        "parts", "samples", "sequences", "starts", "state_restores", "state_saves", "transfers",
    )  # fmt: skip

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.starts: list[int] = []
        self.num_new: list[int] = []
        self.samples: list[bool] = []
        self.drafts: list[Seq[int]] = []
        self.parents: list[Seq[int]] = []
        self.adapters: list[int] | None = None
        self.state_restores: list[tuple[Sequence, int]] = []
        self.state_saves: list[tuple[Sequence, int, int]] = []
        self.moves: list[Move] = []
        self.transfers: Seq[BlockTransfer] = NO_TRANSFERS
        self.num_wanted: int | None = None
        self.catch_up: StepPlan | None = None
        self.num_decodes = 0
        self.num_tokens = 0
        self.num_prefill_tokens = 0
        self.parts: Seq[StepPlan] = ()

    @staticmethod
    def joined(parts: Seq[StepPlan]) -> StepPlan:
        """The plan of all data-parallel ranks, from that of each."""
        plan = StepPlan()
        plan.parts = parts
        for part in parts:
            plan.sequences += part.sequences
            plan.starts += part.starts
            plan.num_new += part.num_new
            plan.samples += part.samples
            plan.drafts += part.drafts
            plan.parents += part.parents
            plan.num_decodes += part.num_decodes
            plan.num_tokens += part.num_tokens
            plan.num_prefill_tokens += part.num_prefill_tokens
        return plan

    @property
    def prefill_rows(self) -> list[int]:
        """The indices of the rows that compute tokens of prompts, or of a sequence that was preempted."""
        rows, first = list[int](), 0
        for part in self.parts or (self,):
            num_prefill = 0
            for row in reversed(range(len(part))):
                if num_prefill == part.num_prefill_tokens:
                    break
                num_prefill += part.num_new[row]
                rows.append(first + row)
            first += len(part)
        return rows

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.sequences)


class StepOutcome:
    """The result of a committed step. `token_ids[i]` (at least one id) was appended to `sequences[i]`.

    `finished` lists the sequences that this step ended; finish_reason and stop_id are set. They are in `sequences` too.
    Rows that yielded no token, and rows whose sequence had ended before, are in neither list.
    """

    __slots__ = ("finished", "sequences", "token_ids")

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.token_ids: list[list[int]] = []
        self.finished: list[Sequence] = []
