"""The tensors of an ensemble or BLS model to a GenerationRequest, as tensorrtllm_backend reads them."""

from __future__ import annotations

import uuid
from typing import Any

from stoker.base.errors import RequestError
from stoker.base.types import GenerationRequest, SamplingParams
from stoker.frontend.service import Service
from stoker.server.schemas.settings import ServerSettings

REFUSED = {
    "decoder_text_input": "there is no encoder-decoder model",
    "prompt_embedding_table": "there are no prompt tables",
    "prompt_vocab_size": "there are no prompt tables",
    "prompt_table_extra_id": "there are no prompt tables",
    "lora_task_id": "there are no adapters",
    "lora_weights": "there are no adapters",
    "lora_config": "there are no adapters",
    "return_context_logits": "logits are not returned; return_log_probs is",
    "return_generation_logits": "logits are not returned; return_log_probs is",
    "return_kv_cache_reuse_stats": "see the metric stoker_prefix_tokens_reused_total",
    "return_perf_metrics": "see /metrics",
    "num_draft_tokens": "there is no draft model",
    "use_draft_logits": "there is no draft model",
    "image_input": "this model reads text only",
    "image_bytes_input": "this model reads text only",
    "image_url_input": "this model reads text only",
    "video_bytes_input": "this model reads text only",
}
HARMLESS: tuple[Any, ...] = (False, [])
SAME = {
    "max_tokens": "max_tokens", "repetition_penalty": "repetition_penalty", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty", "random_seed": "seed", "beam_width": "beam_width", "length_penalty": "length_penalty",
    "min_length": "min_tokens",
}  # fmt: skip


def to_request(values: dict[str, Any], request_id: str | None, service: Service, settings: ServerSettings) -> GenerationRequest:
    """Raises RequestError for an input that cannot be honoured."""
    for name, reason in REFUSED.items():
        if name in values and values[name] not in HARMLESS:
            raise RequestError(name, values[name], reason, cure="Leave it out.")
    if values.get("num_return_sequences", 1) != 1:
        raise RequestError("num_return_sequences", values["num_return_sequences"], "it must be 1 here", cure="Use n of /v1/completions.")
    return GenerationRequest(
        request_id=request_id or uuid.uuid4().hex,
        prompt=values["text_input"],
        params=_params(values, service, settings),
        add_special_tokens=settings.add_special_tokens,
        timeout_s=settings.request_timeout_s,
    )


def _params(values: dict[str, Any], service: Service, settings: ServerSettings) -> SamplingParams:
    params: dict[str, Any] = {field: values[name] for name, field in SAME.items() if name in values}
    params |= _sampling(values) | _words(values, service)
    if values.get("return_log_probs"):
        params["logprobs"] = 0
    return SamplingParams(**params, skip_special_tokens=settings.skip_special_tokens)


def _sampling(values: dict[str, Any]) -> dict[str, Any]:
    """TensorRT-LLM decodes greedily unless top_k or top_p is given; a top_p of 0 or less counts as absent."""
    top_k, top_p = max(0, values.get("top_k", 0)), max(0.0, float(values.get("top_p", 0.0)))
    if not (top_k or top_p) or values.get("beam_width", 1) > 1:
        return {"temperature": 0.0}
    return {"temperature": float(values.get("temperature", 1.0)), "top_k": top_k, "top_p": top_p or 1.0}


def _words(values: dict[str, Any], service: Service) -> dict[str, Any]:
    """Stop words are found in the text, however they are tokenized; empty strings, as templates send them, ask for nothing."""
    found: dict[str, Any] = {"stop": tuple(word for word in values.get("stop_words", ()) if word)}
    bad = [spelling for word in values.get("bad_words", ()) if word for spelling in (word, " " + word.lstrip(" "))]
    found["bad_words"] = tuple(dict.fromkeys(tuple(service.encode(word, add_special_tokens=False)) for word in bad))
    words, weights = values.get("embedding_bias_words", []), values.get("embedding_bias_weights", [])
    if len(words) != len(weights):
        raise RequestError("embedding_bias_weights", weights, f"there are {len(words)} embedding_bias_words")
    found["logit_bias"] = {
        token: float(weight)
        for word, weight in zip(words, weights, strict=True)
        for token in service.encode(word, add_special_tokens=False)
    }
    if "end_id" in values:
        found |= {"ignore_eos": True, "stop_token_ids": (values["end_id"],) if values["end_id"] >= 0 else ()}
    return found
