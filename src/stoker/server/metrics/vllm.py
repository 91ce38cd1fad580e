"""The metrics under the names of vLLM, so that dashboards for vLLM show a Stoker server. They are copied at a scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

ENGINE = "0"  # vLLM numbers its engines; a Stoker model has one


class Name(NamedTuple):
    """A metric of vLLM that has the values of one of Stoker's."""

    name: str
    source: str


# Names without `_total`, which the text format adds to counters.
NAMES = (
    Name("vllm:time_to_first_token_seconds", "stoker_time_to_first_token_seconds"),
    Name("vllm:inter_token_latency_seconds", "stoker_inter_token_latency_seconds"),
    Name("vllm:time_per_output_token_seconds", "stoker_inter_token_latency_seconds"),  # of releases before 0.11
    Name("vllm:request_time_per_output_token_seconds", "stoker_request_time_per_output_token_seconds"),
    Name("vllm:e2e_request_latency_seconds", "stoker_request_duration_seconds"),
    Name("vllm:request_queue_time_seconds", "stoker_request_queue_seconds"),
    Name("vllm:request_prefill_time_seconds", "stoker_request_prefill_seconds"),
    Name("vllm:request_decode_time_seconds", "stoker_request_decode_seconds"),
    Name("vllm:request_inference_time_seconds", "stoker_request_compute_seconds"),
    Name("vllm:request_prompt_tokens", "stoker_request_prompt_tokens"),
    Name("vllm:request_generation_tokens", "stoker_request_output_tokens"),
    Name("vllm:request_params_max_tokens", "stoker_request_max_tokens"),
    Name("vllm:request_max_num_generation_tokens", "stoker_request_max_tokens"),
    Name("vllm:prompt_tokens", "stoker_prompt_tokens"),
    Name("vllm:generation_tokens", "stoker_output_tokens"),
    Name("vllm:num_preemptions", "stoker_preemptions"),
    Name("vllm:num_requests_running", "stoker_running_sequences"),
    Name("vllm:num_requests_waiting", "stoker_queue_size"),
    Name("vllm:prefix_cache_hits", "stoker_prefix_tokens_reused"),
)
# Outcome of a request: vLLM's finished_reason. Other outcomes are not successes.
_FINISHED = {"stop": "stop", "length": "length", "cancelled": "abort", "deadline": "abort", "error": "error"}

Families = dict[str, Metric]
Values = dict[str, float]  # by model


def vllm_families(exposition: bytes) -> list[Metric]:
    """The metrics of an exposition in Prometheus' text format under vLLM's names, for the models that have them."""
    families = {family.name: family for family in text_string_to_metric_families(exposition.decode())}
    copies = [_copy(families[name.source], name.name) for name in NAMES if name.source in families]
    computed = [_gauge(name, text, values(families)) for name, (text, values) in GAUGES.items()]
    queries = Metric("vllm:prefix_cache_queries", "Prompt tokens that were looked up in the prefix index.", "counter")
    for model, value in _sum(families, "stoker_prefix_tokens_reused", "stoker_prefill_tokens_computed").items():
        queries.add_sample(f"{queries.name}_total", _labels(model), value)
    return [*copies, *computed, queries, _successes(families)]


def _copy(family: Metric, name: str) -> Metric:
    """The family under another name, with vLLM's labels."""
    copy = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        labels = {key: value for key, value in sample.labels.items() if key != "model"}
        copy.add_sample(name + sample.name.removeprefix(family.name), _labels(sample.labels["model"]) | labels, sample.value)
    return copy


def _gauge(name: str, text: str, values: Values) -> Metric:
    """A gauge with one value per model."""
    gauge = Metric(name, text, "gauge")
    for model, value in values.items():
        gauge.add_sample(name, _labels(model), value)
    return gauge


def _successes(families: Families) -> Metric:
    """vLLM's counter of requests by finished_reason."""
    counts: dict[tuple[str, str], float] = {}
    for sample in families["stoker_requests"].samples if "stoker_requests" in families else ():
        if (reason := _FINISHED.get(sample.labels["outcome"])) is not None:
            key = (sample.labels["model"], reason)
            counts[key] = counts.get(key, 0.0) + sample.value
    metric = Metric("vllm:request_success", "Requests by the reason of their end.", "counter")
    for (model, reason), count in counts.items():
        metric.add_sample(f"{metric.name}_total", _labels(model) | {"finished_reason": reason}, count)
    return metric


def _values(families: Families, name: str) -> Values:
    """The value of a gauge or counter for each model."""
    samples: Iterable[tuple[str, float]] = (
        (sample.labels["model"], sample.value) for sample in (families[name].samples if name in families else ())
    )
    return dict(samples)


def _sum(families: Families, *names: str) -> Values:
    """The sum of several metrics for each model."""
    values = [_values(families, name) for name in names]
    return {model: sum(each.get(model, 0.0) for each in values) for model in values[0]}


def _kv_usage(families: Families) -> Values:
    """The fraction of the KV cache that sequences use."""
    used, blocks = _values(families, "stoker_kv_blocks_used"), _values(families, "stoker_kv_blocks")
    return {model: used[model] / blocks[model] if blocks[model] else 0.0 for model in used}


def _labels(model: str) -> dict[str, str]:
    """vLLM's labels of a sample."""
    return {"model_name": model, "engine": ENGINE}


# Gauges that are computed from several metrics: name → (help, values).
GAUGES: dict[str, tuple[str, Callable[[Families], Values]]] = {
    "vllm:kv_cache_usage_perc": ("Fraction of the KV cache blocks that are used.", _kv_usage),
    "vllm:gpu_cache_usage_perc": ("The same, under the name of releases before 0.11.", _kv_usage),
}
