"""The tensors of a generating model as sampling parameters, as TensorRT-LLM reads them."""

from __future__ import annotations

from typing import Any

import numpy as np

from stoker.base.errors import RequestError
from stoker.base.types import Guide, SamplingParams
from stoker.frontend.bad_words import bad_word_ids, check_words
from stoker.frontend.service import Service
from stoker.server.protocols.kserve.model_config import TritonOptions
from stoker.server.protocols.kserve.tensors import word_lists
from stoker.server.protocols.kserve.tensors.row import Row

# Role → field. The ensemble's names and tensorrt_llm's.
SAME = {
    "max_tokens": "max_tokens", "request_output_len": "max_tokens", "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty", "random_seed": "seed", "beam_width": "beam_width",
    "length_penalty": "length_penalty", "len_penalty": "length_penalty", "early_stopping": "early_stopping", "min_length": "min_tokens",
    "num_return_sequences": "n",
}  # fmt: skip
GUIDES = {
    "json": "json", "json_schema": "json_schema", "regex": "regex", "ebnf_grammar": "grammar", "structural_tag": "structural_tag",
}  # fmt: skip


def common(row: Row, options: TritonOptions) -> dict[str, Any]:
    """Fields that text and token requests share. Raises RequestError."""
    row.refuse_what_cannot_be()
    fields = {SAME[role]: value for role in row.roles if role in SAME and (value := row.value(role)) is not None}
    beams = fields.get("beam_width", 1)
    if beams > options.max_beam_width:
        cure = "Ask for fewer beams, or raise max_beam_width."
        raise RequestError("beam_width", beams, f"max_beam_width is {options.max_beam_width}", cure=cure)
    if row.value("return_log_probs", False):
        fields["logprobs"] = 0
    return fields | _choosing(row, beams, options) | _ending(row) | _guide(row)


def _choosing(row: Row, beams: int, options: TritonOptions) -> dict[str, Any]:
    """TensorRT-LLM decodes greedily unless top_k or top_p is given; a top_p of 0 or less counts as absent."""
    top_k = max(0, row.value("runtime_top_k", row.value("top_k", 0))) if options.decoding_mode != "top_p" else 0
    top_p = row.value("runtime_top_p", row.value("top_p", 0.0)) if options.decoding_mode != "top_k" else 0.0
    top_p = 0.0 if top_p <= 0.0 else top_p  # no number stays none, and is refused
    temperature = row.value("temperature", 1.0)
    if not (top_k or top_p) or beams > 1:
        if not temperature >= 0.0:
            raise RequestError("temperature", temperature, "it must be at least 0")
        return {"temperature": 0.0}
    return {"temperature": temperature, "top_k": top_k, "top_p": top_p or 1.0}


def _ending(row: Row) -> dict[str, Any]:
    """A given end_id replaces the model's own; -1 is none."""
    end_id = row.value("end_id")
    if end_id is None:
        return {}
    return {"ignore_eos": True, "stop_token_ids": (end_id,) if end_id >= 0 else ()}


def _guide(row: Row) -> dict[str, Any]:
    kind = row.value("guided_decoding_guide_type")
    if kind is None:
        return {}
    if kind not in GUIDES:
        raise RequestError("guided_decoding_guide_type", kind, f"it must be one of {', '.join(GUIDES)}")
    return {"guide": Guide(GUIDES[kind], row.value("guided_decoding_guide", ""))}


def of_text(row: Row, service: Service, options: TritonOptions, *, skip_special_tokens: bool) -> SamplingParams:
    """Of an ensemble or BLS model. Stop words are found in the text, however they are tokenized."""
    fields = common(row, options)
    if stop := row.texts("stop_words"):
        fields["stop"] = tuple(stop)
    if bad := row.texts("bad_words"):
        fields["bad_words"] = tuple(spellings("bad_words", bad, service))
    if bias := word_bias(row.texts("embedding_bias_words"), row.array("embedding_bias_weights"), service):
        fields["logit_bias"] = bias
    return SamplingParams(**fields, skip_special_tokens=skip_special_tokens)


def of_tokens(row: Row, service: Service, options: TritonOptions) -> tuple[SamplingParams, list[tuple[int, ...]]]:
    """Of tensorrt_llm; and its stop words of several tokens, which the executor cannot see."""
    fields = common(row, options)
    words = [word for word in _words(row, "stop_words_list") if word]
    singles = tuple(word[0] for word in words if len(word) == 1)
    # Without an end_id nothing but the given stop words ends a sequence of token ids.
    fields["ignore_eos"] = True
    fields["stop_token_ids"] = tuple(dict.fromkeys((*fields.get("stop_token_ids", ()), *singles)))
    fields["bad_words"] = tuple(_words(row, "bad_words_list"))
    bias = row.array("embedding_bias")
    fields["logit_bias"] = {} if bias is None else _vocabulary_bias(bias, service.info.vocab_size)
    return SamplingParams(**fields), [word for word in words if len(word) > 1]


def spellings(role: str, words: list[str], service: Service) -> list[tuple[int, ...]]:
    """The words as token ids, those that have any."""
    return [ids for ids in bad_word_ids(role, words, service) if ids]


def word_bias(words: list[str], weights: np.ndarray | None, service: Service) -> dict[int, float]:
    values = [] if weights is None else weights.ravel().tolist()
    if len(words) != len(values):
        raise RequestError("embedding_bias_weights", values, f"there are {len(words)} embedding_bias_words")
    check_words("embedding_bias_words", words)
    pairs = zip(words, values, strict=True)
    return {token: weight for word, weight in pairs for token in service.encode(word, add_special_tokens=False)}


def _words(row: Row, role: str) -> list[tuple[int, ...]]:
    array = row.array(role)
    return [] if array is None else word_lists.read_word_list(role, array)


def _vocabulary_bias(bias: np.ndarray, vocab_size: int) -> dict[int, float]:
    """Non-zero entries. A vector shorter than the engine's padded vocabulary leaves the rest alone."""
    flat = bias.ravel()
    if len(flat) > vocab_size:
        raise RequestError("embedding_bias", f"{len(flat)} weights", f"the vocabulary has {vocab_size} tokens")
    places = np.flatnonzero(flat)
    return dict(zip(places.tolist(), flat[places].astype(float).tolist(), strict=True))
