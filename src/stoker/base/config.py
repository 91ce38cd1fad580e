"""Values a person sets: how an engine is built, and how it is run. Frozen; every field says what it does."""

from __future__ import annotations

from typing import Any

import msgspec

from stoker.base.env import MAX_THREADS
from stoker.base.errors import ConfigError

DTYPES = ("float32", "float16", "bfloat16")
DEVICES = ("cpu", "cuda")
TOKENS_PER_BLOCK = (16, 32, 64, 128)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The shapes an engine is built for; requests and run-time settings stay inside them. Names as in TensorRT-LLM."""

    max_batch_size: int = 256  # sequences that compute in one step
    max_input_len: int = 4096  # prompt tokens of a request
    max_output_len: int = 1024  # new tokens of a request
    max_total_len: int | None = None  # prompt and new tokens of a request together; None: the sum of the two
    max_beam_width: int = 1
    max_num_tokens: int = 8192  # tokens of one step, prefill and decode together
    tokens_per_block: int = 64  # KV cache block size

    def __post_init__(self) -> None:
        for name, high in (
            ("max_batch_size", 65536), ("max_input_len", 1 << 24), ("max_output_len", 1 << 24),
            ("max_beam_width", 10), ("max_num_tokens", 1 << 20),
        ):  # fmt: skip
            check_range(name, getattr(self, name), 1, high)
        if self.max_total_len is not None:
            check_range("max_total_len", self.max_total_len, 2, 1 << 24)
        check_choice("tokens_per_block", self.tokens_per_block, TOKENS_PER_BLOCK)

    @property
    def max_seq_len(self) -> int:
        """Tokens of one sequence, prompt and output."""
        both = self.max_input_len + self.max_output_len
        return both if self.max_total_len is None else min(both, self.max_total_len)


class Mapping(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is spread over devices: one rank file for each of tensor_parallel × pipeline_parallel."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: bool = False  # tensor-parallel ranks have some experts whole each; else a share of every expert

    def __post_init__(self) -> None:
        check_range("tensor_parallel", self.tensor_parallel, 1, 1024)
        check_range("pipeline_parallel", self.pipeline_parallel, 1, 1024)

    @property
    def world_size(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel


class RuntimeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is run. None means: as the engine was built, or as the device allows."""

    device: str | None = None  # cpu or cuda; None: what the engine was built for
    devices: tuple[int, ...] | None = None  # the GPU of each rank, by index; None: the first ones
    policy: str = "guaranteed_no_evict"  # guaranteed_no_evict, max_utilization, static
    max_batch_size: int | None = None  # sequences that compute in one step, at most the engine's
    max_num_sequences: int | None = None  # sequences that hold KV blocks at once; None: max_batch_size
    max_num_tokens: int | None = None  # tokens of one step, at most the engine's
    chunked_prefill: bool = True  # split prompts over steps, mixed with decodes
    prefix_reuse: bool = True  # keep full blocks of finished sequences for later prompts that begin alike
    kv_cache_tokens: int | None = None  # KV places; with kv_cache_fraction, the smaller wins
    # Of the memory that weights, the largest step and graphs leave. None: 0.9 on a GPU, 0.5 on a CPU.
    kv_cache_fraction: float | None = None
    kv_cache_dtype: str | None = None  # None: as built
    max_queue_size: int = 1024  # waiting requests; more are refused with 429
    overlap: bool = True  # plan and launch step N + 1 while step N runs; GPU only
    cuda_graphs: bool = True
    custom_all_reduce: bool = True  # GPUs sum short messages in each other's memory; else NCCL sums all
    attention_window: int | None = None  # keep at most so many tokens of a sequence visible
    num_threads: int | None = None  # CPU threads for arithmetic; None: all
    step_timeout_s: float | None = None  # a step that takes longer hangs: not ready, state in the log; None: 30 on a GPU, 120 on a CPU

    def __post_init__(self) -> None:
        if self.device is not None:
            check_choice("device", self.device, DEVICES)
        check_choice("policy", self.policy, ("guaranteed_no_evict", "max_utilization", "static"))
        for name in ("max_batch_size", "max_num_sequences", "max_num_tokens", "kv_cache_tokens", "attention_window"):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), 1, 1 << 40)
        if self.num_threads is not None:
            check_range("num_threads", self.num_threads, 1, MAX_THREADS)
        for index in self.devices or ():
            check_range("devices", index, 0, 1023)
        check_range("max_queue_size", self.max_queue_size, 1, 1 << 24)
        if self.kv_cache_fraction is not None and not 0.0 < self.kv_cache_fraction <= 1.0:
            raise ConfigError(f"kv_cache_fraction={self.kv_cache_fraction} is outside (0, 1].", cure="Use a fraction such as 0.9.")
        if self.step_timeout_s is not None and not 1.0 <= self.step_timeout_s <= 86400.0:
            raise ConfigError(f"step_timeout_s={self.step_timeout_s} is refused.", cure="Use seconds, from 1 to 86400.")


def check_range(name: str, value: Any, low: int, high: int) -> None:
    """Raise ConfigError unless `value` is a whole number in [low, high]."""
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(f"{name}={value!r} is refused.", cure=f"Use a whole number from {low} to {high}.")


def check_choice(name: str, value: Any, choices: tuple) -> None:
    """Raise ConfigError unless `value` is one of `choices`."""
    if value not in choices:
        raise ConfigError(f"{name}={value!r} is refused.", cure=f"Use one of: {', '.join(map(str, choices))}.")
