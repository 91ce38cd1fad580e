"""Requests and sequences at the level of token ids: what crosses to the executor, what it tracks, and what comes back."""

from __future__ import annotations

import enum
import random
from typing import Any

import msgspec

from stoker.base.types import FinishReason, SamplingParams, TokenLogprobs
from stoker.core.prefix_lm import BidirectionalPrefix


class TokenRequest(msgspec.Struct, kw_only=True):
    """One client call in token ids. Its `params.n` sequences share the prompt."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    end_ids: tuple[int, ...] = ()  # the model's end ids; empty when ignore_eos
    priority: int = 0  # lower is sooner
    timeout_s: float | None = None  # deadline, counted from the executor's receipt
    cache_salt: str = ""


class ErrorInfo(msgspec.Struct, frozen=True):
    """An error that crosses processes."""

    code: str
    message: str
    status: int = 500
    retry_after_s: float | None = None


class SequenceOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    """What one sequence gained since its last output. A finish_reason is set once, in the last one."""

    request_id: str
    index: int  # which of the request's n sequences
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_id: int | None = None  # the end or stop id that ended it; it is the last of token_ids
    logprobs: list[TokenLogprobs] = []
    cached_tokens: int = 0  # in a sequence's first output: prompt tokens whose KV was reused
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # in the first output, when asked for
    error: ErrorInfo | None = None  # with finish_reason ERROR


class ExecutorStats(msgspec.Struct, kw_only=True):
    """Counters and gauges of one executor, for metrics, `stoker bench` and tests."""

    num_waiting: int = 0
    num_running: int = 0  # sequences that hold KV blocks
    num_paused: int = 0  # preempted and waiting again
    num_blocks: int = 0
    num_free_blocks: int = 0  # unreferenced; may still hold cached prefixes
    num_cached_blocks: int = 0  # unreferenced blocks that hold a reusable prefix
    tokens_per_block: int = 0
    max_batch_size: int = 0
    num_steps: int = 0
    num_prefill_tokens: int = 0  # computed, all time
    num_decode_tokens: int = 0
    num_reused_tokens: int = 0  # prompt tokens served from the prefix index
    num_preemptions: int = 0
    num_finished: int = 0
    num_cancelled: int = 0
    num_failed: int = 0
    last_step_rows: int = 0
    last_step_tokens: int = 0
    last_step_prefill_tokens: int = 0
    last_step_time_s: float = 0.0
    busy_time_s: float = 0.0  # time spent inside steps
    row_steps: int = 0  # sum of rows over steps; divided by num_steps: mean batch occupancy
    weight_bytes: int = 0
    kv_bytes: int = 0
    heartbeat_s: float = 0.0  # monotonic clock of the last completed loop


class Status(enum.IntEnum):
    WAITING = 0
    RUNNING = 1  # holds blocks
    FINISHED = 2  # may still hold blocks: until no planned step contains it
    LEAVING = 3  # preempted: gives its blocks up, and waits again, once no planned step contains it


class Sequence:
    """One token stream: the unit of scheduling and of KV. Plain counters; the schedule is a function of them.

    `num_computed` counts tokens whose keys and values are written by steps already planned, the one in flight
    included. `num_pending` counts tokens that planned steps will sample but whose ids have not come back.
    """

    __slots__ = (
        "arrival",
        "bidirectional_prefix",
        "blocks",
        "deadline",
        "end_ids",
        "fault",
        "finish_reason",
        "front",
        "grammar",
        "index",
        "max_computed",
        "max_tokens",
        "min_tokens",
        "num_cached",
        "num_computed",
        "num_hashed",
        "num_in_flight",
        "num_pending",
        "num_preemptions",
        "num_prefill",
        "num_prompt",
        "params",
        "prefix",
        "priority",
        "request",
        "request_id",
        "row",
        "seed",
        "seq_id",
        "status",
        "stop_id",
        "tokens",
        "waits_for_ids",
    )  # fmt: skip

    def __init__(self, seq_id: int, request: TokenRequest, index: int, arrival: float) -> None:
        self.seq_id = seq_id
        self.request = request
        self.request_id = request.request_id
        self.index = index
        self.params = request.params
        self.tokens: list[int] = list(request.prompt_ids)  # prompt and generated ids known on the host
        self.num_prompt = len(self.tokens)
        self.max_tokens = request.params.max_tokens  # may be lowered to the engine's limit
        self.min_tokens = request.params.min_tokens  # 0 once its grammar can only end
        self.end_ids = frozenset(request.end_ids) | frozenset(request.params.stop_token_ids)
        self.priority = request.priority
        self.arrival = arrival
        self.deadline = arrival + request.timeout_s if request.timeout_s is not None else None
        self.status = Status.WAITING
        self.num_computed = 0
        self.num_pending = 0
        self.num_in_flight = 0  # planned steps not yet committed
        self.num_cached = 0  # prompt tokens reused at first admission
        self.num_hashed = 0  # blocks already in the prefix index
        self.blocks: list[int] = []  # the block table
        self.seed = _sequence_seed(request.params.seed, index)
        self.row = -1  # index in the device buffers while it holds blocks
        self.num_prefill = 0  # tokens known when it was admitted: computed before it samples (again)
        self.max_computed = 0  # tokens whose keys and values are ever needed: all but the last one; set when it is scheduled
        self.num_preemptions = 0
        # Not planned while an id is pending: the grammar or the list of bad words must see it first.
        self.waits_for_ids = request.params.guide is not None or bool(request.params.bad_words)
        self.prefix: Any = request.cache_salt  # the prefix index's entry of its last hashed block; at first, the salt
        self.bidirectional_prefix: BidirectionalPrefix | None = None  # of a prefix LM's prompt
        self.grammar: Any = None  # what its guide was compiled to
        self.front: Any = None  # key of the prompt block that it will add to the prefix index next
        self.fault: ErrorInfo | None = None  # why no token can be chosen for it, where that is known
        self.finish_reason: FinishReason | None = None
        self.stop_id: int | None = None  # the end or stop id that ended it

    @property
    def num_tokens(self) -> int:
        """Tokens that exist, those not yet read back included."""
        return len(self.tokens) + self.num_pending

    @property
    def num_generated(self) -> int:
        return len(self.tokens) + self.num_pending - self.num_prompt


def _sequence_seed(seed: int | None, index: int) -> int:
    """A sequence's own seed as a signed 64-bit number: each of a request's sequences draws differently."""
    if seed is None:
        seed = random.getrandbits(64)
    mixed = (seed + index * 0x9E3779B97F4A7C15) % 2**64
    return mixed - 2**64 if mixed >= 2**63 else mixed
