"""Requests, sequences and outputs in token ids: the messages to and from the executor, and its state of each sequence."""

from __future__ import annotations

import enum
import random
from typing import Any

import msgspec

from stoker.base.types import AdmissionRecord, FinishReason, PrefillChunk, SamplingParams, TokenLogprobs
from stoker.core.prefix_lm import BidirectionalPrefix
from stoker.runtime.transfer.ticket import Ticket

NO_ADAPTER = -1


class TokenRequest(msgspec.Struct, kw_only=True):
    """One client call in token ids. Its `params.n` sequences have the same prompt."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    end_ids: tuple[int, ...] = ()  # the model's end ids; empty when ignore_eos
    priority: int = 0  # lower values are admitted first
    timeout_s: float | None = None  # deadline in seconds after the executor received the request
    cache_salt: str = ""  # sequences share cached blocks only with equal salts
    adapter: int = NO_ADAPTER  # index of a low-rank adapter of the engine
    max_drafts: int | None = None  # largest number of drafts per step; None: that of the executor
    draft_ids: list[int] = []  # what the answer is expected to contain, which the proposers `request` and `ngram` use
    draft_logits: bytes = b""  # float32 [draft_ids, vocab]: the logits from which draft_ids were sampled; empty if unknown
    traced: bool = False  # whether the first outputs report when the prompt was computed
    transfer: Ticket | None = None  # the prompt is computed for another executor, or by one
    whole: bool = False  # the client does not use outputs between the first and the last of a sequence before the last arrives


class ErrorInfo(msgspec.Struct, frozen=True):
    """An error in a form that can be sent to another process."""

    code: str
    message: str
    status: int = 500
    retry_after_s: float | None = None
    field: str = ""  # the next three are of a RequestError
    limit: str = ""
    cure: str = ""


class SequenceOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    """New tokens of one sequence since its previous output. Only the last output of a sequence has a finish_reason."""

    request_id: str
    index: int  # which of the request's n sequences
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_id: int | None = None  # the end or stop id that ended the sequence, which is the last of token_ids
    logprobs: list[TokenLogprobs] = []
    cached_tokens: int = 0  # in the first output: prompt tokens whose keys and values came from the cache
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # in the first output, if requested
    error: ErrorInfo | None = None  # with finish_reason ERROR
    admission: AdmissionRecord | None = None  # in the first output
    num_drafts: int = 0  # drafts that were verified so far, and those of them that were accepted
    num_accepted: int = 0
    prefill_chunks: list[PrefillChunk] = []  # in the first output of a traced request


class ExecutorStats(msgspec.Struct, kw_only=True):
    """Counters and gauges of one executor, for metrics, `stoker bench` and tests."""

    num_waiting: int = 0
    num_running: int = 0  # sequences that hold KV blocks
    num_paused: int = 0  # preempted and waiting to be admitted again
    num_blocks: int = 0
    num_free_blocks: int = 0  # unreferenced blocks, including cached ones
    num_cached_blocks: int = 0  # unreferenced blocks whose contents can be reused
    tokens_per_block: int = 0
    max_batch_size: int = 0
    num_steps: int = 0
    num_prefill_tokens: int = 0  # computed since the start
    num_decode_tokens: int = 0
    num_reused_tokens: int = 0  # prompt tokens whose keys and values came from the cache
    num_preemptions: int = 0
    token_limit: int = 0  # of the newest step with decodes; latency targets choose it
    proposer: str = "none"  # where drafts come from: none, ngram, request, engine, or the kind of the draft heads
    num_draft_steps: int = 0  # rows that verified drafts
    num_draft_tokens: int = 0  # verified, and those of them that were accepted
    num_accepted_draft_tokens: int = 0
    num_finished: int = 0
    num_cancelled: int = 0
    num_failed: int = 0
    num_costly_guides: int = 0  # sequences whose grammar exceeded the time or memory of a compilation
    last_step_rows: int = 0
    last_step_tokens: int = 0
    last_step_prefill_tokens: int = 0
    last_step_time_s: float = 0.0
    busy_time_s: float = 0.0  # time spent inside steps
    row_steps: int = 0  # sum of rows over steps; row_steps / num_steps is the mean batch size
    num_imports: int = 0  # prompts whose blocks were read from another executor
    num_failed_imports: int = 0  # that were computed here after a failure
    num_running_imports: int = 0
    imported_bytes: int = 0
    import_time_s: float = 0.0  # from the request to the last block, summed over imports
    import_read_time_s: float = 0.0  # the part of it after the first block was known and the blocks for it were free
    num_exports: int = 0  # prompts that another executor has read
    num_failed_exports: int = 0  # whose blocks were released without that
    num_held_exports: int = 0
    weight_bytes: int = 0
    kv_bytes: int = 0
    heartbeat_s: float = 0.0  # monotonic time at which the last iteration of the step loop ended


PrefixRoot = str | tuple[int, str]  # the cache salt, or (adapter, cache salt)


class Status(enum.IntEnum):
    WAITING = 0
    RUNNING = 1  # holds blocks
    FINISHED = 2  # holds blocks until no planned step contains it
    LEAVING = 3  # preempted: holds blocks until no planned step contains it, and then waits again


class Sequence:
    """One token stream: the unit of scheduling and of the KV cache. The scheduler decides from its counters.

    `num_computed` counts the tokens whose keys and values are written by planned steps, including steps in flight. `num_pending` counts
    the tokens that planned steps sample and whose ids the host does not know yet.
    """

    __slots__ = (
        "acceptance",
        "adapter",
        "admission",
        "announced_key",
        "arrival",
        "arrival_order",
        "bidirectional_prefix",
        "blocks",
        "deadline",
        "decode_snapshot",
        "draft_limit",
        "drafts_ahead",
        "end_ids",
        "fault",
        "finish_reason",
        "grammar",
        "index",
        "is_postponed",
        "max_computed",
        "max_tokens",
        "min_tokens",
        "num_cached",
        "num_computed",
        "num_drafted",
        "num_drafter_computed",
        "num_hashed",
        "num_in_flight",
        "num_pending",
        "num_preemptions",
        "num_prefill",
        "num_prompt",
        "num_tabled_blocks",
        "packed_blocks",
        "params",
        "prefill_chunks",
        "prefix",
        "prefix_root",
        "priority",
        "proposal",
        "rank",
        "reads_drafts",
        "request",
        "request_id",
        "row",
        "seed",
        "seq_id",
        "snapshot_at",
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
        self.adapter = request.adapter
        self.tokens: list[int] = list(request.prompt_ids)  # prompt and generated ids that the host knows
        self.num_prompt = len(self.tokens)
        self.max_tokens = request.params.max_tokens  # the scheduler lowers it to the engine's limit
        self.min_tokens = request.params.min_tokens  # set to 0 when the grammar allows only an end id
        self.end_ids = frozenset((*request.end_ids, *request.params.stop_token_ids))
        self.priority = request.priority
        self.arrival = self.arrival_order = arrival
        self.is_postponed = False  # it is late, and waits behind sequences that are not
        self.deadline = arrival + request.timeout_s if request.timeout_s is not None else None
        self.status = Status.WAITING
        self.num_computed = 0
        self.num_pending = 0
        self.num_drafter_computed = 0  # tokens whose keys and values a draft engine has; see DrafterProgress
        self.num_drafted = 0  # drafts that its newest planned step computes on the device for the next one
        self.num_in_flight = 0  # planned steps that contain it and are not committed
        self.admission: AdmissionRecord | None = None  # its first one
        self.num_cached = 0  # prompt tokens reused when it was first admitted
        self.num_hashed = 0  # blocks that are in the prefix index
        self.blocks: list[int] = []  # the block table
        self.packed_blocks: list[bytes] = []  # token ids of leading full blocks, as the prefix index compares them
        self.num_tabled_blocks = 0  # leading blocks that the worker's copy of the table contains
        self.seed = _sequence_seed(request.params.seed, index)
        self.row = -1  # index in the device buffers while it holds blocks
        self.rank = -1  # the data-parallel rank that computes it, from the first admission on
        self.prefill_chunks: list[PrefillChunk] = _NO_CHUNKS  # of a traced request, up to its first token
        self.num_prefill = 0  # tokens known at the last admission, which are computed before it samples
        self.max_computed = 0  # tokens whose keys and values can be needed: all but the last one; set by Scheduler.add
        self.num_preemptions = 0
        # waits_for_ids: no step is planned while an id is pending: the grammar or the list of bad words needs it first.
        # reads_drafts: the host must know the ids of drafts, for the same reason.
        self.waits_for_ids = self.reads_drafts = request.params.guide is not None or bool(request.params.bad_words)
        # drafts_ahead: its steps with drafts may be planned while ids are pending, because the device finds its positions and drafts.
        self.drafts_ahead = False
        # Parent of its first block in the prefix index. Only sequences with equal roots share blocks.
        self.prefix_root: PrefixRoot = request.cache_salt if request.adapter < 0 else (request.adapter, request.cache_salt)
        self.prefix: Any = self.prefix_root  # entry of its last block in the prefix index, or the root
        self.bidirectional_prefix: BidirectionalPrefix | None = None  # for a prefix LM
        self.grammar: Any = None  # the compiled guide
        self.snapshot_at: list[int] = []  # for recurrent states: positions at which a chunk of its prefill ends, in order
        self.decode_snapshot: Any = None  # entry of the block after which its newest snapshot of generated tokens was taken
        self.announced_key: Any = None  # key of the prompt block that it adds to the prefix index next
        self.acceptance: Any = None  # the drafts that were verified and accepted
        self.draft_limit: int | None = None  # the largest number of drafts for which its grammar is fast enough; None: any number
        self.proposal: Any = None  # the state that the draft proposer has for this sequence
        self.fault: ErrorInfo | None = None  # why no token can be sampled, if a sampling feature knows the reason
        self.finish_reason: FinishReason | None = None
        self.stop_id: int | None = None  # the end or stop id that ended the sequence

    @property
    def num_tokens(self) -> int:
        """The number of prompt and generated tokens, including those whose ids the host does not know yet."""
        return len(self.tokens) + self.num_pending

    @property
    def num_generated(self) -> int:
        """The number of generated tokens, including those whose ids the host does not know yet."""
        return len(self.tokens) + self.num_pending - self.num_prompt


_NO_CHUNKS: list[PrefillChunk] = []  # never changed; an untraced sequence needs no list of its own


def _sequence_seed(seed: int | None, index: int) -> int:
    """The seed of sequence `index` of a request, as a signed 64-bit number. It is random if the request has no seed."""
    if seed is None:
        seed = random.getrandbits(64)
    mixed = (seed + index * 0x9E3779B97F4A7C15) % 2**64
    return mixed - 2**64 if mixed >= 2**63 else mixed
