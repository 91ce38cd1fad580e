"""The field table of a Truss config.yaml, with all generations of its trt_llm section.

Sources: the two first documents of TensorRT-LLM in Truss (model_metadata; trt_llm.build and trt_llm.serve), the templates of spring
2024, and TrussConfig and TRTLLMConfiguration of truss 0.18.
"""

from __future__ import annotations

from typing import Any

from stoker.base.config import MAX_DRAFT_TOKENS
from stoker.base.fields.table import FieldRow, FieldTable, accepted, no_effect, rejected
from stoker.base.fields.values import Anything, Choice, Flag, Line, Real, ValueType, Whole, names
from stoker.deploy import quantization
from stoker.deploy.locations import Location
from stoker.deploy.truss.image_keys import ARGUMENTS, IMAGE_ROWS

_FLAG, _TEXT, _ANY = Flag(), Line(allow_empty=True), Anything(hidden=True)
_COUNT, _UNSIGNED = Whole(1, 1 << 24), Whole(0)
_NONE: tuple[Any, ...] = (None, "", [], {})

_PLATFORM = "it is a setting of the platform that runs the container"
_IMAGE = "it is a setting of the image build; Stoker runs from its own installation"
_INFORMATION = "it is information for people"
_CLASS = "it describes a custom model.py, which Stoker does not run"
_ALWAYS = "Stoker always does this"
_AUTOMATIC = "Stoker chooses this by shapes and device"
_NO_LORA = "LoRA adapters are not served"
_MOUNTED = "the platform mounts these files; Stoker fetches checkpoints itself"

_EMBEDDINGS = "embedding, classification and reranking models are not served"
_BUILD = "trt_llm.build."
FAMILIES = Choice(
    {"llama": "llama", "mistral": "mistral", "deepseek": "deepseek", "qwen": "qwen", "palmyra": "palmyra", "decoder": None},
    unsupported={"encoder": _EMBEDDINGS, "encoder_bert": _EMBEDDINGS, "whisper": "speech recognition is not served"},
)
ROUTES = Choice(
    {route: route for route in ("/v1/chat/completions", "/v1/completions")},
    unsupported=dict.fromkeys(("/v1/embeddings", "/v1/systemone", "/rerank", "/predict", "/predict_tokens"), _EMBEDDINGS),
)
POLICIES = names("guaranteed_no_evict", "max_utilization")
SOURCES = names("HF", "LOCAL", "REMOTE_URL", "S3", "GCS", "AZURE", "BASETEN_TRAINING")


HEADS = "heads"  # of MEDUSA and EAGLE, until their location is read


def _speculator_rows() -> tuple[FieldRow, ...]:
    """The rows for the speculator of trt_llm.build. Draft models and heads are in a repository of their own."""
    section, lookahead = _BUILD + "speculator.", "prompt lookup has no windows; answers are the same for every value"
    repository = section + "checkpoint_repository."
    modes = Choice({"lookahead_decoding": "ngram", "draft_tokens_external": "request", "medusa": HEADS, "eagle": HEADS})
    numbers = ("lookahead_windows_size", "lookahead_ngram_size", "lookahead_verification_set_size")
    return (
        accepted(
            section + "speculative_decoding_mode",
            modes,
            "LOOKAHEAD_DECODING is prompt lookup, DRAFT_TOKENS_EXTERNAL has a draft model or drafts of requests, MEDUSA and EAGLE heads",
            "runtime.speculate",
        ),
        no_effect(section + "enable_b10_lookahead", _FLAG, "speculative_decoding_mode selects prompt lookup"),
        accepted(section + "num_draft_tokens", Whole(1, MAX_DRAFT_TOKENS), target="runtime.draft_tokens"),
        *(no_effect(section + name, _UNSIGNED, lookahead) for name in numbers),
        accepted(repository + "source", SOURCES, "of the draft model or heads: as for the checkpoint", "heads.source"),
        accepted(
            repository + "repo",
            Location(),
            "the draft model, or draft heads for MEDUSA and EAGLE",
            "heads.location",
        ),
        accepted(repository + "revision", Line(), target="heads.revision"),
        accepted(repository + "runtime_secret_name", Line(), "default hf_access_token", "heads.token_secret"),
        no_effect(section + "build", _ANY, "the draft engine is built with the defaults for the device"),
        no_effect(section + "runtime", _ANY, "the draft engine runs in the executor, with its settings"),
    )


_BUILD_ROWS = (
    accepted(_BUILD + "base_model_architecture", FAMILIES, "in any case; the config of the checkpoint decides", "build.architecture"),
    accepted(_BUILD + "base_model", FAMILIES, "encoders and whisper are rejected", "build.architecture"),
    accepted(_BUILD + "max_input_len", _COUNT, target="limits.max_input_len"),
    accepted(_BUILD + "max_output_len", _COUNT, target="limits.max_output_len"),
    accepted(_BUILD + "max_seq_len", Whole(2, 1 << 20), "prompt and output together", "limits.max_total_len"),
    accepted(_BUILD + "max_batch_size", Whole(1, 65536), "default 256", "limits.max_batch_size"),
    accepted(_BUILD + "max_num_tokens", Whole(1, 1 << 20), "default 8192", "limits.max_num_tokens"),
    accepted(_BUILD + "max_beam_width", Whole(1, 10), "default 1", "limits.max_beam_width"),
    rejected(_BUILD + "max_prompt_embedding_table_size", "prompt embeddings are not supported", 0, type=_UNSIGNED),
    accepted(_BUILD + "huggingface_ckpt_repository", Location(), "hub id or local path", "build.checkpoint"),
    accepted(_BUILD + "checkpoint_repository.source", SOURCES, "HF, LOCAL, S3, REMOTE_URL (with #sha256=…)", "repository.source"),
    accepted(_BUILD + "checkpoint_repository.repo", Location(), target="build.checkpoint"),
    accepted(_BUILD + "checkpoint_repository.revision", Line(), target="build.revision"),
    accepted(_BUILD + "checkpoint_repository.runtime_secret_name", Line(), "default hf_access_token", "build.token_secret"),
    rejected(_BUILD + "gather_all_token_logits", "no protocol returns logits", False, type=_FLAG, alternative="Request logprobs."),
    no_effect(_BUILD + "strongly_typed", _FLAG, _ALWAYS),
    accepted(_BUILD + "quantization_type", quantization.TRUSS, "both spellings, in any case", "quantization_type"),
    accepted(_BUILD + "quantization_config.calib_size", Whole(1, 1 << 20), target="quantization.calibration_size"),
    accepted(_BUILD + "quantization_config.calib_dataset", Location(), "a file, folder or hub dataset", "quantization.calibration_data"),
    accepted(_BUILD + "quantization_config.calib_max_seq_length", _COUNT, target="quantization.calibration_seq_len"),
    accepted(_BUILD + "tensor_parallel_count", Whole(1, 1024), target="mapping.tensor_parallel"),
    accepted(_BUILD + "pipeline_parallel_count", Whole(1, 1024), target="mapping.pipeline_parallel"),
    rejected(_BUILD + "sequence_parallel_count", "a sequence is not split over devices", 1, type=_COUNT),
    rejected(_BUILD + "moe_expert_parallel_option", "experts are distributed like other weights", -1, 0, 1, type=Whole(-1, 1024)),
    no_effect(_BUILD + "num_builder_gpus", _COUNT, "the build runs on the machine of the server"),
    no_effect(_BUILD + "skip_build_result", _FLAG, "built engines are cached by content"),
    *_speculator_rows(),
    rejected(_BUILD + "lora_adapters", _NO_LORA, *_NONE, type=_ANY, alternative="Merge the adapters into the checkpoint."),
    no_effect(_BUILD + "lora_configuration", _ANY, _NO_LORA),
    accepted(_BUILD + "enable_chunked_context", _FLAG, "default true", "runtime.chunked_prefill"),
    accepted(_BUILD + "kv_cache_free_gpu_mem_fraction", Real(0.0, 1.0, above=True), target="runtime.kv_cache_fraction"),
    no_effect(_BUILD + "use_fused_mlp", _FLAG, _ALWAYS),
)

_PLUGINS: dict[str, tuple[ValueType, str]] = {
    "multi_block_mode": (_FLAG, _AUTOMATIC),
    "paged_kv_cache": (_FLAG, "the KV cache is always paged"),
    "use_fused_mlp": (_FLAG, _ALWAYS),
    "gemm_plugin": (_TEXT, _AUTOMATIC),
    "use_paged_context_fmha": (_FLAG, _ALWAYS),
    "use_fp8_context_fmha": (_FLAG, "prefill attention computes in the engine's dtype"),
}
_PLUGIN_ROWS = tuple(  # in trt_llm.build, and as some templates have them, beside it
    no_effect(f"{section}plugin_configuration.{name}", kind, reason)
    for section in (_BUILD, "trt_llm.")
    for name, (kind, reason) in _PLUGINS.items()
)

_SERVE = "trt_llm.serve."
_SERVE_ROWS = (
    accepted(_SERVE + "engine_repository", Location(), "a built engine: local path, hub id or address", "engine.location"),
    accepted(_SERVE + "tokenizer_repository", Location(), "if the engine has none", "engine.tokenizer"),
    accepted(_SERVE + "tensor_parallel_count", Whole(1, 1024), "must equal that of the engine", "mapping.tensor_parallel"),
    accepted(_SERVE + "pipeline_parallel_count", Whole(1, 1024), "must equal that of the engine", "mapping.pipeline_parallel"),
)

_METADATA = "model_metadata."
_METADATA_ROWS = (
    accepted(_METADATA + "engine_repository", Location(), "the oldest generation", "engine.location"),
    accepted(_METADATA + "tokenizer_repository", Location(), "the oldest generation", "engine.tokenizer"),
    accepted(_METADATA + "tensor_parallelism", Whole(1, 1024), "the oldest generation", "mapping.tensor_parallel"),
    rejected(
        _METADATA + "engine_build",
        "it runs a build script of TensorRT-LLM",
        *_NONE,
        type=_ANY,
        alternative="Use trt_llm.build with the checkpoint.",
    ),
    rejected(
        _METADATA + "pipeline_parallelism",
        "the oldest generation has no pipeline parallelism",
        1,
        type=Whole(1, 1024),
        alternative="Use trt_llm.serve.",
    ),
    accepted(_METADATA + "tags", _ANY, "openai-compatible, force-legacy-api-non-openai-compatible", "tags"),
    accepted(
        _METADATA + "max_tokens_counts_prompt",
        _FLAG,
        "max_tokens limits prompt and output together; default true if model_metadata names the engine",
        "options.max_tokens_counts_prompt",
    ),
)

_RUN = "trt_llm.runtime."
_RUN_ROWS = (
    accepted(_RUN + "kv_cache_free_gpu_mem_fraction", Real(0.0, 1.0, above=True), "default 0.9", "runtime.kv_cache_fraction"),
    rejected(_RUN + "kv_cache_host_memory_bytes", "KV blocks are not moved to host memory", 0, type=_UNSIGNED),
    accepted(_RUN + "enable_chunked_context", _FLAG, "default true", "runtime.chunked_prefill"),
    accepted(_RUN + "batch_scheduler_policy", POLICIES, "default guaranteed_no_evict", "runtime.policy"),
    accepted(_RUN + "request_default_max_tokens", _COUNT, target="server.default_max_tokens"),
    accepted(_RUN + "served_model_name", Line(), target="server.model_name"),
    no_effect(_RUN + "total_token_limit", _UNSIGNED, "the queue is bounded by requests and the KV cache by tokens"),
    accepted(_RUN + "webserver_default_route", ROUTES, target="options.default_route"),
    no_effect(_RUN + "lora_cache_max_adapter_size", _UNSIGNED, _NO_LORA),
    no_effect(_RUN + "lora_cache_optimal_adapter_size", _UNSIGNED, _NO_LORA),
    no_effect(_RUN + "lora_cache_gpu_memory_fraction", Real(0.0, 1.0), _NO_LORA),
    no_effect(_RUN + "lora_cache_host_memory_bytes", _UNSIGNED, _NO_LORA),
)
_RUN_V2_ROWS = (
    accepted(_RUN + "max_seq_len", Whole(2, 1 << 20), "prompt and output together", "limits.max_total_len"),
    accepted(_RUN + "max_batch_size", Whole(1, 65536), "default 256", "limits.max_batch_size"),
    accepted(_RUN + "max_num_tokens", Whole(1, 1 << 20), "default 8192", "limits.max_num_tokens"),
    accepted(_RUN + "tensor_parallel_size", Whole(1, 1024), target="mapping.tensor_parallel"),
    accepted(_RUN + "enable_chunked_prefill", _FLAG, "default true", "runtime.chunked_prefill"),
    rejected(_RUN + "gated_features", "it patches arguments of another engine", *_NONE, type=_ANY),
    rejected(_RUN + "patch_kwargs", "it patches arguments of another engine", *_NONE, type=_ANY),
)

_TRT_LLM_ROWS = (
    accepted("trt_llm.inference_stack", names("v1", "v2"), "default v1", "stack"),
    *(
        no_effect(f"trt_llm.version_overrides.{part}_version", _TEXT, "it selects the release of another server")
        for part in ("engine_builder", "briton", "bei", "bei_bert", "v2_llm")
    ),
)

_TOP_ROWS = (
    accepted("model_name", Line(), "name of the model for OpenAI clients, unless served_model_name is set", "name"),
    accepted("secrets", _ANY, "names only; values come from /secrets/NAME or TRUSS_SECRET_NAME", "secrets"),
    accepted("resources.accelerator", Line(), "NAME:COUNT; the count must be the number of ranks", "resources.accelerator"),
    accepted("resources.use_gpu", _FLAG, "false: the engine runs on the CPU", "resources.use_gpu"),
    rejected("resources.node_count", "a Truss runs on one host", 1, type=_COUNT, alternative="Start a server on each host."),
    no_effect("resources.cpu", _TEXT, _PLATFORM),
    no_effect("resources.memory", _TEXT, _PLATFORM),
    no_effect("resources.instance_type", _TEXT, _PLATFORM),
    no_effect("resources.fabric", _ANY, _PLATFORM),
    no_effect("runtime.predict_concurrency", Whole(1, 1 << 20), "requests are batched in flight without this limit"),
    no_effect("runtime.num_workers", _COUNT, "in-flight batching serves all requests with one copy of the model"),
    no_effect("runtime.streaming_read_timeout", _UNSIGNED, "it is a setting of the proxy in front of the model"),
    no_effect("runtime.enable_tracing_data", _FLAG, _PLATFORM),
    accepted("runtime.enable_debug_logs", _FLAG, "true: the log level is debug, unless --log-level or STOKER_LOG sets one", "debug_logs"),
    accepted("runtime.transport", _ANY, "http, and grpc without a custom model.py; websocket is rejected", "transport"),
    rejected("runtime.is_websocket_endpoint", "websockets are not supported", False, type=_FLAG),
    no_effect("runtime.health_checks", _ANY, _PLATFORM),
    no_effect("runtime.oidc", _ANY, _PLATFORM),
    no_effect("runtime.remote_ssh", _ANY, _PLATFORM),
    no_effect("runtime.egress_restrictions", _ANY, _PLATFORM),
    no_effect("runtime.truss_server_version_override", _TEXT, "Stoker is the server"),
    no_effect("build_commands", _ANY, _IMAGE),
    no_effect("base_image", _ANY, _IMAGE),
    no_effect("python_version", _TEXT, _IMAGE),
    no_effect("requirements", _ANY, _IMAGE),
    no_effect("requirements_file", _TEXT, _IMAGE),
    no_effect("system_packages", _ANY, _IMAGE),
    no_effect("environment", _ANY, "it is not a key of Truss, which ignores it, too; environment_variables is"),
    no_effect("environment_variables", _ANY, "Stoker reads its own environment; export the variables before starting it"),
    rejected("docker_server", "it starts a custom server", *_NONE, type=_ANY, alternative="Run this Truss with the truss package."),
    rejected("bis_llm", "it configures another engine", *_NONE, type=_ANY, alternative="Use trt_llm."),
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
    no_effect("description", _ANY, _INFORMATION),
    no_effect("examples_filename", _TEXT, _INFORMATION),
    no_effect("use_local_src", _FLAG, _IMAGE),
    no_effect("live_reload", _FLAG, "a changed configuration is read at the next start"),
    no_effect("apply_library_patches", _FLAG, _IMAGE),
    no_effect("spec_version", _TEXT, "all generations are read"),
)

TABLE: FieldTable[FieldRow] = FieldTable(
    (*_BUILD_ROWS, *_PLUGIN_ROWS, *_SERVE_ROWS, *_METADATA_ROWS, *IMAGE_ROWS, *_RUN_ROWS, *_RUN_V2_ROWS, *_TRT_LLM_ROWS, *_TOP_ROWS),
    noun="key",
)

# Keys that name a finished engine in a configuration without trt_llm.
FINISHED_ENGINES = (_METADATA + "engine_repository", ARGUMENTS + "engine_repository")
# In a configuration with neither of them, the checkpoint to build, and a build script, which is rejected.
CHECKPOINT_TO_BUILD, ENGINE_SCRIPT = ARGUMENTS + "tokenizer_repository", _METADATA + "engine_build"
# Keys of trt_llm.runtime that only one inference stack has.
V2_ONLY = frozenset(row.name for row in _RUN_V2_ROWS)
V1_ONLY = frozenset(row.name for row in _RUN_ROWS) - {_RUN + "served_model_name"}
# Defaults that truss writes to trt_llm.build of stack v2; with these values the keys have no effect.
V2_BUILD_DEFAULTS: dict[str, Any] = {
    "max_batch_size": 256,
    "max_num_tokens": 8192,
    "max_beam_width": 1,
    "max_prompt_embedding_table_size": 0,
    "gather_all_token_logits": False,
    "strongly_typed": False,
    "tensor_parallel_count": 1,
    "pipeline_parallel_count": 1,
    "sequence_parallel_count": 1,
    "moe_expert_parallel_option": -1,
    "plugin_configuration": {"paged_kv_cache": True, "use_paged_context_fmha": True, "use_fp8_context_fmha": False},
}
# Keys of trt_llm.build that stack v2 has.
V2_BUILD = ("checkpoint_repository", "quantization_type", "quantization_config", "num_builder_gpus", "skip_build_result", "base_model")
# Keys that trt_llm.build of the first generation requires.
FIRST_GENERATION_REQUIRED = tuple(
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
