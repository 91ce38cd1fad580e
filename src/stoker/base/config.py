"""Settings that a user chooses: the limits and mapping of an engine, and how it is run. All values are frozen."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypedDict, get_args, get_origin

import msgspec

from stoker.base.draft_tree import MAX_TREE_NODES, DraftTree, DynamicTree, parse_tree
from stoker.base.env import MAX_THREADS
from stoker.base.errors import ConfigError, ConfigTypeError

DTYPES = ("float32", "float16", "bfloat16")
DEVICES = ("cpu", "cuda")
TOKENS_PER_BLOCK = (16, 32, 64, 128)
POLICIES = ("guaranteed_no_evict", "max_utilization", "static")  # modules of runtime.schedule.policies
_EVENT_ADDRESS = re.compile(r"tcp://[^\s/]+:(\d{1,5}|\*)|ipc://\S{1,107}")
ROLES = ("both", "prefill", "decode")
TRANSFER_BACKENDS = ("auto", "nixl", "tcp")
PROPOSERS = ("none", "ngram", "request")  # draft proposers without a drafter, of runtime.schedule.proposers
MAX_DRAFT_TOKENS = MAX_TREE_NODES
LOOKUP_SIZES = (5, 3, 2)  # numbers of newest tokens that a prompt lookup finds earlier in a text; longer runs are tried first
_DRAFT_TOKENS = 7  # of a chain, by default
_NOUNS = {int: "a whole number", float: "a number", bool: "True or False", str: "a string", tuple: "a list of whole numbers"}


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes that an engine is built for, named as in TensorRT-LLM. Requests and runtime settings must stay within them."""

    max_batch_size: int = 256
    """Sequences that are computed in one step."""

    max_input_len: int = 4096
    """Prompt tokens of a request."""

    max_output_len: int = 1024
    """New tokens of a request."""

    max_total_len: int | None = None
    """Prompt and new tokens of a request together. None: the sum of max_input_len and max_output_len."""

    max_beam_width: int = 1
    """Beams of a request with beam search."""

    max_num_tokens: int = 8192
    """Tokens of one step, prefill and decode together."""

    tokens_per_block: int = 64
    """Token positions of one KV cache block: 16, 32, 64 or 128."""

    def __post_init__(self) -> None:
        for name, high in (
            ("max_batch_size", 65536),
            ("max_input_len", 1 << 24),
            ("max_output_len", 1 << 24),
            ("max_beam_width", 10),
            ("max_num_tokens", 1 << 20),
        ):
            check_range(name, getattr(self, name), 1, high)
        if self.max_total_len is not None:
            check_range("max_total_len", self.max_total_len, 2, 1 << 24)
        check_choice("tokens_per_block", self.tokens_per_block, TOKENS_PER_BLOCK)

    @property
    def max_seq_len(self) -> int:
        """The largest number of tokens of one sequence, prompt and output together."""
        total = self.max_input_len + self.max_output_len
        return total if self.max_total_len is None else min(total, self.max_total_len)


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a request that are lower than those of the engine. None: that of the engine."""

    max_input_len: int | None = None
    max_output_len: int | None = None
    max_total_len: int | None = None
    max_beam_width: int | None = None

    def lower(self, limits: Limits) -> Limits:
        """A copy of `limits` with the values of this struct that are set. The caller has checked that they are lower."""
        given = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}
        return msgspec.structs.replace(limits, **given)


class Mapping(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is divided among devices. There is one rank file for each rank."""

    tensor_parallel: int = 1
    """Ranks that share each layer."""

    pipeline_parallel: int = 1
    """Stages of consecutive layers."""

    expert_parallel: bool = False
    """Distribute whole experts over the ranks of a stage, instead of a shard of every expert."""

    data_parallel: int = 1
    """Ranks among which the sequences are distributed. Each has complete attention weights and its own KV cache."""

    def __post_init__(self) -> None:
        check_range("tensor_parallel", self.tensor_parallel, 1, 1024)
        check_range("pipeline_parallel", self.pipeline_parallel, 1, 1024)
        check_range("data_parallel", self.data_parallel, 1, 1024)

    @property
    def stage_size(self) -> int:
        """The number of ranks of a pipeline stage."""
        return self.tensor_parallel * self.data_parallel

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.stage_size * self.pipeline_parallel

    @property
    def ranks(self) -> str:
        """Such as `2 ranks (tensor 2 × pipeline 1)`, for messages."""
        return f"{self.world_size} rank{'s' if self.world_size > 1 else ''} ({self})"

    def __str__(self) -> str:
        """Such as `tensor 2 × pipeline 1`, with the data-parallel ranks if there are several."""
        sizes = f"tensor {self.tensor_parallel} × pipeline {self.pipeline_parallel}"
        return sizes if self.data_parallel == 1 else f"{sizes} × data {self.data_parallel}"


class RuntimeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is run."""

    device: str | None = None
    """`cpu` or `cuda`. None: the device that the engine was built for."""

    devices: tuple[int, ...] | None = None
    """Index of the GPU of each rank. None: the first GPUs."""

    policy: str = "guaranteed_no_evict"
    """Scheduling policy, one of POLICIES."""

    max_batch_size: int | None = None
    """Sequences that are computed in one step, at most as many as the engine was built for, which is the default."""

    max_num_sequences: int | None = None
    """Sequences that hold KV cache blocks at the same time. None: max_batch_size."""

    max_num_tokens: int | None = None
    """Tokens of one step, at most as many as the engine was built for, which is the default."""

    chunked_prefill: bool = True
    """Spread the prefill of long prompts over several steps, together with decodes of other sequences."""

    target_itl_ms: float | None = None
    """Target of the inter-token latency in milliseconds. Steps with decodes compute only as many prompt tokens as let 99 of 100 steps
    reach it, by the measured times of earlier steps. None: max_num_tokens is the only limit."""

    target_ttft_ms: float | None = None
    """Target of the time to the first token in milliseconds. A prompt that cannot reach it any more waits behind those that can. Without
    target_itl_ms, steps with decodes compute only as many prompt tokens as it requires, which keeps the inter-token latency low."""

    prefix_reuse: bool = True
    """Retain full blocks of finished sequences for later prompts with the same prefix."""

    kv_cache_tokens: int | None = None
    """Token positions of the KV cache. If kv_cache_fraction is also set, the smaller cache is used."""

    kv_cache_fraction: float | None = None
    """Fraction, for the KV cache, of the memory that weights, the largest step and captured graphs leave free. None: 0.9 on a GPU, 0.5 on
    a CPU."""

    kv_cache_dtype: str | None = None
    """`auto`, or the dtype of the KV cache that the engine was built with; another one is refused. None: auto."""

    max_queue_size: int = 1024
    """Waiting requests. Further requests are refused with status 429."""

    guide_timeout_s: float = 10.0
    """Seconds for compiling the grammar of a guided request. The compilation is ended then, and the request refused with status 400."""

    guide_queue_size: int = 64
    """Grammars that wait while others are compiled. Further ones are refused with status 503; those in the cache never wait."""

    overlap: bool = True
    """Plan and launch step N + 1 while the device runs step N. GPU only."""

    cuda_graphs: bool = True
    """Capture decodes and short steps with prompts in CUDA graphs."""

    custom_all_reduce: bool = True
    """Sum short messages of tensor-parallel ranks directly in the memory of the other GPUs, instead of with NCCL."""

    attention_window: int | None = None
    """Attend only to this number of most recent tokens of a sequence."""

    speculate: str = "none"
    """Draft proposer of speculative decoding: `ngram` copies from the prompt and the answer, `request` verifies drafts that requests
    supply, `none` computes one token per step. Otherwise the directory of a draft engine, or of draft heads
    (Medusa, EAGLE, EAGLE-3, or a checkpoint with a multi-token prediction layer)."""

    draft_tokens: int | None = None
    """Largest number of draft tokens of a sequence per step, 1 to 63. None: all nodes of `draft_tree`, or 7 without one."""

    draft_tree: str | None = None
    """Tree of the drafts of a draft engine or of draft heads: paths of ranks such as [0],[0,0],[1], mc_sim_7b_63, or
    dynamic:DEPTH,WIDTH,TOKENS. None: one chain of drafts."""

    adaptive_drafts: bool = True
    """Verify fewer draft tokens, or none, where the measured acceptance and step times show that it is faster."""

    num_threads: int | None = None
    """CPU threads for computation. None: all cores."""

    step_timeout_s: float | None = None
    """Seconds after which a step counts as hung: the server is not ready, and its state is logged. None: 30 on a GPU, 120 on a CPU."""

    kv_events: str | None = None
    """ZeroMQ address on which events about KV cache blocks are published in vLLM's format, such as tcp://*:5557. They contain the
    token ids of prompts and answers. None: no events."""

    kv_events_replay: str | None = None
    """ZeroMQ address from which subscribers request events that they missed, such as tcp://*:5558. None: no replay."""

    kv_events_topic: str = ""
    """Topic of the events: the first frame of each message."""

    transfer: str | None = None
    """HOST:PORT at which other executors read KV cache blocks, such as 0.0.0.0:5600. None: no transfers."""

    role: str = "both"
    """What routers use this executor for, if it has a transfer address: `prefill` computes prompts for others, `decode` continues with
    prompts that others computed, `both` does both."""

    transfer_backend: str = "auto"
    """How blocks are copied: `nixl`, `tcp`, or `auto`: with NIXL if it is installed and both caches have the same format, else over TCP."""

    transfer_timeout_s: float = 10.0
    """Seconds after which a transfer without progress has failed, and after which unread blocks are released."""

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(self):
            typed_value(field.name, getattr(self, field.name), field.type)
        if self.device is not None:
            check_choice("device", self.device, DEVICES)
        check_choice("policy", self.policy, POLICIES)
        is_folder = "/" in self.speculate or (self.speculate != "" and Path(self.speculate).is_dir())
        if self.speculate not in PROPOSERS and not is_folder:
            choices = f"{', '.join(PROPOSERS)}, or a directory with a slash, such as ./{self.speculate or 'heads'}"
            raise ConfigError(f"speculate={self.speculate!r} is refused.", cure=f"Use one of: {choices}.")
        self._check_drafts()
        for name in ("max_batch_size", "max_num_sequences", "max_num_tokens", "kv_cache_tokens", "attention_window"):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), 1, 1 << 40)
        if self.num_threads is not None:
            check_range("num_threads", self.num_threads, 1, MAX_THREADS)
        for index in self.devices or ():
            check_range("devices", index, 0, 1023)
        check_range("max_queue_size", self.max_queue_size, 1, 1 << 24)
        check_range("guide_queue_size", self.guide_queue_size, 0, 1 << 24)
        if not 0.1 <= self.guide_timeout_s <= 3600.0:
            raise ConfigError(f"guide_timeout_s={self.guide_timeout_s} is refused.", cure="Use seconds, from 0.1 to 3600.")
        if self.kv_cache_fraction is not None and not 0.0 < self.kv_cache_fraction <= 1.0:
            raise ConfigError(f"kv_cache_fraction={self.kv_cache_fraction} is outside (0, 1].", cure="Use a fraction such as 0.9.")
        if self.step_timeout_s is not None and not 1.0 <= self.step_timeout_s <= 86400.0:
            raise ConfigError(f"step_timeout_s={self.step_timeout_s} is refused.", cure="Use seconds, from 1 to 86400.")
        self._check_targets()
        self._check_events()
        self._check_transfers()

    def _check_drafts(self) -> None:
        """Raise ConfigError for a number or a tree of drafts that is out of range. `base.draft_settings` finds those without an effect."""
        if self.draft_tokens is not None:
            check_range("draft_tokens", self.draft_tokens, 1, MAX_DRAFT_TOKENS)
        if (tree := self.tree) is not None and self.draft_tokens is not None and self.draft_tokens > len(tree):
            raise ConfigError(
                f"draft_tokens={self.draft_tokens} is refused: draft_tree has {len(tree)} nodes.",
                cure="Lower it, or add nodes to the tree.",
            )

    @property
    def tree(self) -> DraftTree | DynamicTree | None:
        """`draft_tree`, cut to `draft_tokens` nodes. Raises ConfigError."""
        if self.draft_tree is None:
            return None
        tree = parse_tree(self.draft_tree)
        return tree if self.draft_tokens is None or self.draft_tokens > len(tree) else tree.prefix(self.draft_tokens)

    @property
    def max_drafts(self) -> int:
        """The largest number of draft tokens of a sequence per step, whatever `speculate` is."""
        if self.draft_tokens is not None:
            return self.draft_tokens
        return _DRAFT_TOKENS if (tree := self.tree) is None else len(tree)

    def _check_targets(self) -> None:
        """Raise ConfigError for latency targets that are out of range, or that cannot have an effect."""
        for name in ("target_itl_ms", "target_ttft_ms"):
            if (value := getattr(self, name)) is None:
                continue
            if not 0.1 <= value <= 3_600_000.0:
                raise ConfigError(f"{name}={value} is refused.", cure="Use milliseconds, from 0.1 to 3600000.")
            if not self.chunked_prefill:
                raise ConfigError(f"{name}={value} needs chunked_prefill, which is false.", cure="Leave out one of them.")

    def _check_events(self) -> None:
        """Raise ConfigError for addresses of events that are malformed, or that have no effect."""
        for name in ("kv_events", "kv_events_replay"):
            if (address := getattr(self, name)) is not None and not _EVENT_ADDRESS.fullmatch(address):
                raise ConfigError(f"{name}={address!r} is refused.", cure="Use tcp://HOST:PORT, such as tcp://*:5557, or ipc://PATH.")
        if self.kv_events is None and (self.kv_events_replay is not None or self.kv_events_topic):
            name = "kv_events_topic" if self.kv_events_replay is None else "kv_events_replay"
            raise ConfigError(
                f"{name}={getattr(self, name)!r} has no effect without kv_events.", cure="Set kv_events, such as tcp://*:5557."
            )
        if self.kv_events is not None and not self.prefix_reuse:
            raise ConfigError("kv_events needs prefix_reuse: without it there are no events.", cure="Leave out one of them.")
        if len(self.kv_events_topic) > 256:
            raise ConfigError("kv_events_topic is longer than 256 characters.", cure="Shorten it.")

    def _check_transfers(self) -> None:
        """Raise ConfigError for settings of transfers that are out of range, or that have no effect."""
        check_choice("role", self.role, ROLES)
        check_choice("transfer_backend", self.transfer_backend, TRANSFER_BACKENDS)
        if self.transfer is None:
            for name, default in (("role", "both"), ("transfer_backend", "auto"), ("transfer_timeout_s", 10.0)):
                if getattr(self, name) != default:
                    raise ConfigError(f"{name}={getattr(self, name)} has no effect without transfer.", cure="Set transfer: HOST:PORT.")
        elif not self.prefix_reuse:
            raise ConfigError("transfer needs prefix_reuse: transferred blocks are cached blocks.", cure="Leave out one of them.")
        if not 0.1 <= self.transfer_timeout_s <= 3600.0:
            raise ConfigError(f"transfer_timeout_s={self.transfer_timeout_s} is refused.", cure="Use seconds, from 0.1 to 3600.")


class RuntimeSettings(TypedDict, total=False):
    """The fields of RuntimeConfig as the types of keyword arguments."""

    device: str | None
    devices: tuple[int, ...] | None
    policy: str
    max_batch_size: int | None
    max_num_sequences: int | None
    max_num_tokens: int | None
    chunked_prefill: bool
    target_itl_ms: float | None
    target_ttft_ms: float | None
    prefix_reuse: bool
    kv_cache_tokens: int | None
    kv_cache_fraction: float | None
    kv_cache_dtype: str | None
    max_queue_size: int
    guide_timeout_s: float
    guide_queue_size: int
    overlap: bool
    cuda_graphs: bool
    custom_all_reduce: bool
    attention_window: int | None
    speculate: str
    draft_tokens: int | None
    draft_tree: str | None
    adaptive_drafts: bool
    num_threads: int | None
    step_timeout_s: float | None
    kv_events: str | None
    kv_events_replay: str | None
    kv_events_topic: str
    transfer: str | None
    role: str
    transfer_backend: str
    transfer_timeout_s: float


def check_within_limits(limits: Limits, runtime: RuntimeConfig) -> None:
    """Raise ConfigError for a runtime setting above the limit of the engine."""
    for name in ("max_batch_size", "max_num_tokens"):
        requested, built = getattr(runtime, name), getattr(limits, name)
        if requested is not None and requested > built:
            cure = f"Build the engine with --{name.replace('_', '-')} {requested}."
            raise ConfigError(f"{name}={requested} is above the engine's {built}.", cure=cure)


def typed_value(name: str, value: Any, expected: Any) -> Any:
    """`value` as a value of the type `expected`. Raises ConfigTypeError."""
    try:
        return msgspec.convert(value, expected)
    except msgspec.ValidationError:
        kind = next(kind for kind in (get_args(expected) or (expected,)) if kind is not type(None))
        raise ConfigTypeError(f"{name}={value!r} is refused: it must be {_NOUNS[get_origin(kind) or kind]}.") from None


def check_range(name: str, value: Any, low: int, high: int) -> None:
    """Raise ConfigError unless `value` is a whole number from `low` to `high`; ConfigTypeError if it is no whole number."""
    if type(value) is not int or not low <= value <= high:
        error = ConfigError if type(value) is int else ConfigTypeError
        raise error(f"{name}={value!r} is refused.", cure=f"Use a whole number from {low} to {high}.")


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise ConfigError unless `value` is one of `choices`."""
    if value not in choices:
        raise ConfigError(f"{name}={value!r} is refused.", cure=f"Use one of: {', '.join(map(str, choices))}.")
