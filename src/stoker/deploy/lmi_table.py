"""Every key of serving.properties and the environment around it: what becomes of it here.

Sources: the TensorRT-LLM and common tables of the LMI documentation at 0.26 to 0.36, and the DJL Serving configuration.
Keys are as in serving.properties; OPTION_X in the environment is option.x, SERVING_X is x.
"""

from __future__ import annotations

from stoker.deploy import quantization
from stoker.deploy.fields import honoured, no_effect, refused, table
from stoker.deploy.kinds import Anything, Choice, Flag, Location, Real, Text, Whole, names

_FLAG, _TEXT, _ANY = Flag(), Text(empty=True), Anything()
_COUNT = Whole(1, 1 << 24)
_UNSIGNED = Whole(0)
_DTYPES = Choice({
    "fp32": "float32", "float32": "float32", "fp16": "float16", "float16": "float16",
    "bf16": "bfloat16", "bfloat16": "bfloat16", "auto": None,
})  # fmt: skip
POLICIES = Choice({"max_utilization": "max_utilization", "guaranteed_no_evict": "guaranteed_no_evict", "static_batch": "static"})


BAICHUAN = names("v1_7b", "v1_13b", "v2_7b", "v2_13b")
CHATGLM = names(
    "chatglm_6b",
    "chatglm2_6b",
    "chatglm2_6b_32k",
    "chatglm3_6b",
    "chatglm3_6b_base",
    "chatglm3_6b_32k",
    "glm_10b",
    "glm",
    "chatglm",
    "chatglm2",
    "chatglm3",
    "glm4",
    "chatglm-6b",
    "chatglm2-6b",
    "chatglm3-6b",
)
GPT = names("gpt2", "santacoder", "starcoder", "starcoder2")

_ONE_COPY = "in-flight batching serves every request from one copy of the model; there are no worker processes to count"
_ALWAYS = "Stoker always does this"
_OWN = "Stoker decides this by itself, from the shapes and the device"
_NO_LORA = "LoRA adapters are not served"
_NO_DRAFT = "speculative decoding with a draft model is not served"
_TRT = "it belongs to TensorRT's own build, which does not take place"
_NO_NETTY = "it tunes the Java server, which does not run here"

_MODEL_SERVER = (
    no_effect("engine", names("Python", "MPI"), "Stoker is the engine"),
    honoured("job_queue_size", Whole(1, 1 << 24), "runtime.max_queue_size", "default 1000"),
    honoured("batch_size", Whole(1, 65536), "options.batch_size", "above 1 it turns the rolling batch off, as in LMI"),
    no_effect("max_batch_delay", Whole(0, 3_600_000), "no request waits for others: they are batched in flight"),
    no_effect("max_idle_time", _UNSIGNED, _ONE_COPY),
    no_effect("minWorkers", _UNSIGNED, _ONE_COPY),
    no_effect("maxWorkers", _UNSIGNED, _ONE_COPY),
    no_effect("min_workers", _UNSIGNED, _ONE_COPY),
    no_effect("max_workers", _UNSIGNED, _ONE_COPY),
    honoured("load_on_devices", _TEXT, "runtime.devices", "indices separated by ; or *, one for each rank"),
    honoured("max_request_size", Whole(1 << 10, 1 << 32), "server.max_request_bytes", "bytes; default 6553500"),
    honoured("http_port", Whole(0, 65535), "server.http_port", "Stoker's own key; default 8080"),
    no_effect("default_invocations_accept", Text(), "the request's body says how it is answered, whatever Accept says, as there"),
    no_effect("max_response_size", _UNSIGNED, "answers are streamed and never held in one buffer"),
    no_effect("log_model_metric", _FLAG, "metrics are always at /metrics"),
    no_effect("features", _TEXT, "it names parts of the DJL image"),
    no_effect("load_models", _TEXT, "the folder named on the command line is what is served"),
    no_effect("model_store", _TEXT, "the folder named on the command line is what is served"),
    no_effect("number_of_netty_threads", _UNSIGNED, _NO_NETTY),
    no_effect("netty_client_threads", _UNSIGNED, _NO_NETTY),
    no_effect("prefer_direct_buffer", _FLAG, _NO_NETTY),
    no_effect("retry_count", _UNSIGNED, "one bad request fails alone; there is no worker to restart"),
    no_effect("required_memory_mb", _UNSIGNED, "memory is estimated and checked before anything is loaded"),
    no_effect("reserved_memory_mb", _UNSIGNED, "memory is estimated and checked before anything is loaded"),
)

_MODEL = (
    honoured(
        "option.model_id", Location(), "build.checkpoint", "hub id, path or s3:// (checkpoint or prebuilt); default: the model folder"
    ),
    honoured("option.s3url", Location(), "build.checkpoint", "the older name of option.model_id"),
    honoured("option.revision", Text(), "build.revision"),
    honoured("option.trust_remote_code", _FLAG, "build.trust_remote_code"),
    honoured("option.dtype", _DTYPES, "build.dtype", "default: the checkpoint's own"),
    honoured("option.tokenizer", Location(), "build.tokenizer"),
    no_effect("option.tokenizer_mode", names("auto", "slow"), "the build converts every tokenizer to one fast form"),
    refused("option.skip_tokenizer_init", _FLAG, "requests are text", False),
    refused("option.task", _TEXT, "only text generation is served", "text-generation", "auto", ""),
    no_effect(
        "option.entryPoint",
        Choice(
            {
                n.lower(): n
                for n in (
                    "djl_python.tensorrt_llm",
                    "djl_python.huggingface",
                    "djl_python.transformers_neuronx",
                    "djl_python.deepspeed",
                    "djl_python.lmi_trtllm.trtllm_service",
                    "djl_python.lmi_vllm.vllm_service",
                    "djl_python.lmi_vllm.vllm_async_service",
                )
            }
        ),
        "Stoker is the handler; one of your own does not run here",
    ),
    no_effect("option.handler", names("handle"), "Stoker is the handler"),
    no_effect("option.engine", names("Python", "MPI"), "Stoker is the engine"),
    no_effect("option.low_cpu_mem_usage", _FLAG, _ALWAYS),
    no_effect("option.device_map", names("auto"), _OWN),
    refused(
        "option.env", _ANY, "it sets variables of a Python process that does not exist here", "", hint="Export them before starting Stoker."
    ),
)

_SPREAD = (
    honoured(
        "option.tensor_parallel_degree",
        Whole(1, 1024, {"max": 0}),
        "mapping.tensor_parallel",
        "max: every GPU that is visible; default max",
    ),
    honoured("option.pipeline_parallel_degree", Whole(1, 1024), "mapping.pipeline_parallel"),
    honoured("option.pipeline_parallel_size", Whole(1, 1024), "mapping.pipeline_parallel"),
    no_effect("option.mpi_mode", _FLAG, "ranks are started without MPI"),
    no_effect("option.parallel_loading", _FLAG, _ALWAYS),
    honoured("option.use_custom_all_reduce", _FLAG, "runtime.custom_all_reduce", "default on; GPUs only"),
    no_effect("option.embedding_parallel_mode", _TEXT, _OWN),
    refused("option.cluster_size", _COUNT, "LMI's own clustering is not spoken", 1, hint="Use the devices of one host."),
    refused("option.context_parallel_size", _COUNT, "a sequence is not split over devices", 1),
    refused("option.moe_tensor_parallel_size", Whole(-1, 1024), "experts are spread as the other weights", -1, 1),
    refused("option.moe_expert_parallel_size", Whole(-1, 1024), "experts are spread as the other weights", -1, 1),
    refused("option.enable_attention_dp", _FLAG, "attention is spread by heads", False),
    refused("option.auto_parallel", _FLAG, "the spread is stated, not searched", False, hint="Set option.tensor_parallel_degree."),
    no_effect("option.auto_parallel_world_size", _COUNT, "it belongs to option.auto_parallel, which is refused"),
)

_BATCH = (
    honoured(
        "option.rolling_batch",
        Choice({n: n != "disable" for n in ("auto", "trtllm", "vllm", "lmi-dist", "scheduler", "disable")}),
        "options.rolling_batch",
        "disable: the dynamic-batch shapes; the engine batches in flight all the same",
    ),
    honoured("option.max_rolling_batch_size", Whole(1, 65536), "limits.max_batch_size", "default 32"),
    honoured("option.max_batch_size", Whole(1, 65536), "limits.max_batch_size"),
    honoured("option.max_num_sequences", Whole(1, 65536), "runtime.max_num_sequences", "default option.max_rolling_batch_size"),
    honoured("option.max_input_len", _COUNT, "limits.max_input_len", "default 1024; LLaMA 512"),
    honoured("option.max_output_len", _COUNT, "limits.max_output_len", "default 512; Falcon 1024"),
    honoured("option.max_seq_len", _COUNT, "limits.max_total_len", "prompt and output together"),
    honoured("option.max_num_tokens", Whole(1, 1 << 20), "limits.max_num_tokens", "default 8192"),
    honoured("option.max_beam_width", Whole(1, 10), "limits.max_beam_width"),
    honoured("option.tokens_per_block", Whole(1, 1024), "limits.tokens_per_block", "16, 32, 64 or 128; default 64"),
    honoured("option.batch_scheduler_policy", POLICIES, "runtime.policy", "default max_utilization"),
    honoured("option.batching_type", Choice({"inflight": None, "static": "static"}), "runtime.policy"),
    honoured("option.enable_trt_overlap", _FLAG, "runtime.overlap", "default on: here it never changes an answer"),
    honoured("option.enable_overlap_scheduler", _FLAG, "runtime.overlap"),
    honoured("option.enable_chunked_prefill", _FLAG, "runtime.chunked_prefill", "default on"),
    honoured("option.use_cuda_graph", _FLAG, "runtime.cuda_graphs", "default on"),
    no_effect("option.waiting_steps", _UNSIGNED, "new requests join at the next step"),
)

_CACHE = (
    honoured("option.kv_cache_free_gpu_mem_fraction", Real(0.0, 1.0), "runtime.kv_cache_fraction", "default 0.95 where there is a GPU"),
    honoured("option.free_gpu_memory_fraction", Real(0.0, 1.0), "runtime.kv_cache_fraction"),
    honoured("option.enable_kv_cache_reuse", _FLAG, "runtime.prefix_reuse", "default on: here it never changes an answer"),
    honoured("option.enable_block_reuse", _FLAG, "runtime.prefix_reuse"),
    honoured("option.max_tokens", _COUNT, "runtime.kv_cache_tokens"),
    honoured("option.max_attention_window", _COUNT, "runtime.attention_window"),
    honoured("option.kv_cache_dtype", quantization.KV_CACHE, "build.kv_cache_dtype"),
    refused("option.sink_token_length", _UNSIGNED, "the window keeps no sink tokens", 0),
    refused("option.host_cache_size", _UNSIGNED, "KV blocks are not moved to host memory", 0),
    no_effect("option.onboard_blocks", _FLAG, "KV blocks are not moved to host memory"),
    no_effect("option.secondary_offload_min_priority", _UNSIGNED, "KV blocks are not moved to host memory"),
    refused("option.cross_kv_cache_fraction", Real(0.0, 1.0, closed=True), "encoder-decoder models are not served", 0.0),
    no_effect("option.event_buffer_max_size", _UNSIGNED, "KV cache events are not published"),
)

_MODEL_KIND = (
    honoured(
        "option.baichuan_model_version", BAICHUAN, "extra.baichuan_model_version", "checked against the checkpoint, which is what decides"
    ),
    honoured("option.chatglm_model_version", CHATGLM, "extra.chatglm_model_version", "checked against the checkpoint; may be left out"),
    honoured("option.gpt_model_version", GPT, "extra.gpt_model_version", "checked against the checkpoint; may be left out"),
    honoured("option.rotary_base", Real(0.0, 1e12), "extra.rotary_base", "default: the checkpoint's"),
    honoured("option.rotary_dim", Whole(1, 65536), "extra.rotary_dim", "default: the checkpoint's"),
    honoured("option.rotary_scaling_type", names("linear", "dynamic"), "extra.rotary_scaling_type", "with option.rotary_scaling_factor"),
    honoured("option.rotary_scaling_factor", Real(1.0, 1e6), "extra.rotary_scaling_factor", "with option.rotary_scaling_type; above 1"),
    no_effect("option.multi_block_mode", _FLAG, _OWN),
    no_effect("option.use_fused_mlp", _FLAG, _ALWAYS),
    no_effect("option.logits_dtype", names("float32", "float16", "bfloat16"), "logits are float32"),
    no_effect("option.attn_backend", _TEXT, _OWN),
    no_effect("option.moe_backend", _TEXT, _OWN),
    no_effect("option.backend", _TEXT, "Stoker is the backend"),
)

_QUANTIZATION = (
    honoured("option.quantize", quantization.LMI, "build.quantization"),
    honoured("option.smoothquant_alpha", Real(0.0, 1.0, closed=True), "SMOOTH_QUANT.alpha", "default 0.8; with quantize=smoothquant"),
    honoured("option.smoothquant_per_token", _FLAG, "SMOOTH_QUANT.per_token", "default false; with quantize=smoothquant"),
    honoured("option.smoothquant_per_channel", _FLAG, "SMOOTH_QUANT.per_channel", "default false; with quantize=smoothquant"),
    no_effect("option.multi_query_mode", _FLAG, "the number of key and value heads is read from the checkpoint"),
    no_effect("option.awq_format", names("int4_awq"), "int4_awq is the only format, here as there"),
    honoured("option.awq_calib_size", Whole(1, 1 << 20), "AWQ.calibration_size", "default 32; with quantize=awq"),
    honoured("option.awq_block_size", Whole(32, 128), "AWQ.group_size", "32, 64 or 128; default 128; with quantize=awq"),
    honoured("option.calib_size", Whole(1, 1 << 20), "any.calibration_size", "default 512; with any option.quantize"),
    no_effect("option.calib_batch_size", _COUNT, "calibration texts are batched to fit memory"),
    no_effect("option.q_format", names("fp8", "int4_awq", "int8_sq", "full_prec"), "option.quantize says it already"),
    no_effect("option.use_fp8_context_fmha", _FLAG, "prefill attention computes in the engine's dtype"),
)

_SERVER = (
    honoured(
        "option.output_formatter",
        names("json", "jsonlines", "sse", "json_chat", "jsonlines_chat"),
        "options.output_formatter",
        "functions of your own are refused",
    ),
    refused("option.input_formatter", _TEXT, "functions of your own are not run", ""),
    honoured(
        "option.enable_streaming",
        Choice({"true": True, "false": False, "huggingface": True}),
        "streaming",
        "deprecated: jsonlines when true",
    ),
    honoured(
        "option.tool_call_parser",
        Choice({"llama3": "llama3", "llama3_json": "llama3", "hermes": "hermes", "qwen": "qwen", "mistral": "mistral"}),
        "server.tool_parser",
        "how the model writes tool calls; default: tools are refused",
    ),
    honoured("option.reasoning_parser", names("qwen3", "deepseek_r1"), "server.reasoning_parser", "default: reasoning stays in the text"),
    no_effect("option.enable_auto_tool_choice", _FLAG, "option.tool_call_parser says it already"),
    no_effect("option.enable_reasoning", _FLAG, "option.reasoning_parser says it already"),
    honoured("option.tgi_compat", _FLAG, "options.tgi_compat"),
    honoured("option.async_mode", Choice({"true": "async", "false": None}), "options.dialect", "true: the shapes of LMI's async handler"),
    honoured(
        "option.lmi_dialect",
        names("head", "0.26", "0.27", "async"),
        "options.dialect",
        "Stoker's own key: whose byte shapes to answer with",
    ),
    refused("option.bedrock_compat", _FLAG, "Bedrock's shapes are not spoken", False),
    refused("option.enable_stateful_sessions", _FLAG, "sessions are not kept", False),
    honoured("option.model_loading_timeout", Whole(1, 1 << 24), "server.load_timeout_s", "seconds; default 1800"),
    honoured("option.predict_timeout", Whole(1, 1 << 24), "server.request_timeout_s", "seconds; default 120"),
    no_effect("option.max_output_size", _UNSIGNED, "answers are streamed and never held in one buffer"),
    no_effect("option.pythonExecutable", _TEXT, "no Python process is started for a model"),
    no_effect("option.device_id", _TEXT, "load_on_devices chooses devices"),
    no_effect("option.guided_decoding_backend", _TEXT, "xgrammar compiles every grammar"),
    no_effect("option.iter_stats_max_iterations", _UNSIGNED, "metrics are always at /metrics"),
    no_effect("option.request_stats_max_iterations", _UNSIGNED, "metrics are always at /metrics"),
    refused(
        "option.normalize_log_probs", _FLAG, "log probabilities are not divided by length", False, hint="Use length_penalty in requests."
    ),
    refused("option.gather_generation_logits", _FLAG, "no interface here returns logits", False, hint="Ask for logprobs."),
)

_BUILD = (
    no_effect("option.num_checkpoint_workers", _UNSIGNED, _TRT),
    no_effect("option.num_engine_workers", _UNSIGNED, _TRT),
    no_effect("option.load_by_shard", _FLAG, _ALWAYS),
    no_effect("option.fast_build", _FLAG, _TRT),
    no_effect("option.enable_build_cache", _FLAG, "built engines are always cached, by content"),
    no_effect("option.load_format", names("auto", "safetensors", "pt", "bin"), "the files of the checkpoint say it"),
    no_effect("option.partition_handler", _TEXT, _TRT),
    refused(
        "option.trtllm_checkpoint_path",
        _TEXT,
        "TensorRT-LLM's converted checkpoints are not read",
        "",
        hint="Name the Hugging Face checkpoint in option.model_id.",
    ),
    refused("option.enable_lora", _FLAG, _NO_LORA, False),
    no_effect("option.max_loras", _UNSIGNED, _NO_LORA),
    no_effect("option.max_lora_rank", _UNSIGNED, _NO_LORA),
    no_effect("option.max_cpu_loras", _UNSIGNED, _NO_LORA),
    refused("option.draft_model_id", _TEXT, _NO_DRAFT, ""),
    refused("option.spec_length", _UNSIGNED, _NO_DRAFT, 0),
)

TABLE = table(*_MODEL_SERVER, *_MODEL, *_SPREAD, *_BATCH, *_CACHE, *_MODEL_KIND, *_QUANTIZATION, *_SERVER, *_BUILD)

# variable → the key it sets when the file does not
ENVIRONMENT = {
    "HF_MODEL_ID": "option.model_id",
    "HF_REVISION": "option.revision",
    "HF_TASK": "option.task",
    "HF_MODEL_TRUST_REMOTE_CODE": "option.trust_remote_code",
    "TENSOR_PARALLEL_DEGREE": "option.tensor_parallel_degree",
    "PIPELINE_PARALLEL_DEGREE": "option.pipeline_parallel_degree",
    "MAX_BATCH_SIZE": "option.max_rolling_batch_size",
    "MAX_CONCURRENT_REQUESTS": "job_queue_size",
}

# variable → the key it sets whatever the file says: SageMaker starts the container with these
OVERRIDES = {
    "SAGEMAKER_STARTUP_TIMEOUT": "option.model_loading_timeout",
    "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": "option.predict_timeout",
    "SAGEMAKER_NUM_MODEL_WORKERS": "minWorkers",
    "SAGEMAKER_MAX_REQUEST_SIZE": "max_request_size",
    "SAGEMAKER_BIND_TO_PORT": "http_port",
    "SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT": "default_invocations_accept",
}
