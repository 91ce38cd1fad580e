"""Conversion of input tensors to sampling parameters, with the semantics of TensorRT-LLM."""

from __future__ import annotations

from typing import Any

import numpy as np

from stoker.base.errors import RequestError
from stoker.base.types import Guide, SamplingParams
from stoker.frontend.bad_words import bad_word_ids, check_words
from stoker.frontend.service import Service
from stoker.server.protocols.kserve.model_config import TritonOptions
from stoker.server.protocols.kserve.tensors import word_lists
from stoker.server.protocols.kserve.tensors.fields import INPUTS
from stoker.server.protocols.kserve.tensors.input_row import InputRow

_PARAMS = INPUTS.targets()  # role → SamplingParams field
GUIDE_KINDS = {
    "json": "json",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf_grammar": "grammar",
    "structural_tag": "structural_tag",
}


def common_params(row: InputRow, service: Service, options: TritonOptions) -> dict[str, Any]:
    """SamplingParams fields that text models and tensorrt_llm share. Raises RequestError."""
    row.check_rejected()
    fields = {_PARAMS[role]: value for role in row.roles if role in _PARAMS and (value := row.value(role)) is not None}
    beams = fields.get("beam_width", 1)
    if beams > options.max_beam_width:
        cure = "Use fewer beams, or raise max_beam_width."
        raise RequestError("beam_width", beams, f"max_beam_width is {options.max_beam_width}", cure=cure)
    if beams > 1:
        fields["n"] = _num_returned_beams(row, beams)
    if row.value("return_log_probs", row.value("output_log_probs", False)):
        fields["logprobs"] = 0
    return fields | _token_choice(row, beams, options) | _ending(row, service) | _guide(row)


def _num_returned_beams(row: InputRow, beams: int) -> int:
    """All beams, or the best ones if num_return_sequences is smaller."""
    num_returned: int = row.value("num_return_sequences", beams)
    if num_returned > beams:
        raise RequestError("num_return_sequences", num_returned, f"beam_width is {beams}", cure="Request more beams.")
    return num_returned


def _token_choice(row: InputRow, beams: int, options: TritonOptions) -> dict[str, Any]:
    """TensorRT-LLM decodes greedily unless top_k or top_p is given; a top_p of 0 or less counts as absent."""
    top_k = max(0, row.value("runtime_top_k", row.value("top_k", 0))) if options.decoding_mode != "top_p" else 0
    top_p = row.value("runtime_top_p", row.value("top_p", 0.0)) if options.decoding_mode != "top_k" else 0.0
    top_p = 0.0 if top_p <= 0.0 else top_p  # NaN is unchanged here, and SamplingParams refuses it
    temperature = row.value("temperature", 1.0)
    if not (top_k or top_p) or beams > 1:
        if not temperature >= 0.0:
            raise RequestError("temperature", temperature, "it must be at least 0")
        return {"temperature": 0.0}
    return {"temperature": temperature, "top_k": top_k, "top_p": top_p or 1.0}


def _ending(row: InputRow, service: Service) -> dict[str, Any]:
    """The input end_id replaces the end token of the model; -1, or an id that the vocabulary does not have, means no end token."""
    end_id = row.value("end_id")
    if end_id is None:
        return {}
    return {"ignore_eos": True, "stop_token_ids": (end_id,) if 0 <= end_id < service.info.vocab_size else ()}


def _guide(row: InputRow) -> dict[str, Any]:
    """The parameter `guide` from the inputs of guided decoding. Empty without them. Raises RequestError for an unknown kind."""
    kind = row.value("guided_decoding_guide_type")
    if kind is None:
        return {}
    if kind not in GUIDE_KINDS:
        raise RequestError("guided_decoding_guide_type", kind, f"it must be one of {', '.join(GUIDE_KINDS)}")
    return {"guide": Guide(GUIDE_KINDS[kind], row.value("guided_decoding_guide", ""))}


def text_params(row: InputRow, service: Service, options: TritonOptions, *, skip_special_tokens: bool) -> SamplingParams:
    """SamplingParams of an ensemble or BLS model. Stop words are searched in the text, independent of their tokenization."""
    fields = common_params(row, service, options)
    if stop_words := row.texts("stop_words"):
        fields["stop"] = tuple(stop_words)
    if bad_words := row.texts("bad_words"):
        fields["bad_words"] = tuple(tokenize_words("bad_words", bad_words, service))
    if bias := word_bias(row.texts("embedding_bias_words"), row.array("embedding_bias_weights"), service):
        fields["logit_bias"] = bias
    return SamplingParams(**fields, skip_special_tokens=skip_special_tokens)


def token_params(row: InputRow, service: Service, options: TritonOptions) -> tuple[SamplingParams, list[tuple[int, ...]]]:
    """SamplingParams of tensorrt_llm, and its stop words with several tokens, which the executor does not support."""
    fields = common_params(row, service, options)
    words = [word for word in _words(row, "stop_words_list") if word]
    singles = tuple(word[0] for word in words if len(word) == 1)
    # Without an end_id, only the stop words of the request end a sequence.
    fields["ignore_eos"] = True
    fields["stop_token_ids"] = tuple(dict.fromkeys((*fields.get("stop_token_ids", ()), *singles)))
    fields["bad_words"] = tuple(_words(row, "bad_words_list"))
    bias = row.array("embedding_bias")
    fields["logit_bias"] = {} if bias is None else _vocabulary_bias(bias, service.info.vocab_size)
    return SamplingParams(**fields), [word for word in words if len(word) > 1]


def tokenize_words(role: str, words: list[str], service: Service) -> list[tuple[int, ...]]:
    """The token ids of words, alone and after a space, without empty ones."""
    return [ids for ids in bad_word_ids(role, words, service) if ids]


def word_bias(words: list[str], weights: np.ndarray | None, service: Service) -> dict[int, float]:
    """Token id → bias of words with one weight each. Raises RequestError if the numbers of words and weights differ."""
    values = [] if weights is None else weights.ravel().tolist()
    if len(words) != len(values):
        raise RequestError("embedding_bias_weights", values, f"there are {len(words)} embedding_bias_words")
    check_words("embedding_bias_words", words)
    pairs = zip(words, values, strict=True)
    return {token: weight for word, weight in pairs for token in service.encode(word, add_special_tokens=False)}


def _words(row: InputRow, role: str) -> list[tuple[int, ...]]:
    """The token ids of each word in a word list [2, n]."""
    array = row.array(role)
    return [] if array is None else word_lists.read_word_list(role, array)


def _vocabulary_bias(bias: np.ndarray, vocab_size: int) -> dict[int, float]:
    """Token id → bias of the entries other than 0. The vector may be shorter than the vocabulary."""
    flat = bias.ravel()
    if len(flat) > vocab_size:
        raise RequestError("embedding_bias", f"{len(flat)} weights", f"the vocabulary has {vocab_size} tokens")
    token_ids = np.flatnonzero(flat)
    return dict(zip(token_ids.tolist(), flat[token_ids].astype(float).tolist(), strict=True))
