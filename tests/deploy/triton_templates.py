"""Model repositories like the templates of four releases. They are written here and do not depend on the tables of Stoker."""

from __future__ import annotations

from pathlib import Path

TEXT_05 = """text_input STRING -1; max_tokens UINT32 -1; ?bad_words STRING -1; ?stop_words STRING -1; ?end_id UINT32 1; ?pad_id UINT32 1;
 ?top_k UINT32 1; ?top_p FP32 1; ?temperature FP32 1; ?length_penalty FP32 1; ?repetition_penalty FP32 1; ?min_length UINT32 1;
 ?presence_penalty FP32 1; ?random_seed UINT64 1; ?beam_width UINT32 1; ?stream BOOL 1"""
TEXT_08 = """text_input STRING -1; max_tokens INT32 -1; ?bad_words STRING -1; ?stop_words STRING -1; ?end_id INT32 1; ?pad_id INT32 1;
 ?top_k INT32 1; ?top_p FP32 1; ?temperature FP32 1; ?length_penalty FP32 1; ?repetition_penalty FP32 1; ?min_length INT32 1;
 ?presence_penalty FP32 1; ?frequency_penalty FP32 1; ?random_seed UINT64 1; ?return_log_probs BOOL 1; ?return_context_logits BOOL 1;
 ?return_generation_logits BOOL 1; ?beam_width INT32 1; ?stream BOOL 1; ?prompt_embedding_table FP16 -1,-1; ?prompt_vocab_size INT32 1;
 ?embedding_bias_words STRING -1; ?embedding_bias_weights FP32 -1"""
TEXT_18 = (
    TEXT_08.replace("text_input STRING -1", "text_input STRING 1").replace("max_tokens INT32 -1", "max_tokens INT32 1")
    + """;
 ?decoder_text_input STRING 1; ?num_return_sequences INT32 1; ?exclude_input_in_output BOOL 1; ?return_kv_cache_reuse_stats BOOL 1;
 ?lora_task_id UINT64 1; ?lora_weights FP16 -1,-1; ?lora_config INT32 -1,3; ?prompt_table_extra_id UINT64 1"""
)
TEXT_1X = (
    TEXT_18.replace("min_length", "min_tokens").replace("random_seed", "seed").replace("return_kv_cache_reuse_stats", "return_perf_metrics")
)
TEXT_1X += "; ?guided_decoding_guide_type STRING 1; ?guided_decoding_guide STRING 1; ?return_num_input_tokens BOOL 1"

LLM_05 = """input_ids INT32 -1; input_lengths INT32 1; request_output_len UINT32 1; ?end_id UINT32 1; ?pad_id UINT32 1;
 ?beam_width UINT32 1;
 ?temperature FP32 1; ?runtime_top_k UINT32 1; ?runtime_top_p FP32 1; ?len_penalty FP32 1; ?repetition_penalty FP32 1;
 ?min_length UINT32 1; ?presence_penalty FP32 1; ?random_seed UINT64 1; ?stop BOOL 1; ?streaming BOOL 1"""
LLM_08 = """input_ids INT32 -1; input_lengths INT32 1; request_output_len INT32 1; ?draft_input_ids INT32 -1; ?end_id INT32 1;
 ?pad_id INT32 1;
 ?stop_words_list INT32 2,-1; ?bad_words_list INT32 2,-1; ?embedding_bias FP32 -1; ?beam_width INT32 1; ?temperature FP32 1;
 ?runtime_top_k INT32 1; ?runtime_top_p FP32 1; ?len_penalty FP32 1; ?repetition_penalty FP32 1; ?min_length INT32 1;
 ?presence_penalty FP32 1; ?frequency_penalty FP32 1; ?random_seed UINT64 1; ?return_log_probs BOOL 1; ?return_context_logits BOOL 1;
 ?return_generation_logits BOOL 1; ?stop BOOL 1; ?streaming BOOL 1; ?prompt_embedding_table FP16 -1,-1; ?prompt_vocab_size INT32 1;
 ?lora_weights FP16 -1,-1; ?lora_config INT32 -1,3"""
LLM_18 = (
    LLM_08
    + """; ?encoder_input_features ${encoder_input_features_data_type} -1,-1; ?num_return_sequences INT32 1;
 ?draft_logits ${logits_datatype} -1,-1; ?runtime_top_p_min FP32 1; ?early_stopping BOOL 1; ?exclude_input_in_output BOOL 1;
 ?return_kv_cache_reuse_stats BOOL 1; ?lora_task_id UINT64 1; ?retention_token_range_starts INT32 -1; ?skip_cross_attn_blocks BOOL 1"""
)
LLM_1X = (
    LLM_18.replace("min_length", "min_tokens").replace("random_seed", "seed").replace("return_kv_cache_reuse_stats", "return_perf_metrics")
)
LLM_1X += "; ?guided_decoding_guide STRING 1; ?lookahead_window_size INT32 1"

RESULTS_05 = "output_ids INT32 -1,-1"
RESULTS_08 = """output_ids INT32 -1,-1; sequence_length INT32 -1; cum_log_probs FP32 -1; output_log_probs FP32 -1,-1;
 context_logits FP32 -1,-1;
 generation_logits FP32 -1,-1,-1"""
RESULTS_18 = (
    RESULTS_08.replace("context_logits FP32", "context_logits ${logits_datatype}") + "; batch_index INT32 1; sequence_index INT32 1"
)
# The 1.x ensemble declares one output twice.
RESULTS_1X = RESULTS_18 + "; kv_cache_alloc_total_blocks INT32 1; kv_cache_alloc_total_blocks INT32 1; acceptance_rate FP32 1"

KEYS_05 = "max_beam_width gpt_model_type=batching_strategy gpt_model_path=engine_dir max_tokens_in_paged_kv_cache batch_scheduler_policy"
KEYS_05 += " kv_cache_free_gpu_mem_fraction max_num_sequences enable_trt_overlap"
KEYS_08 = KEYS_05.replace(" max_num_sequences", "") + " max_attention_window_size exclude_input_in_output enable_kv_cache_reuse"
KEYS_08 += " normalize_log_probs enable_chunked_context gpu_device_ids"
KEYS_18 = (
    KEYS_08.replace(" enable_trt_overlap", "")
    + """ encoder_model_path sink_token_length cross_kv_cache_fraction
 kv_cache_host_memory_bytes kv_cache_onboard_blocks cancellation_check_period_ms stats_check_period_ms iter_stats_max_iterations
 request_stats_max_iterations participant_ids lora_cache_optimal_adapter_size lora_cache_max_adapter_size lora_cache_gpu_memory_fraction
 lora_cache_host_memory_bytes decoding_mode medusa_choices eagle_choices gpu_weights_percent enable_context_fmha_fp32_acc multi_block_mode
 cuda_graph_mode cuda_graph_cache_size speculative_decoding_fast_logits"""
)
KEYS_1X = (
    KEYS_18
    + """ num_nodes lora_prefetch_dir lookahead_window_size lookahead_ngram_size lookahead_verification_set_size
 guided_decoding_backend tokenizer_dir xgrammar_tokenizer_info_path recv_poll_period_ms enable_trt_overlap"""
)

ERAS = {
    "0.5": (TEXT_05, LLM_05, RESULTS_05, KEYS_05),
    "0.8": (TEXT_08, LLM_08, RESULTS_08, KEYS_08),
    "0.18": (TEXT_18, LLM_18, RESULTS_18, KEYS_18),
    "1.x": (TEXT_1X, LLM_1X, RESULTS_1X, KEYS_1X),
}
PRE_IN = "QUERY STRING -1; ?BAD_WORDS_DICT STRING -1; ?STOP_WORDS_DICT STRING -1; REQUEST_OUTPUT_LEN INT32 -1"
PRE_OUT = "INPUT_ID INT32 -1; REQUEST_INPUT_LEN INT32 1; BAD_WORDS_IDS INT32 2,-1; STOP_WORDS_IDS INT32 2,-1; REQUEST_OUTPUT_LEN INT32 -1"
STEPS = """
ensemble_scheduling {
  step [
    {
      model_name: "preprocessing"
      model_version: -1
      input_map { key: "QUERY" value: "text_input" }
      output_map { key: "INPUT_ID" value: "_INPUT_ID" },
      output_map { key: "REQUEST_INPUT_LEN" value: "_REQUEST_INPUT_LEN" }
    },
    {
      model_name: "tensorrt_llm"
      model_version: -1
      input_map { key: "input_ids" value: "_INPUT_ID" },
      output_map { key: "output_ids" value: "_TOKENS_BATCH" },
    },
    {
      model_name: "postprocessing"
      model_version: -1
      output_map { key: "OUTPUT" value: "text_output" }
    },
  ]
}
"""


def tensors(side: str, listed: str) -> str:
    """A list of messages with the commas and tabs of the original files: after fields, before and after entries."""
    entries = []
    for entry in filter(str.strip, listed.split(";")):
        name, dtype, dims = entry.split()
        optional = "\toptional: true\n" if name.startswith("?") else ""
        shape = ", ".join(dims.split(","))
        dtype = dtype if dtype.startswith("$") else f"TYPE_{dtype}"
        entries.append(f'  {{\n    name: "{name.lstrip("?")}",\n\tdata_type: {dtype}, # comment\n    dims: [ {shape} ]\n{optional}  }}')
    return f"{side} [\n" + "\n  ,\n".join(entries) + ",\n]\n"


def parameter(key: str, value: str) -> str:
    return f'parameters: {{\n  key: "{key}"\n  value: {{\n    string_value: "{value}"\n  }}\n}}\n'


def head(name: str, backend: str, decoupled: bool = False, batching: bool = False) -> str:
    text = f'name: "{name}"\n{backend}\nmax_batch_size: ${{triton_max_batch_size}}\n'
    text += "model_transaction_policy {\n  decoupled: ${decoupled_mode}\n}\n" if decoupled else ""
    text += "dynamic_batching {\n  preferred_batch_size: [ ${triton_max_batch_size} ]\n" if batching else ""
    text += "  max_queue_delay_microseconds: ${max_queue_delay_microseconds}\n" if batching else ""
    return text + ("  default_queue_policy: { max_queue_size: ${max_queue_size} }\n}\n" if batching else "")


def group(count: str) -> str:
    return f"instance_group [\n  {{\n    count: {count}\n    kind : KIND_CPU\n  }}\n]\n"


def repository(era: str) -> dict[str, str]:
    """Folder → config.pbtxt of the templates, without filled variables."""
    text, llm, results, keys = ERAS[era]
    outputs = "text_output STRING -1" + ("" if era == "0.5" else "; " + results.split("; ", 2)[2])
    tokenizer = parameter("tokenizer_dir", "${tokenizer_dir}")
    if era in ("0.5", "0.8"):
        tokenizer += parameter("tokenizer_type", "${tokenizer_type}")
    special = (
        {"add": "", "skip": ""}
        if era == "0.5"
        else {w: parameter(f"{w}_special_tokens", f"${{{w}_special_tokens}}") for w in ("add", "skip")}
    )
    listed = "".join(parameter(key.split("=")[0], f"${{{key.split('=')[-1]}}}") for key in keys.split())
    files = {
        "preprocessing": head("preprocessing", 'backend: "python"')
        + tensors("input", PRE_IN)
        + tensors("output", PRE_OUT)
        + tokenizer
        + special["add"]
        + group("${preprocessing_instance_count}"),
        "tensorrt_llm": head("tensorrt_llm", 'backend: "tensorrtllm"', True, True)
        + tensors("input", llm)
        + tensors("output", results)
        + group("1")
        + parameter("FORCE_CPU_ONLY_INPUT_TENSORS", "no")
        + listed,
        "postprocessing": head("postprocessing", 'backend: "python"')
        + tensors("input", "TOKENS_BATCH INT32 -1,-1")
        + tensors("output", "OUTPUT STRING -1")
        + tokenizer
        + special["skip"]
        + group("${postprocessing_instance_count}"),
        "ensemble": head("ensemble", 'platform: "ensemble"') + tensors("input", text) + tensors("output", outputs) + STEPS,
    }
    if era != "0.5":
        files["tensorrt_llm_bls"] = (
            head("tensorrt_llm_bls", 'backend: "python"', True)
            + tensors("input", text)
            + tensors("output", outputs)
            + parameter("accumulate_tokens", "${accumulate_tokens}")
            + group("${bls_instance_count}")
        )
    return files


GPT_SCALARS = """?temperature FP32 1; ?runtime_top_k UINT32 1; ?runtime_top_p FP32 1; ?len_penalty FP32 1; ?repetition_penalty FP32 1;
 ?min_length UINT32 1; ?presence_penalty FP32 1; ?random_seed UINT64 1; ?output_log_probs BOOL 1; ?beam_width UINT32 1"""
GPT_STEPS = {
    "preprocessing": (
        "QUERY=INPUT_0 REQUEST_OUTPUT_LEN=INPUT_1 BAD_WORDS_DICT=INPUT_2 STOP_WORDS_DICT=INPUT_3",
        "REQUEST_INPUT_LEN=_REQUEST_INPUT_LEN INPUT_ID=_INPUT_ID REQUEST_OUTPUT_LEN=_REQUEST_OUTPUT_LEN",
    ),
    "tensorrt_llm": (
        "input_ids=_INPUT_ID input_lengths=_REQUEST_INPUT_LEN request_output_len=_REQUEST_OUTPUT_LEN end_id=end_id pad_id=pad_id "
        + " ".join(f"{entry.split()[0][1:]}={entry.split()[0][1:]}" for entry in GPT_SCALARS.split(";")),
        "output_ids=_TOKENS_BATCH",
    ),
    "postprocessing": ("TOKENS_BATCH=_TOKENS_BATCH", "OUTPUT=OUTPUT_0"),
}


def gpt_repository() -> dict[str, str]:
    """Folder → config.pbtxt of the Python gpt model of v0.5, without filled variables."""
    top = 'name: "{}"\n{}\nmax_batch_size: 1024\n'
    python = 'backend: "python"'
    tokenizer = parameter("tokenizer_dir", "${tokenizer_dir}") + parameter("tokenizer_type", "${tokenizer_type}") + group("1")
    maps = lambda side, pairs: "".join(  # noqa: E731
        f'      {side}_map {{ key: "{pair.split("=")[0]}" value: "{pair.split("=")[1]}" }}\n' for pair in pairs.split()
    )
    steps = ",\n".join(
        f'    {{\n      model_name: "{name}"\n      model_version: -1\n{maps("input", inputs)}{maps("output", outputs)}    }}'
        for name, (inputs, outputs) in GPT_STEPS.items()
    )
    llm_inputs = "input_ids INT32 -1; input_lengths INT32 1; request_output_len UINT32 -1; end_id UINT32 1; pad_id UINT32 1; " + GPT_SCALARS
    ensemble_inputs = "INPUT_0 STRING -1; INPUT_1 UINT32 -1; INPUT_2 STRING -1; INPUT_3 STRING -1; ?end_id UINT32 1; ?pad_id UINT32 1; "
    pre_inputs = "QUERY STRING -1; BAD_WORDS_DICT STRING -1; STOP_WORDS_DICT STRING -1; REQUEST_OUTPUT_LEN UINT32 -1"
    return {
        "preprocessing": top.format("preprocessing", python)
        + tensors("input", pre_inputs)
        + tensors("output", PRE_OUT.replace("REQUEST_OUTPUT_LEN INT32", "REQUEST_OUTPUT_LEN UINT32"))
        + tensors("output", "PROMPT_LEARNING_TASK_NAME_IDS UINT32 1")
        + tokenizer,
        "tensorrt_llm": top.format("tensorrt_llm", python)
        + tensors("input", llm_inputs)
        + tensors("output", "output_ids INT32 -1,-1; log_probs FP32 -1,-1")
        + parameter("engine_dir", "${engine_dir}")
        + parameter("FORCE_CPU_ONLY_INPUT_TENSORS", "no")
        + group("1"),
        "postprocessing": top.format("postprocessing", python)
        + tensors("input", "TOKENS_BATCH INT32 -1,-1")
        + tensors("output", "OUTPUT STRING -1,-1")
        + tokenizer,
        "ensemble": top.format("ensemble", 'platform: "ensemble"')
        + tensors("input", ensemble_inputs + GPT_SCALARS)
        + tensors("output", "OUTPUT_0 STRING -1,-1")
        + f"ensemble_scheduling {{\n  step [\n{steps}\n  ]\n}}\n",
    }


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name / "1").mkdir(parents=True, exist_ok=True)
        (folder / name / "config.pbtxt").write_text(text)
    return folder


def minimal(**parameters: str) -> str:
    """A tensorrt_llm model with these parameters and the two required ones."""
    values = {"gpt_model_type": "inflight_fused_batching", "gpt_model_path": "/engine"} | parameters
    text = tensors("input", "input_ids INT32 -1; input_lengths INT32 1; request_output_len INT32 1") + tensors("output", RESULTS_05)
    return 'name: "tensorrt_llm"\nmax_batch_size: 4\n' + text + "".join(parameter(k, v) for k, v in values.items())
