"""The names of the metrics that a server exports. They are stable, because dashboards depend on them."""

from __future__ import annotations

from typing import Literal

import msgspec


class Metric(msgspec.Struct, frozen=True):
    """One metric. Units are part of the name, as Prometheus recommends.

    `source` is the field of ExecutorStats that it shows, or `-` for metrics that the frontends count.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    source: str = "-"
    labels: tuple[str, ...] = ("model",)
    buckets: tuple[float, ...] = ()


LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
STEP_S = (0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
TOKENS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)

TIME_TO_FIRST_TOKEN = Metric(
    "stoker_time_to_first_token_seconds", "histogram", "Time from submission of a request to its first token.", buckets=LATENCY_S
)
INTER_TOKEN_LATENCY = Metric("stoker_inter_token_latency_seconds", "histogram", "Time between two tokens of a sequence.", buckets=STEP_S)
REQUEST_DURATION = Metric(
    "stoker_request_duration_seconds", "histogram", "Time from submission of a request to its end.", buckets=LATENCY_S
)
QUEUE_TIME = Metric(
    "stoker_request_queue_seconds", "histogram", "Time that the first sequence of a request waited in the queue.", buckets=LATENCY_S
)
PREFILL_TIME = Metric(
    "stoker_request_prefill_seconds", "histogram", "Time from the admission of a request to its first token.", buckets=LATENCY_S
)
DECODE_TIME = Metric("stoker_request_decode_seconds", "histogram", "Time from the first to the last token of a request.", buckets=LATENCY_S)
COMPUTE_TIME = Metric(
    "stoker_request_compute_seconds", "histogram", "Time from the admission of a request to its last token.", buckets=LATENCY_S
)
TIME_PER_OUTPUT_TOKEN = Metric(
    "stoker_request_time_per_output_token_seconds", "histogram", "Mean time between two tokens of a request.", buckets=STEP_S
)
MAX_TOKENS = Metric("stoker_request_max_tokens", "histogram", "Maximum number of new tokens that a request allows.", buckets=TOKENS)
PROMPT_LENGTH = Metric("stoker_request_prompt_tokens", "histogram", "Prompt tokens of a request.", buckets=TOKENS)
OUTPUT_LENGTH = Metric(
    "stoker_request_output_tokens", "histogram", "Generated tokens of a request, over all its sequences.", buckets=TOKENS
)
PROMPT_TOKENS = Metric("stoker_prompt_tokens_total", "counter", "Prompt tokens of accepted requests.")
OUTPUT_TOKENS = Metric("stoker_output_tokens_total", "counter", "Generated tokens.")
REQUESTS = Metric(
    "stoker_requests_total", "counter",
    "Requests by outcome: stop, length, cancelled, deadline, error, refused, queue_full, rate_limited, unavailable.",
    labels=("model", "outcome"),
)  # fmt: skip
RESPONSES = Metric("stoker_http_responses_total", "counter", "HTTP responses by route and status.", labels=("route", "status"))
RETRIED_REQUESTS = Metric(
    "stoker_retried_requests_total", "counter", "Requests that ran again, because the executor failed before anything was sent."
)
EXHAUSTED = Metric(
    "stoker_accept_pauses_total", "counter", "Pauses of 0.1 s in accepting connections, because there were no free descriptors or memory.",
    labels=("protocol",),
)  # fmt: skip
# The label `key` has the names of the file of API keys.
KEY_REQUESTS = Metric(
    "stoker_key_requests_total", "counter", "Requests by the name of their API key, and by outcome as above.", labels=("key", "outcome")
)
KEY_TOKENS = Metric(
    "stoker_key_tokens_total", "counter", "Tokens by the name of the API key: prompt, cached (of the prompt) and completion.",
    labels=("key", "kind"),
)  # fmt: skip
KEY_REFUSALS = Metric(
    "stoker_key_refusals_total", "counter", "Requests that a limit of their API key refused, by limit.", labels=("key", "limit")
)
# Counted by the supervisor, which sends the number to all frontends.
PROCESS_RESTARTS = Metric(
    "stoker_process_restarts_total", "counter", "Processes that failed and were started again: executor or frontend.", labels=("process",)
)
TRITON_FAILED_DURATION = Metric(
    "stoker_triton_failed_duration_us_total", "counter", "Duration of failed KServe requests, for the statistics of Triton's models.",
    labels=("model", "version"),
)  # fmt: skip
# Shown at each scrape by the frontend that answers it.
STATISTICS_AGE = Metric(
    "stoker_statistics_age_seconds", "gauge", "Age of the executor's statistics: above 1 while the executor does not answer."
)

FRONTEND_METRICS = (
    TIME_TO_FIRST_TOKEN, INTER_TOKEN_LATENCY, TIME_PER_OUTPUT_TOKEN, REQUEST_DURATION, QUEUE_TIME, PREFILL_TIME, DECODE_TIME, COMPUTE_TIME,
    PROMPT_LENGTH, OUTPUT_LENGTH, MAX_TOKENS, PROMPT_TOKENS, OUTPUT_TOKENS,
    REQUESTS, RESPONSES, RETRIED_REQUESTS, EXHAUSTED, KEY_REQUESTS, KEY_TOKENS, KEY_REFUSALS,
)  # fmt: skip

_PROPOSED = ("model", "proposer")  # none, ngram, request, engine, or the kind of the draft heads

EXECUTOR_METRICS = (
    Metric("stoker_queue_size", "gauge", "Sequences in the waiting queue.", "num_waiting"),
    Metric("stoker_running_sequences", "gauge", "Sequences that hold KV blocks.", "num_running"),
    Metric("stoker_preempted_sequences", "gauge", "Preempted sequences in the waiting queue.", "num_paused"),
    Metric("stoker_kv_blocks", "gauge", "KV cache blocks.", "num_blocks"),
    Metric("stoker_kv_blocks_used", "gauge", "KV cache blocks that sequences use.", "num_used_blocks"),
    Metric(
        "stoker_kv_blocks_cached", "gauge", "KV cache blocks that no sequence uses and that hold a reusable prefix.", "num_cached_blocks"
    ),
    Metric("stoker_kv_tokens_per_block", "gauge", "Token positions of a KV cache block.", "tokens_per_block"),
    Metric("stoker_kv_cache_bytes", "gauge", "Bytes of the KV cache.", "kv_bytes"),
    Metric("stoker_weight_bytes", "gauge", "Bytes of the weights.", "weight_bytes"),
    Metric("stoker_max_batch_size", "gauge", "Largest number of sequences in one step.", "max_batch_size"),
    Metric("stoker_step_rows", "gauge", "Sequences in the last step.", "last_step_rows"),
    Metric("stoker_step_tokens", "gauge", "Tokens in the last step.", "last_step_tokens"),
    Metric("stoker_step_duration_seconds", "gauge", "Duration of the last step.", "last_step_time_s"),
    Metric("stoker_batch_occupancy", "gauge", "Mean number of rows of a step, divided by max_batch_size, since the start.", "occupancy"),
    Metric("stoker_steps_total", "counter", "Steps.", "num_steps"),
    Metric("stoker_step_rows_total", "counter", "Rows of all steps.", "row_steps"),
    Metric("stoker_busy_seconds_total", "counter", "Time spent inside steps.", "busy_time_s"),
    Metric("stoker_prefill_tokens_computed_total", "counter", "Computed prompt tokens.", "num_prefill_tokens"),
    Metric("stoker_decode_tokens_computed_total", "counter", "Tokens computed by decode rows.", "num_decode_tokens"),
    Metric(
        "stoker_prefix_tokens_reused_total",
        "counter",
        "Prompt tokens whose keys and values were reused from the prefix index.",
        "num_reused_tokens",
    ),
    Metric(
        "stoker_step_token_limit",
        "gauge",
        "Tokens of a step with decodes: the limit of latency targets, or the maximum.",
        "token_limit",
    ),
    Metric("stoker_draft_steps_total", "counter", "Rows that verified draft tokens.", "num_draft_steps", _PROPOSED),
    Metric("stoker_draft_tokens_total", "counter", "Draft tokens that were verified.", "num_draft_tokens", _PROPOSED),
    Metric("stoker_accepted_draft_tokens_total", "counter", "Draft tokens that were accepted.", "num_accepted_draft_tokens", _PROPOSED),
    Metric("stoker_kv_imports_total", "counter", "Prompts whose KV cache blocks were read from another server.", "num_imports"),
    Metric("stoker_kv_failed_imports_total", "counter", "Such prompts that were computed here after a failure.", "num_failed_imports"),
    Metric("stoker_kv_imports_running", "gauge", "Prompts that are being read from another server.", "num_running_imports"),
    Metric("stoker_kv_imported_bytes_total", "counter", "Bytes of keys and values that were read from other servers.", "imported_bytes"),
    Metric("stoker_kv_import_seconds_total", "counter", "Time from a request to the last block of its prompt, summed.", "import_time_s"),
    Metric("stoker_kv_import_read_seconds_total", "counter", "The part of it in which blocks are read, summed.", "import_read_time_s"),
    Metric("stoker_kv_exports_total", "counter", "Prompts whose KV cache blocks another server has read.", "num_exports"),
    Metric("stoker_kv_failed_exports_total", "counter", "Prompts computed for another server and not read.", "num_failed_exports"),
    Metric("stoker_kv_exports_held", "gauge", "Prompts whose KV cache blocks are held for another server.", "num_held_exports"),
    Metric("stoker_preemptions_total", "counter", "Preemptions of running sequences.", "num_preemptions"),
    Metric(
        "stoker_costly_guides_total",
        "counter",
        "Sequences that were refused because compiling their grammar exceeded its time or memory.",
        "num_costly_guides",
    ),
)

ALL_METRICS = (*FRONTEND_METRICS, TRITON_FAILED_DURATION, *EXECUTOR_METRICS, STATISTICS_AGE, PROCESS_RESTARTS)
