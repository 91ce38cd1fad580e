"""Every key of a Truss config.yaml, all generations of its trt_llm section: what becomes of it here.

Sources: the two documents Stoker grew from (model_metadata; trt_llm.build and trt_llm.serve), the templates of spring 2024, and
TrussConfig and TRTLLMConfiguration of truss 0.18.
"""

from __future__ import annotations

from typing import Any

from stoker.deploy import quantization
from stoker.deploy.fields import Field, honoured, no_effect, refused, table
from stoker.deploy.kinds import Anything, Choice, Flag, Location, Real, Text, Whole, names

_FLAG, _TEXT, _ANY = Flag(), Text(empty=True), Anything()
_COUNT, _UNSIGNED = Whole(1, 1 << 24), Whole(0)
_NONE: tuple = (None, "", [], {})

_PLATFORM = "it is for the platform that runs the container"
_IMAGE = "it is for building the Truss's own image; Stoker runs from its own installation"
_SHOWN = "it is shown to people only"
_CLASS = "it describes a model.py of your own, which does not run here"
_ALWAYS = "Stoker always does this"
_OWN = "Stoker decides this by itself, from the shapes and the device"
_NO_LORA = "LoRA adapters are not served"
_MOUNTED = "the platform mounts these files; Stoker fetches what it is told to serve"

FAMILIES = Choice({"llama": "llama", "mistral": "mistral", "deepseek": "deepseek", "qwen": "qwen", "palmyra": "palmyra", "decoder": None})
POLICIES = names("guaranteed_no_evict", "max_utilization")
SOURCES = names("HF", "LOCAL", "REMOTE_URL", "S3", "GCS", "AZURE", "BASETEN_TRAINING")

_BUILD = "trt_llm.build."
_BUILD_ROWS = (
    honoured(_BUILD + "base_model_architecture", FAMILIES, "build.architecture", "in any case; the checkpoint's config decides"),
    honoured(_BUILD + "base_model", FAMILIES, "build.architecture", "encoders and whisper are refused"),
    honoured(_BUILD + "max_input_len", _COUNT, "limits.max_input_len"),
    honoured(_BUILD + "max_output_len", _COUNT, "limits.max_output_len"),
    honoured(_BUILD + "max_seq_len", Whole(2, 1 << 20), "limits.max_total_len", "prompt and output together"),
    honoured(_BUILD + "max_batch_size", Whole(1, 65536), "limits.max_batch_size", "default 256"),
    honoured(_BUILD + "max_num_tokens", Whole(1, 1 << 20), "limits.max_num_tokens", "default 8192"),
    honoured(_BUILD + "max_beam_width", Whole(1, 10), "limits.max_beam_width", "default 1"),
    refused(_BUILD + "max_prompt_embedding_table_size", _UNSIGNED, "prompt embeddings are not taken", 0),
    honoured(_BUILD + "huggingface_ckpt_repository", Location(), "build.checkpoint", "hub id or local path"),
    honoured(_BUILD + "checkpoint_repository.source", SOURCES, "repository.source", "HF, LOCAL, S3, REMOTE_URL (with #sha256=…)"),
    honoured(_BUILD + "checkpoint_repository.repo", Location(), "build.checkpoint"),
    honoured(_BUILD + "checkpoint_repository.revision", Text(), "build.revision"),
    honoured(_BUILD + "checkpoint_repository.runtime_secret_name", Text(), "build.token_secret", "default hf_access_token"),
    refused(_BUILD + "gather_all_token_logits", _FLAG, "no interface here returns logits", False, hint="Ask for logprobs."),
    no_effect(_BUILD + "strongly_typed", _FLAG, _ALWAYS),
    honoured(_BUILD + "quantization_type", quantization.TRUSS, "quantization_type", "either spelling, in any case"),
    honoured(_BUILD + "quantization_config.calib_size", Whole(1, 1 << 20), "quantization.calibration_size"),
    honoured(_BUILD + "quantization_config.calib_dataset", Location(), "quantization.calibration_data", "a file, folder or hub dataset"),
    honoured(_BUILD + "quantization_config.calib_max_seq_length", _COUNT, "quantization.calibration_seq_len"),
    honoured(_BUILD + "tensor_parallel_count", Whole(1, 1024), "mapping.tensor_parallel"),
    honoured(_BUILD + "pipeline_parallel_count", Whole(1, 1024), "mapping.pipeline_parallel"),
    refused(_BUILD + "sequence_parallel_count", _COUNT, "a sequence is not split over devices", 1),
    refused(_BUILD + "moe_expert_parallel_option", Whole(-1, 1024), "experts are spread as the other weights", -1, 0, 1),
    no_effect(_BUILD + "num_builder_gpus", _COUNT, "the build runs where the server does"),
    no_effect(_BUILD + "skip_build_result", _FLAG, "built engines are cached, by content"),
    refused(_BUILD + "speculator", _ANY, "speculative decoding is not served", *_NONE),
    refused(_BUILD + "lora_adapters", _ANY, _NO_LORA, *_NONE, hint="Merge the adapters into the checkpoint."),
    no_effect(_BUILD + "lora_configuration", _ANY, _NO_LORA),
    honoured(_BUILD + "kv_cache_free_gpu_mem_fraction", Real(0.0, 1.0), "runtime.kv_cache_fraction"),
    no_effect(_BUILD + "plugin_configuration.multi_block_mode", _FLAG, _OWN),
    no_effect(_BUILD + "plugin_configuration.paged_kv_cache", _FLAG, "the KV cache is always paged"),
    no_effect(_BUILD + "plugin_configuration.use_fused_mlp", _FLAG, _ALWAYS),
    no_effect(_BUILD + "plugin_configuration.gemm_plugin", _TEXT, _OWN),
    no_effect(_BUILD + "plugin_configuration.use_paged_context_fmha", _FLAG, _ALWAYS),
    no_effect(_BUILD + "plugin_configuration.use_fp8_context_fmha", _FLAG, "prefill attention computes in the engine's dtype"),
)

_SERVE = "trt_llm.serve."
_SERVE_ROWS = (
    honoured(_SERVE + "engine_repository", Location(), "engine.location", "a built engine: local path, hub id or address"),
    honoured(_SERVE + "tokenizer_repository", Location(), "engine.tokenizer", "where the engine brings none"),
    honoured(_SERVE + "tensor_parallel_count", Whole(1, 1024), "mapping.tensor_parallel", "must be the engine's"),
    honoured(_SERVE + "pipeline_parallel_count", Whole(1, 1024), "mapping.pipeline_parallel", "must be the engine's"),
)

_METADATA = "model_metadata."
_METADATA_ROWS = (
    honoured(_METADATA + "engine_repository", Location(), "engine.location", "the oldest generation"),
    honoured(_METADATA + "tokenizer_repository", Location(), "engine.tokenizer", "the oldest generation"),
    honoured(_METADATA + "tensor_parallelism", Whole(1, 1024), "mapping.tensor_parallel", "the oldest generation"),
    refused(_METADATA + "pipeline_parallelism", Whole(1, 1024), "that generation has none", 1, hint="Use trt_llm.serve."),
    honoured(_METADATA + "tags", _ANY, "tags", "openai-compatible, force-legacy-api-non-openai-compatible"),
    honoured(
        _METADATA + "max_tokens_counts_prompt",
        _FLAG,
        "options.max_tokens_counts_prompt",
        "max_tokens is of prompt and answer together; true where model_metadata names the engine, as its document says",
    ),
)

_RUN = "trt_llm.runtime."
_RUN_ROWS = (
    honoured(_RUN + "kv_cache_free_gpu_mem_fraction", Real(0.0, 1.0), "runtime.kv_cache_fraction", "default 0.9"),
    refused(_RUN + "kv_cache_host_memory_bytes", _UNSIGNED, "KV blocks are not moved to host memory", 0),
    honoured(_RUN + "enable_chunked_context", _FLAG, "runtime.chunked_prefill", "default true"),
    honoured(_RUN + "batch_scheduler_policy", POLICIES, "runtime.policy", "default guaranteed_no_evict"),
    honoured(_RUN + "request_default_max_tokens", _COUNT, "server.default_max_tokens"),
    honoured(_RUN + "served_model_name", Text(), "server.model_name"),
    no_effect(_RUN + "total_token_limit", _UNSIGNED, "the queue is bounded by requests and the KV cache by tokens"),
    honoured(_RUN + "webserver_default_route", names("/v1/chat/completions", "/v1/completions"), "options.default_route"),
    no_effect(_RUN + "lora_cache_max_adapter_size", _UNSIGNED, _NO_LORA),
    no_effect(_RUN + "lora_cache_optimal_adapter_size", _UNSIGNED, _NO_LORA),
    no_effect(_RUN + "lora_cache_gpu_memory_fraction", Real(0.0, 1.0, closed=True), _NO_LORA),
    no_effect(_RUN + "lora_cache_host_memory_bytes", _UNSIGNED, _NO_LORA),
)
_RUN_V2_ROWS = (
    honoured(_RUN + "max_seq_len", Whole(2, 1 << 20), "limits.max_total_len", "prompt and output together"),
    honoured(_RUN + "max_batch_size", Whole(1, 65536), "limits.max_batch_size", "default 256"),
    honoured(_RUN + "max_num_tokens", Whole(1, 1 << 20), "limits.max_num_tokens", "default 8192"),
    honoured(_RUN + "tensor_parallel_size", Whole(1, 1024), "mapping.tensor_parallel"),
    honoured(_RUN + "enable_chunked_prefill", _FLAG, "runtime.chunked_prefill", "default true"),
    refused(_RUN + "patch_kwargs", _ANY, "it patches arguments of another engine", *_NONE),
)

_TRT_LLM_ROWS = (
    honoured("trt_llm.inference_stack", names("v1", "v2"), "stack", "default v1"),
    *(no_effect(f"trt_llm.version_overrides.{part}_version", _TEXT, "it chooses another server's release")
      for part in ("engine_builder", "briton", "bei", "bei_bert", "v2_llm")),
)  # fmt: skip

_TOP_ROWS = (
    honoured("model_name", Text(), "name", "the model's name for OpenAI clients, unless served_model_name is given"),
    honoured("secrets", _ANY, "secrets", "names only; values come from /secrets/NAME or TRUSS_SECRET_NAME"),
    honoured("resources.accelerator", Text(), "resources.accelerator", "NAME:COUNT; the count must be the number of ranks"),
    honoured("resources.use_gpu", _FLAG, "resources.use_gpu", "false: the engine runs on the CPU"),
    refused("resources.node_count", _COUNT, "a Truss is one host here", 1, hint="Start Stoker on each host with its own launcher."),
    no_effect("resources.cpu", _TEXT, _PLATFORM),
    no_effect("resources.memory", _TEXT, _PLATFORM),
    no_effect("resources.instance_type", _TEXT, _PLATFORM),
    no_effect("resources.fabric", _ANY, _PLATFORM),
    no_effect("runtime.predict_concurrency", Whole(1, 1 << 20), "requests are batched in flight, however many come"),
    no_effect("runtime.num_workers", _COUNT, "in-flight batching serves every request from one copy of the model"),
    no_effect("runtime.streaming_read_timeout", _UNSIGNED, "it is for the proxy in front of the model"),
    no_effect("runtime.enable_tracing_data", _FLAG, _PLATFORM),
    no_effect("runtime.enable_debug_logs", _FLAG, "STOKER_LOG=debug shows more"),
    honoured("runtime.transport", _ANY, "transport", "http, and grpc without a model.py of your own; websocket is refused"),
    refused("runtime.is_websocket_endpoint", _FLAG, "websockets are not spoken", False),
    no_effect("runtime.health_checks", _ANY, _PLATFORM),
    no_effect("runtime.oidc", _ANY, _PLATFORM),
    no_effect("runtime.remote_ssh", _ANY, _PLATFORM),
    no_effect("runtime.egress_restrictions", _ANY, _PLATFORM),
    no_effect("runtime.truss_server_version_override", _TEXT, "Stoker is the server"),
    no_effect("build", _ANY, _IMAGE),
    no_effect("build_commands", _ANY, _IMAGE),
    no_effect("base_image", _ANY, _IMAGE),
    no_effect("python_version", _TEXT, _IMAGE),
    no_effect("requirements", _ANY, _IMAGE),
    no_effect("requirements_file", _TEXT, _IMAGE),
    no_effect("system_packages", _ANY, _IMAGE),
    no_effect("environment_variables", _ANY, "Stoker reads its own environment; export them before starting it"),
    refused("docker_server", _ANY, "it starts a server of your own", *_NONE, hint="Run that Truss with truss itself."),
    refused("bis_llm", _ANY, "it configures another engine", *_NONE, hint="Use trt_llm."),
    no_effect("model_cache", _ANY, _MOUNTED),
    no_effect("hf_cache", _ANY, _MOUNTED),
    no_effect("weights", _ANY, _MOUNTED),
    no_effect("bdn", _ANY, _MOUNTED),
    no_effect("external_data", _ANY, _MOUNTED),
    no_effect("training_checkpoints", _ANY, _MOUNTED),
    no_effect("cache_internal", _ANY, _MOUNTED),
    no_effect("data_dir", _TEXT, _CLASS),
    no_effect("external_package_dirs", _ANY, _CLASS),
    no_effect("bundled_packages_dir", _TEXT, _CLASS),
    no_effect("model_module_dir", _TEXT, _CLASS),
    no_effect("model_class_filename", _TEXT, _CLASS),
    no_effect("model_class_name", _TEXT, _CLASS),
    no_effect("model_framework", _TEXT, _CLASS),
    no_effect("model_type", _TEXT, _CLASS),
    no_effect("input_type", _TEXT, _CLASS),
    no_effect("description", _ANY, _SHOWN),
    no_effect("examples_filename", _TEXT, _SHOWN),
    no_effect("use_local_src", _FLAG, _IMAGE),
    no_effect("live_reload", _FLAG, "a changed configuration is read at the next start"),
    no_effect("apply_library_patches", _FLAG, _IMAGE),
    no_effect("spec_version", _TEXT, "every generation is read"),
)

TABLE: dict[str, Field] = table(
    *_BUILD_ROWS, *_SERVE_ROWS, *_METADATA_ROWS, *_RUN_ROWS, *_RUN_V2_ROWS, *_TRT_LLM_ROWS, *_TOP_ROWS
)  # fmt: skip

V2_ONLY = frozenset(row.key for row in _RUN_V2_ROWS)
V1_ONLY = frozenset(row.key for row in _RUN_ROWS) - {_RUN + "served_model_name"}
# Of the second stack's build, what truss writes out though nobody set it; it asks for nothing.
V2_BUILD_DEFAULTS: dict[str, Any] = {
    "max_batch_size": 256, "max_num_tokens": 8192, "max_beam_width": 1, "max_prompt_embedding_table_size": 0,
    "gather_all_token_logits": False, "strongly_typed": False, "tensor_parallel_count": 1, "pipeline_parallel_count": 1,
    "sequence_parallel_count": 1, "moe_expert_parallel_option": -1,
    "plugin_configuration": {"paged_kv_cache": True, "use_paged_context_fmha": True, "use_fp8_context_fmha": False},
}  # fmt: skip
V2_BUILD = ("checkpoint_repository", "quantization_type", "quantization_config", "num_builder_gpus", "skip_build_result", "base_model")
REQUIRED_BY_THE_FIRST = tuple(
    _BUILD + name
    for name in (
        "base_model_architecture",
        "max_input_len",
        "max_output_len",
        "max_batch_size",
        "max_beam_width",
        "huggingface_ckpt_repository",
    )
)
