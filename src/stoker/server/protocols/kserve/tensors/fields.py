"""The table of input tensors: each is accepted, has no effect for a reason, or is rejected with one.

`table.py` declares the dtypes and shapes of the same tensors. The target of an accepted input is a field of SamplingParams.
"""

from __future__ import annotations

from stoker.base.fields.table import ANYTHING, FieldRow, FieldTable, accepted, no_effect, rejected

_NO_ENCODER = "there is no encoder"
_NO_PROMPT_TABLES = "there are no prompt tables"
_NO_ADAPTERS = "there are no adapters"
_NO_LOGITS = "logits are not returned; return_log_probs is supported"
_NO_DRAFT = "drafts of the server's own draft engine are sampled so that answers do not depend on them"
_NO_THRESHOLD = "a threshold would change what is generated"
_LOOKAHEAD = "prompt lookup has no windows; answers are the same for every value"
_TEXT_ONLY = "this model reads text only"
_NO_RETENTION = "KV cache blocks are evicted by last use, without priorities"


def _input(name: str, meaning: str, target: str = "") -> FieldRow:
    """The row of an accepted tensor. `target` is the field of SamplingParams that it sets, if it has another name."""
    return accepted(name, ANYTHING, meaning, target)


INPUTS = FieldTable(
    (
        # Text models: ensemble and tensorrt_llm_bls.
        _input("text_input", "the prompt"),
        _input("max_tokens", "maximum number of new tokens", "max_tokens"),
        _input("bad_words", "words that are never generated, alone or after a space"),
        _input("stop_words", "words that end the answer"),
        _input("top_k", "sample from the k most likely tokens"),
        _input("top_p", "sample from the most likely tokens with this total probability"),
        _input("length_penalty", "beam search: score ÷ length ** length_penalty", "length_penalty"),
        _input("stream", "one response per delta"),
        _input("embedding_bias_words", "words whose tokens receive a bias"),
        _input("embedding_bias_weights", "the biases of embedding_bias_words"),
        # The model of token ids: tensorrt_llm.
        _input("input_ids", "the prompt"),
        _input("input_lengths", "number of valid input_ids"),
        _input("request_output_len", "maximum number of new tokens", "max_tokens"),
        _input("decoder_input_ids", "at most one token id, which preprocessing sends"),
        no_effect("decoder_input_lengths", ANYTHING, _NO_ENCODER),
        _input("stop_words_list", "token sequences that end the answer"),
        _input("bad_words_list", "token sequences that are never generated"),
        _input("embedding_bias", "a bias per token of the vocabulary"),
        _input("runtime_top_k", "sample from the k most likely tokens"),
        _input("runtime_top_p", "sample from the most likely tokens with this total probability"),
        _input("len_penalty", "beam search: score ÷ length ** len_penalty", "length_penalty"),
        _input("early_stopping", "beam search: end when enough candidates have ended", "early_stopping"),
        _input("draft_input_ids", "the expected answer; with --speculate, it is verified as a draft"),
        _input("num_draft_tokens", "with --speculate, the largest number of draft tokens per step, if below the server's; 0: none"),
        _input("draft_logits", "the logits from which draft_input_ids were sampled; with --speculate request, more of them are accepted"),
        no_effect("lookahead_window_size", ANYTHING, _LOOKAHEAD),
        no_effect("lookahead_ngram_size", ANYTHING, _LOOKAHEAD),
        no_effect("lookahead_verification_set_size", ANYTHING, _LOOKAHEAD),
        _input("stop", "end the request in flight that has the same id"),
        _input("streaming", "one response per delta"),
        # Both.
        _input("end_id", "replaces the model's end token; -1: none"),
        _input("pad_id", "pads output_ids of several sequences in one response"),
        _input("temperature", "0 is greedy"),
        _input("repetition_penalty", "values above 1 discourage repeated tokens", "repetition_penalty"),
        _input("min_length", "new tokens before the answer may end", "min_tokens"),
        _input("presence_penalty", "subtracted once for each token that was generated", "presence_penalty"),
        _input("frequency_penalty", "subtracted each time a token was generated", "frequency_penalty"),
        _input("random_seed", "equal seeds give equal tokens", "seed"),
        _input("beam_width", "number of beams", "beam_width"),
        _input("num_return_sequences", "number of answers", "n"),
        _input("return_log_probs", "fill cum_log_probs and output_log_probs"),
        _input("output_log_probs", "of the Python gpt model: add the output log_probs"),
        _input("return_kv_cache_reuse_stats", "add the outputs kv_cache_*: blocks that the prompt reused and allocated"),
        _input("return_perf_metrics", "add the outputs kv_cache_*, *_time_ns, and those about draft tokens"),
        _input("return_num_input_tokens", "add the output num_input_tokens"),
        _input("return_num_output_tokens", "add the output num_output_tokens"),
        _input("exclude_input_in_output", "a whole answer does not contain the prompt"),
        _input("guided_decoding_guide_type", "json, json_schema, regex, ebnf_grammar or structural_tag"),
        _input("guided_decoding_guide", "the grammar"),
        # preprocessing and postprocessing.
        _input("QUERY", "the text"),
        _input("REQUEST_OUTPUT_LEN", "passed through"),
        _input("BAD_WORDS_DICT", "converted to BAD_WORDS_IDS"),
        _input("STOP_WORDS_DICT", "converted to STOP_WORDS_IDS"),
        _input("EMBEDDING_BIAS_WORDS", "converted to EMBEDDING_BIAS"),
        _input("EMBEDDING_BIAS_WEIGHTS", "the biases of EMBEDDING_BIAS_WORDS"),
        _input("END_ID", "default: the model's own"),
        _input("PAD_ID", "default: the model's own"),
        _input("TOKENS_BATCH", "the token ids"),
        _input("SEQUENCE_LENGTH", "number of valid ids per sequence"),
        _input("CUM_LOG_PROBS", "passed through"),
        _input("OUTPUT_LOG_PROBS", "passed through"),
        _input("CONTEXT_LOGITS", "passed through"),
        _input("GENERATION_LOGITS", "passed through"),
        # What Stoker does not support.
        rejected("runtime_top_p_min", "only 0 is supported", 0.0),
        rejected("runtime_top_p_decay", "only 1 is supported", 1.0),
        rejected("runtime_top_p_reset_ids", "only -1 is supported", -1),
        rejected("beam_search_diversity_rate", "only 0 is supported", 0.0),
        rejected("decoder_text_input", _NO_ENCODER),
        rejected("DECODER_QUERY", _NO_ENCODER),
        rejected("encoder_input_features", _NO_ENCODER),
        rejected("encoder_output_lengths", _NO_ENCODER),
        rejected("cross_attention_mask", _NO_ENCODER),
        rejected("skip_cross_attn_blocks", _NO_ENCODER),
        rejected("prompt_embedding_table", _NO_PROMPT_TABLES),
        rejected("prompt_vocab_size", _NO_PROMPT_TABLES),
        rejected("prompt_table_extra_id", _NO_PROMPT_TABLES),
        rejected("prompt_table_extra_ids", _NO_PROMPT_TABLES),
        rejected("PROMPT_TABLE_EXTRA_ID", _NO_PROMPT_TABLES),
        rejected("lora_task_id", _NO_ADAPTERS),
        rejected("lora_weights", _NO_ADAPTERS),
        rejected("lora_config", _NO_ADAPTERS),
        rejected("return_context_logits", _NO_LOGITS),
        rejected("return_generation_logits", _NO_LOGITS),
        rejected("use_draft_logits", _NO_DRAFT),
        rejected("draft_acceptance_threshold", _NO_THRESHOLD),
        rejected("image_input", _TEXT_ONLY),
        rejected("image_bytes_input", _TEXT_ONLY),
        rejected("image_url_input", _TEXT_ONLY),
        rejected("video_bytes_input", _TEXT_ONLY),
        rejected("IMAGE_BYTES", _TEXT_ONLY),
        rejected("IMAGE_URL", _TEXT_ONLY),
        rejected("VIDEO_BYTES", _TEXT_ONLY),
        rejected("IMAGES", _TEXT_ONLY),
        rejected("mrope_rotary_cos_sin", _TEXT_ONLY),
        rejected("mrope_position_deltas", _TEXT_ONLY),
        rejected("context_phase_params", "prefill and decode run in one executor"),
        rejected("retention_token_range_starts", _NO_RETENTION),
        rejected("retention_token_range_ends", _NO_RETENTION),
        rejected("retention_token_range_priorities", _NO_RETENTION),
        rejected("retention_token_range_durations_ms", _NO_RETENTION),
        rejected("retention_decode_priority", _NO_RETENTION),
        rejected("retention_decode_duration_ms", _NO_RETENTION),
    ),
    noun="input",
)
REJECTED = {row.name: row for row in INPUTS if row.status == "rejected"}
