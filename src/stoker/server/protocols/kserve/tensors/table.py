"""The tensors of the five models of an inflight_batcher_llm repository, as declared by its templates of releases 0.8, 0.18 and 1.x.

Dims do not include the leading batch axis. Source: tensorrtllm_backend v0.8.0 and v0.18.2, TensorRT-LLM's triton_backend (1.x).
`fields.py` says which inputs are supported.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Dims = tuple[int, ...]
Era = Literal["0.8", "0.18", "1.x"]
ERAS: tuple[Era, ...] = ("0.8", "0.18", "1.x")


class TensorRow(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor in all releases. `dims` are by release; None: the release does not declare it."""

    name: str
    dtype: str  # KServe's name, but STRING for BYTES
    dims: dict[str, Dims | None]
    required: bool = False  # a request without this input is refused; 0.18 accepts encoder features instead of input_ids, Stoker does not
    layout: str = ""  # ragged: rows of one batch may differ in length; scalar: reshaped to [batch]
    renamed: str = ""  # its name in 1.x if it differs
    variable: str = ""  # template variable that sets the dtype

    def name_in(self, era: Era) -> str:
        """The name of the tensor in release `era`. Only release 1.x renames tensors."""
        return self.renamed if era == "1.x" and self.renamed else self.name


def _row(
    name: str,
    dtype: str,
    dims_0_8: Dims | None,
    dims_0_18: Dims | None,
    dims_1_x: Dims | None,
    *,
    required: bool = False,
    layout: str = "",
    renamed: str = "",
    variable: str = "",
) -> TensorRow:
    """A row with the dims of each release; None: the release does not declare the tensor."""
    dims: dict[str, Dims | None] = dict(zip(ERAS, (dims_0_8, dims_0_18, dims_1_x), strict=True))
    return TensorRow(name=name, dtype=dtype, dims=dims, required=required, layout=layout, renamed=renamed, variable=variable)


S: Dims = (1,)  # scalar: one value per row
V: Dims = (-1,)  # vector
M: Dims = (-1, -1)  # matrix

_RESULTS = (
    _row("cum_log_probs", "FP32", V, V, V),
    _row("output_log_probs", "FP32", M, M, M),
    _row("context_logits", "FP32", M, M, M, variable="logits_datatype"),
    _row("generation_logits", "FP32", (-1, -1, -1), (-1, -1, -1), (-1, -1, -1), variable="logits_datatype"),
    _row("batch_index", "INT32", None, S, S),
    _row("sequence_index", "INT32", None, S, S),
    _row("kv_cache_alloc_new_blocks", "INT32", None, S, S),
    _row("kv_cache_reused_blocks", "INT32", None, S, S),
    _row("kv_cache_alloc_total_blocks", "INT32", None, S, S),
    _row("arrival_time_ns", "INT64", None, None, S),
    _row("first_scheduled_time_ns", "INT64", None, None, S),
    _row("first_token_time_ns", "INT64", None, None, S),
    _row("last_token_time_ns", "INT64", None, None, S),
    _row("acceptance_rate", "FP32", None, None, S),
    _row("total_accepted_draft_tokens", "INT32", None, None, S),
    _row("total_draft_tokens", "INT32", None, None, S),
    _row("num_input_tokens", "INT32", None, None, S),
    _row("num_output_tokens", "INT32", None, None, S),
)
_TEXT_INPUTS = (
    _row("text_input", "STRING", V, S, S, required=True),
    _row("decoder_text_input", "STRING", None, S, S),
    _row("max_tokens", "INT32", V, S, S, required=True),
    _row("bad_words", "STRING", V, V, V),
    _row("stop_words", "STRING", V, V, V),
    _row("exclude_input_in_output", "BOOL", None, S, S),
    _row("end_id", "INT32", S, S, S),
    _row("pad_id", "INT32", S, S, S),
    _row("top_k", "INT32", S, S, S),
    _row("top_p", "FP32", S, S, S),
    _row("temperature", "FP32", S, S, S),
    _row("length_penalty", "FP32", S, S, S),
    _row("repetition_penalty", "FP32", S, S, S),
    _row("min_length", "INT32", S, S, S, renamed="min_tokens"),
    _row("presence_penalty", "FP32", S, S, S),
    _row("frequency_penalty", "FP32", S, S, S),
    _row("random_seed", "UINT64", S, S, S, renamed="seed"),
    _row("beam_width", "INT32", S, S, S),
    _row("stream", "BOOL", S, S, S),
    _row("prompt_embedding_table", "FP16", M, M, M, variable="prompt_embedding_table_data_type"),
    _row("prompt_table_extra_id", "UINT64", None, S, S),
    _row("prompt_vocab_size", "INT32", S, S, S),
    _row("embedding_bias_words", "STRING", V, V, V),
    _row("embedding_bias_weights", "FP32", V, V, V),
    _row("lora_weights", "FP16", None, M, M, layout="ragged"),
    _row("lora_config", "INT32", None, (-1, 3), (-1, 3), layout="ragged"),
    _row("return_perf_metrics", "BOOL", None, None, S),
    _row("return_num_input_tokens", "BOOL", None, None, S),
    _row("return_num_output_tokens", "BOOL", None, None, S),
    _row("guided_decoding_guide_type", "STRING", None, None, S),
    _row("guided_decoding_guide", "STRING", None, None, S),
)
_GPT_SCORES = _row("output_log_probs", "BOOL", None, None, None)  # only in the Python gpt model of release 0.5
_ENSEMBLE_INPUTS = (
    *_TEXT_INPUTS,
    _GPT_SCORES,
    _row("num_return_sequences", "INT32", None, S, S),
    _row("return_log_probs", "BOOL", S, S, S),
    _row("return_context_logits", "BOOL", S, S, S),
    _row("return_generation_logits", "BOOL", S, S, S),
    _row("return_kv_cache_reuse_stats", "BOOL", None, S, None),
    _row("lora_task_id", "UINT64", None, S, S),
)
_BLS_INPUTS = (
    *_TEXT_INPUTS,
    _row("image_input", "FP16", None, (-1, 3, -1, -1), (-1, 3, -1, -1)),
    _row("image_bytes_input", "UINT8", None, (-1, -1, -1, -1), (-1, -1, -1, -1)),
    _row("image_url_input", "STRING", None, S, S),
    _row("video_bytes_input", "UINT8", None, (-1, -1, -1, -1), (-1, -1, -1, -1)),
    _row("return_log_probs", "BOOL", S, S, S, layout="scalar"),
    _row("return_context_logits", "BOOL", S, S, S, layout="scalar"),
    _row("return_generation_logits", "BOOL", S, S, S, layout="scalar"),
    _row("num_return_sequences", "INT32", None, S, S, layout="scalar"),
    _row("num_draft_tokens", "INT32", None, S, S),
    _row("use_draft_logits", "BOOL", None, S, S, layout="scalar"),
    _row("lora_task_id", "UINT64", None, S, S, layout="scalar"),
    _row("return_kv_cache_reuse_stats", "BOOL", None, S, None, layout="scalar"),
)
_TEXT_OUTPUTS = (
    *_RESULTS,
    _row("text_output", "STRING", V, V, V),
)
_PREPROCESSING_INPUTS = (
    _row("QUERY", "STRING", V, S, S, required=True),
    _row("DECODER_QUERY", "STRING", None, S, S),
    _row("IMAGE_BYTES", "UINT8", None, (-1, -1, -1, -1), (-1, -1, -1, -1)),
    _row("IMAGE_URL", "STRING", None, S, S),
    _row("VIDEO_BYTES", "UINT8", None, (-1, -1, -1, -1), (-1, -1, -1, -1)),
    _row("REQUEST_OUTPUT_LEN", "INT32", V, S, S, required=True),
    _row("BAD_WORDS_DICT", "STRING", V, V, V),
    _row("STOP_WORDS_DICT", "STRING", V, V, V),
    _row("EMBEDDING_BIAS_WORDS", "STRING", V, V, V),
    _row("EMBEDDING_BIAS_WEIGHTS", "FP32", V, V, V),
    _row("END_ID", "INT32", V, S, S),
    _row("PAD_ID", "INT32", V, S, S),
    _row("PROMPT_TABLE_EXTRA_ID", "UINT64", None, S, S),
    _row("IMAGES", "STRING", None, None, V),
)
_PREPROCESSING_OUTPUTS = (
    _row("INPUT_ID", "INT32", V, V, V),
    _row("REQUEST_INPUT_LEN", "INT32", S, S, S),
    _row("DECODER_INPUT_ID", "INT32", None, V, V),
    _row("REQUEST_DECODER_INPUT_LEN", "INT32", None, S, S),
    _row("BAD_WORDS_IDS", "INT32", (2, -1), (2, -1), (2, -1)),
    _row("STOP_WORDS_IDS", "INT32", (2, -1), (2, -1), (2, -1)),
    _row("EMBEDDING_BIAS", "FP32", V, V, V),
    _row("REQUEST_OUTPUT_LEN", "INT32", V, V, V),
    _row("OUT_END_ID", "INT32", V, S, S),
    _row("OUT_PAD_ID", "INT32", V, S, S),
    _row("OUT_PROMPT_TABLE_EXTRA_IDS", "UINT64", None, V, V),
    _row("PIXEL_VALUES", "FP16", None, (-1, -1, -1, -1), (-1, -1, -1, -1)),
    _row("ASPECT_RATIO_IDS", "INT64", None, V, V),
    _row("ASPECT_RATIO_MASK", "INT64", None, M, M),
    _row("CROSS_ATTENTION_MASK", "INT64", None, (-1, -1, -1), (-1, -1, -1)),
    _row("IMAGE_SIZES", "INT64", None, (2,), (2,)),
    _row("IS_VIDEO_INPUT", "BOOL", None, S, S),
    _row("ATTENTION_MASK", "INT64", None, None, V),
    _row("IMAGE_GRID_THW", "INT64", None, None, (3,)),
    _row("VISION_INPUT_ID", "INT32", None, None, V),
)
_TENSORRT_LLM_INPUTS = (
    _GPT_SCORES,
    _row("input_ids", "INT32", V, V, V, required=True, layout="ragged"),
    _row("encoder_input_features", "FP16", None, M, M, layout="ragged", variable="encoder_input_features_data_type"),
    _row("encoder_output_lengths", "INT32", None, S, S, layout="scalar"),
    _row("input_lengths", "INT32", S, S, S, required=True, layout="scalar"),
    _row("request_output_len", "INT32", S, S, S, required=True, layout="scalar"),
    _row("num_return_sequences", "INT32", None, S, S, layout="scalar"),
    _row("draft_input_ids", "INT32", V, V, V, layout="ragged"),
    _row("decoder_input_ids", "INT32", None, V, V, layout="ragged"),
    _row("decoder_input_lengths", "INT32", None, S, S, layout="scalar"),
    _row("draft_logits", "FP32", None, M, M, layout="ragged", variable="logits_datatype"),
    _row("draft_acceptance_threshold", "FP32", None, S, S, layout="scalar"),
    _row("end_id", "INT32", S, S, S, layout="scalar"),
    _row("pad_id", "INT32", S, S, S, layout="scalar"),
    _row("stop_words_list", "INT32", (2, -1), (2, -1), (2, -1), layout="ragged"),
    _row("bad_words_list", "INT32", (2, -1), (2, -1), (2, -1), layout="ragged"),
    _row("embedding_bias", "FP32", V, V, V, layout="ragged"),
    _row("beam_width", "INT32", S, S, S, layout="scalar"),
    _row("temperature", "FP32", S, S, S, layout="scalar"),
    _row("runtime_top_k", "INT32", S, S, S, layout="scalar"),
    _row("runtime_top_p", "FP32", S, S, S, layout="scalar"),
    _row("runtime_top_p_min", "FP32", None, S, S, layout="scalar"),
    _row("runtime_top_p_decay", "FP32", None, S, S, layout="scalar"),
    _row("runtime_top_p_reset_ids", "INT32", None, S, S, layout="scalar"),
    _row("len_penalty", "FP32", S, S, S, layout="scalar"),
    _row("early_stopping", "BOOL", None, S, S, layout="scalar"),
    _row("repetition_penalty", "FP32", S, S, S, layout="scalar"),
    _row("min_length", "INT32", S, S, S, layout="scalar", renamed="min_tokens"),
    _row("beam_search_diversity_rate", "FP32", None, S, S, layout="scalar"),
    _row("presence_penalty", "FP32", S, S, S, layout="scalar"),
    _row("frequency_penalty", "FP32", S, S, S, layout="scalar"),
    _row("random_seed", "UINT64", S, S, S, layout="scalar", renamed="seed"),
    _row("return_log_probs", "BOOL", S, S, S, layout="scalar"),
    _row("return_context_logits", "BOOL", S, S, S, layout="scalar"),
    _row("return_generation_logits", "BOOL", S, S, S, layout="scalar"),
    _row("return_kv_cache_reuse_stats", "BOOL", None, S, None, layout="scalar"),
    _row("exclude_input_in_output", "BOOL", None, S, S, layout="scalar"),
    _row("stop", "BOOL", S, S, S, layout="scalar"),
    _row("streaming", "BOOL", S, S, S, layout="scalar"),
    _row("prompt_embedding_table", "FP16", M, M, M, layout="ragged", variable="prompt_embedding_table_data_type"),
    _row("prompt_table_extra_ids", "UINT64", None, V, V, layout="ragged"),
    _row("prompt_vocab_size", "INT32", S, S, S, layout="scalar"),
    _row("cross_attention_mask", "BOOL", None, M, M, layout="ragged"),
    _row("lora_task_id", "UINT64", None, S, S, layout="scalar"),
    _row("lora_weights", "FP16", M, M, M, layout="ragged"),
    _row("lora_config", "INT32", (-1, 3), (-1, 3), (-1, 3), layout="ragged"),
    _row("context_phase_params", "UINT8", None, V, V, layout="ragged"),
    _row("skip_cross_attn_blocks", "BOOL", None, S, S, layout="ragged"),
    _row("retention_token_range_starts", "INT32", None, V, V, layout="ragged"),
    _row("retention_token_range_ends", "INT32", None, V, V, layout="ragged"),
    _row("retention_token_range_priorities", "INT32", None, V, V, layout="ragged"),
    _row("retention_token_range_durations_ms", "INT32", None, V, V, layout="ragged"),
    _row("retention_decode_priority", "INT32", None, S, S, layout="ragged"),
    _row("retention_decode_duration_ms", "INT32", None, S, S, layout="ragged"),
    _row("return_perf_metrics", "BOOL", None, None, S),
    _row("return_num_input_tokens", "BOOL", None, None, S),
    _row("return_num_output_tokens", "BOOL", None, None, S),
    _row("mrope_rotary_cos_sin", "FP32", None, None, V),
    _row("mrope_position_deltas", "INT64", None, None, S),
    _row("guided_decoding_guide_type", "STRING", None, None, S),
    _row("guided_decoding_guide", "STRING", None, None, S),
    _row("lookahead_window_size", "INT32", None, None, S),
    _row("lookahead_ngram_size", "INT32", None, None, S),
    _row("lookahead_verification_set_size", "INT32", None, None, S),
)
_TENSORRT_LLM_OUTPUTS = (
    *_RESULTS,
    _row("log_probs", "FP32", None, None, None),  # only in the Python gpt model of release 0.5
    _row("output_ids", "INT32", M, M, M),
    _row("sequence_length", "INT32", V, V, V),
    _row("context_phase_params", "UINT8", None, V, V),
)
_POSTPROCESSING_INPUTS = (
    _row("TOKENS_BATCH", "INT32", M, M, M, required=True),
    _row("SEQUENCE_LENGTH", "INT32", V, V, V, required=True),
    _row("CUM_LOG_PROBS", "FP32", V, None, None, required=True),
    _row("OUTPUT_LOG_PROBS", "FP32", M, None, None, required=True),
    _row("CONTEXT_LOGITS", "FP32", M, None, None),
    _row("GENERATION_LOGITS", "FP32", (-1, -1, -1), None, None),
)
_POSTPROCESSING_OUTPUTS = (
    _row("OUTPUT", "STRING", V, V, V),
    _row("OUT_CUM_LOG_PROBS", "FP32", V, None, None),
    _row("OUT_OUTPUT_LOG_PROBS", "FP32", M, None, None),
    _row("OUT_CONTEXT_LOGITS", "FP32", M, None, None),
    _row("OUT_GENERATION_LOGITS", "FP32", (-1, -1, -1), None, None),
)


# Kind of model → (inputs, outputs).
TENSORS: dict[str, tuple[tuple[TensorRow, ...], tuple[TensorRow, ...]]] = {
    "preprocessing": (_PREPROCESSING_INPUTS, _PREPROCESSING_OUTPUTS),
    "tensorrt_llm": (_TENSORRT_LLM_INPUTS, _TENSORRT_LLM_OUTPUTS),
    "postprocessing": (_POSTPROCESSING_INPUTS, _POSTPROCESSING_OUTPUTS),
    "ensemble": (_ENSEMBLE_INPUTS, _TEXT_OUTPUTS),
    "tensorrt_llm_bls": (_BLS_INPUTS, _TEXT_OUTPUTS),
}
