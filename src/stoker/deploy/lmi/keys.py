"""The field table of serving.properties: keys of the model, its build and its run.

Sources: the TensorRT-LLM and common tables of the LMI documentation at 0.26 to 0.36, and the configurations of DJL's integration tests.
Names are those of serving.properties.
"""

from __future__ import annotations

from typing import Any

from stoker.base.config import DTYPES, MAX_DRAFT_TOKENS
from stoker.base.fields.errors import InvalidValueError
from stoker.base.fields.table import FieldRow, FieldTable, accepted, no_effect, rejected
from stoker.base.fields.values import Anything, Choice, Flag, Line, Real, Whole, names
from stoker.deploy import quantization
from stoker.deploy.lmi.response_keys import RESPONSE_ROWS
from stoker.deploy.lmi.server_keys import ONE_COPY, SERVER_ROWS
from stoker.deploy.locations import Location

_FLAG, _TEXT, _ANY = Flag(), Line(allow_empty=True), Anything(hidden=True)
_COUNT = Whole(1, 1 << 24)
_UNSIGNED = Whole(0)


class DraftModel(Location, frozen=True):
    """`ngram`, or the location of a draft model or of draft heads. A relative path is one of the model folder, and begins with ./"""

    def check(self, value: Any) -> str:
        if str(value).strip().lower() in ("ngram", "[ngram]"):
            return "ngram"
        if "/" not in str(value):
            cure = "Use ngram, or the directory (./NAME in the model folder), hub id or address of a draft model."
            raise InvalidValueError(value, "it is neither ngram nor a location", cure=cure)
        return super().check(value)


_DTYPES = Choice({"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "auto": None} | {name: name for name in DTYPES})
ROLLING_BATCHES = ("auto", "trtllm", "tensorrtllm", "vllm", "lmi-dist", "deepspeed", "tnx", "scheduler", "disable")
POLICIES = Choice({"max_utilization": "max_utilization", "guaranteed_no_evict": "guaranteed_no_evict", "static_batch": "static"})
BAICHUAN = names("v1_7b", "v1_13b", "v2_7b", "v2_13b")
CHATGLM = names(
    *("chatglm_6b", "chatglm2_6b", "chatglm2_6b_32k", "chatglm3_6b", "chatglm3_6b_base", "chatglm3_6b_32k", "glm_10b"),
    *("glm", "chatglm", "chatglm2", "chatglm3", "glm4", "chatglm-6b", "chatglm2-6b", "chatglm3-6b"),
)
HANDLERS = (
    *("tensorrt_llm", "huggingface", "transformers_neuronx", "transformersneuronx", "deepspeed"),
    *("lmi_trtllm.trtllm_service", "lmi_trtllm.trtllm_async_service", "lmi_vllm.vllm_service", "lmi_vllm.vllm_async_service"),
)
GPT = names("gpt2", "santacoder", "starcoder", "starcoder2")

_ALWAYS = "Stoker always does this"
_AUTOMATIC = "Stoker chooses this by shapes and device"
_NO_LORA = "LoRA adapters are not served"
_TRT = "it is a setting of the TensorRT build, which does not take place"

_MODEL = (
    accepted(
        "option.model_id",
        Location(),
        "hub id, path or s3:// (checkpoint or prebuilt engine); default: the model folder",
        "build.checkpoint",
    ),
    accepted("option.s3url", Location(), "the older name of option.model_id", "build.checkpoint"),
    accepted("option.model_dir", Location(), "a directory with the model, if option.model_id is not set", "model_dir"),
    accepted("option.revision", Line(), target="build.revision"),
    accepted("option.trust_remote_code", _FLAG, target="build.trust_remote_code"),
    accepted("option.dtype", _DTYPES, "default: that of the checkpoint", "build.dtype"),
    accepted("option.tokenizer", Location(), target="build.tokenizer"),
    rejected(
        "option.tokenizer_revision",
        "the tokenizer is fetched with the revision of the model",
        "",
        type=_TEXT,
        alternative="Set option.revision, or option.tokenizer to a local directory.",
    ),
    no_effect("option.tokenizer_mode", names("auto", "slow"), "the build converts all tokenizers to the same fast format"),
    rejected("option.skip_tokenizer_init", "requests contain text", False, type=_FLAG),
    rejected("option.task", "only text generation is served", "text-generation", "auto", "", type=_TEXT),
    no_effect(
        "option.entryPoint",
        names(*(f"djl_python.{name}" for name in HANDLERS)),
        "Stoker is the handler; custom handlers are not run",
    ),
    no_effect("option.handler", names("handle"), "Stoker is the handler"),
    no_effect("option.low_cpu_mem_usage", _FLAG, _ALWAYS),
    no_effect("option.device_map", names("auto"), _AUTOMATIC),
    rejected(
        "option.env",
        "it sets variables of a Python process, which Stoker does not start",
        "",
        type=_ANY,
        alternative="Export them before starting Stoker.",
    ),
)

_PARALLEL = (
    accepted(
        "option.tensor_parallel_degree",
        Whole(1, 1024, {"max": 0}),
        "max: all visible GPUs; default max",
        "mapping.tensor_parallel",
    ),
    accepted("option.pipeline_parallel_degree", Whole(1, 1024), target="mapping.pipeline_parallel"),
    accepted("option.pipeline_parallel_size", Whole(1, 1024), target="mapping.pipeline_parallel"),
    no_effect("option.mpi_mode", _FLAG, "ranks are started without MPI"),
    no_effect("option.parallel_loading", _FLAG, _ALWAYS),
    accepted("option.use_custom_all_reduce", _FLAG, "default true; GPUs only", "runtime.custom_all_reduce"),
    no_effect("option.embedding_parallel_mode", _TEXT, _AUTOMATIC),
    rejected("option.cluster_size", "the clustering of LMI is not supported", 1, type=_COUNT, alternative="Use the devices of one host."),
    rejected("option.context_parallel_size", "a sequence is not split over devices", 1, type=_COUNT),
    rejected("option.moe_tensor_parallel_size", "experts are distributed like other weights", -1, 1, type=Whole(-1, 1024)),
    rejected("option.moe_expert_parallel_size", "experts are distributed like other weights", -1, 1, type=Whole(-1, 1024)),
    accepted(
        "option.enable_attention_dp",
        _FLAG,
        "default false; mixtures of experts only. Each of the tensor_parallel_degree ranks has its own sequences and whole experts",
        "attention_dp",
    ),
    accepted("option.data_parallel_size", Whole(1, 1024), "requires option.enable_expert_parallel", "mapping.data_parallel"),
    accepted("option.enable_expert_parallel", _FLAG, "default false", "mapping.expert_parallel"),
    rejected(
        "option.auto_parallel",
        "the parallel mapping is configured, not searched",
        False,
        type=_FLAG,
        alternative="Set option.tensor_parallel_degree.",
    ),
    no_effect("option.auto_parallel_world_size", _COUNT, "it is a setting of option.auto_parallel, which is rejected"),
)

_BATCH = (
    accepted(
        "option.rolling_batch",
        Choice({n: n != "disable" for n in ROLLING_BATCHES}),
        "disable: the response format of dynamic batching, unless option.async_mode is set; the engine still batches in flight",
        "options.rolling_batch",
    ),
    accepted("option.max_rolling_batch_size", Whole(1, 65536), "default 32", "limits.max_batch_size"),
    accepted("option.max_batch_size", Whole(1, 65536), target="limits.max_batch_size"),
    accepted("option.max_num_sequences", Whole(1, 65536), "default option.max_rolling_batch_size", "runtime.max_num_sequences"),
    accepted("option.max_input_len", _COUNT, "default 1024; LLaMA 512", "limits.max_input_len"),
    accepted("option.max_output_len", _COUNT, "default 512; Falcon 1024", "limits.max_output_len"),
    accepted("option.max_seq_len", _COUNT, "prompt and output together", "limits.max_total_len"),
    accepted("option.max_num_tokens", Whole(1, 1 << 20), "default 8192", "limits.max_num_tokens"),
    accepted("option.max_beam_width", Whole(1, 10), target="limits.max_beam_width"),
    accepted("option.tokens_per_block", Whole(1, 1024), "16, 32, 64 or 128; default 64", "limits.tokens_per_block"),
    accepted("option.batch_scheduler_policy", POLICIES, "default max_utilization", "runtime.policy"),
    accepted("option.batching_type", Choice({"inflight": None, "static": "static"}), target="runtime.policy"),
    accepted("option.enable_trt_overlap", _FLAG, "default true; it does not change outputs", "runtime.overlap"),
    accepted("option.enable_overlap_scheduler", _FLAG, target="runtime.overlap"),
    accepted("option.enable_chunked_prefill", _FLAG, "default true", "runtime.chunked_prefill"),
    accepted("option.enable_chunked_context", _FLAG, "the same, in the words of TensorRT-LLM", "runtime.chunked_prefill"),
    accepted("option.use_cuda_graph", _FLAG, "default true", "runtime.cuda_graphs"),
    no_effect("option.use_passive_workers", _FLAG, ONE_COPY),
    no_effect("option.waiting_steps", _UNSIGNED, "new requests are admitted at the next step"),
)

_CACHE = (
    accepted(
        "option.kv_cache_free_gpu_mem_fraction",
        Real(0.0, 1.0, above=True),
        "default 0.95 with a GPU",
        "runtime.kv_cache_fraction",
    ),
    accepted("option.free_gpu_memory_fraction", Real(0.0, 1.0, above=True), target="runtime.kv_cache_fraction"),
    accepted("option.enable_kv_cache_reuse", _FLAG, "default true; it does not change outputs", "runtime.prefix_reuse"),
    accepted("option.enable_block_reuse", _FLAG, target="runtime.prefix_reuse"),
    accepted("option.max_tokens", _COUNT, target="runtime.kv_cache_tokens"),
    accepted("option.max_attention_window", _COUNT, target="runtime.attention_window"),
    accepted("option.kv_cache_dtype", quantization.KV_CACHE, target="build.kv_cache_dtype"),
    rejected("option.sink_token_length", "attention windows have no sink tokens", 0, type=_UNSIGNED),
    rejected("option.host_cache_size", "KV blocks are not moved to host memory", 0, type=_UNSIGNED),
    no_effect("option.onboard_blocks", _FLAG, "KV blocks are not moved to host memory"),
    no_effect("option.secondary_offload_min_priority", _UNSIGNED, "KV blocks are not moved to host memory"),
    rejected("option.cross_kv_cache_fraction", "encoder-decoder models are not served", 0.0, type=Real(0.0, 1.0)),
    no_effect("option.event_buffer_max_size", _UNSIGNED, "KV cache events are not published"),
)

_ARCHITECTURE = (
    accepted(
        "option.baichuan_model_version",
        BAICHUAN,
        "checked against the checkpoint, which decides; may be left out",
        "extra.baichuan_model_version",
    ),
    accepted(
        "option.chatglm_model_version",
        CHATGLM,
        "checked against the checkpoint, which decides; may be left out",
        "extra.chatglm_model_version",
    ),
    accepted("option.gpt_model_version", GPT, "checked against the checkpoint, which decides; may be left out", "extra.gpt_model_version"),
    accepted("option.rotary_base", Real(0.0, 1e12, above=True), "default: that of the checkpoint", "extra.rotary_base"),
    accepted("option.rotary_dim", Whole(1, 65536), "default: that of the checkpoint", "extra.rotary_dim"),
    accepted("option.rotary_scaling_type", names("linear", "dynamic"), "with option.rotary_scaling_factor", "extra.rotary_scaling_type"),
    accepted(
        "option.rotary_scaling_factor",
        Real(1.0, 1e6, above=True),
        "with option.rotary_scaling_type; above 1",
        "extra.rotary_scaling_factor",
    ),
    no_effect("option.multi_block_mode", _FLAG, _AUTOMATIC),
    no_effect("option.use_fused_mlp", _FLAG, _ALWAYS),
    no_effect("option.logits_dtype", names("float32", "float16", "bfloat16"), "logits are float32"),
    no_effect("option.attn_backend", _TEXT, _AUTOMATIC),
    no_effect("option.moe_backend", _TEXT, _AUTOMATIC),
    no_effect("option.backend", _TEXT, "Stoker is the backend"),
)

_QUANTIZATION = (
    accepted("option.quantize", quantization.LMI, target="build.quantization"),
    accepted("option.smoothquant_alpha", Real(0.0, 1.0), "default 0.8; with quantize=smoothquant", "SMOOTH_QUANT.alpha"),
    accepted("option.smoothquant_per_token", _FLAG, "default false; with quantize=smoothquant", "SMOOTH_QUANT.per_token"),
    accepted("option.smoothquant_per_channel", _FLAG, "default false; with quantize=smoothquant", "SMOOTH_QUANT.per_channel"),
    no_effect("option.multi_query_mode", _FLAG, "the number of key and value heads is read from the checkpoint"),
    no_effect("option.awq_format", names("int4_awq"), "int4_awq is the only format"),
    accepted("option.awq_calib_size", Whole(1, 1 << 20), "default 32; with quantize=awq", "AWQ.calibration_size"),
    accepted("option.awq_block_size", Whole(32, 128), "32, 64 or 128; default 128; with quantize=awq", "AWQ.group_size"),
    accepted("option.calib_size", Whole(1, 1 << 20), "default 512; with any option.quantize", "any.calibration_size"),
    no_effect("option.calib_batch_size", _COUNT, "calibration texts are batched to fit memory"),
    no_effect("option.q_format", names("fp8", "int4_awq", "int8_sq", "full_prec"), "option.quantize selects the format"),
    no_effect("option.use_fp8_context_fmha", _FLAG, "prefill attention computes in the engine's dtype"),
)

_BUILD = (
    no_effect("option.num_checkpoint_workers", _UNSIGNED, _TRT),
    no_effect("option.num_engine_workers", _UNSIGNED, _TRT),
    no_effect("option.load_by_shard", _FLAG, _ALWAYS),
    no_effect("option.fast_build", _FLAG, _TRT),
    no_effect("option.enable_build_cache", _FLAG, "built engines are always cached by content"),
    no_effect("option.load_format", names("auto", "safetensors", "pt", "bin"), "it is detected from the files of the checkpoint"),
    no_effect("option.partition_handler", _TEXT, _TRT),
    no_effect("option.save_mp_checkpoint_path", _TEXT, _TRT),
    no_effect("option.extended_runtime_perf_knob_config", _TEXT, _TRT),
    rejected(
        "option.trtllm_checkpoint_path",
        "converted checkpoints of TensorRT-LLM are not supported",
        "",
        type=_TEXT,
        alternative="Name the Hugging Face checkpoint in option.model_id.",
    ),
    rejected("option.enable_lora", _NO_LORA, False, type=_FLAG),
    no_effect("option.max_loras", _UNSIGNED, _NO_LORA),
    no_effect("option.max_lora_rank", _UNSIGNED, _NO_LORA),
    no_effect("option.max_cpu_loras", _UNSIGNED, _NO_LORA),
    rejected("option.adapters", _NO_LORA, "", type=_TEXT, alternative="Merge the adapters into the checkpoint."),
    accepted("option.draft_model_id", DraftModel(), "the same as option.speculative_draft_model", "runtime.speculate"),
    accepted(
        "option.speculative_draft_model",
        DraftModel(),
        "ngram is prompt lookup; or a directory, hub id or address of a draft model or of draft heads",
        "runtime.speculate",
    ),
    accepted("option.max_draft_len", Whole(1, MAX_DRAFT_TOKENS), "draft tokens per step", "runtime.draft_tokens"),
    accepted("option.spec_length", Whole(1, MAX_DRAFT_TOKENS), "the same as option.max_draft_len", "runtime.draft_tokens"),
)

TABLE: FieldTable[FieldRow] = FieldTable(
    (*SERVER_ROWS, *_MODEL, *_PARALLEL, *_BATCH, *_CACHE, *_ARCHITECTURE, *_QUANTIZATION, *RESPONSE_ROWS, *_BUILD), noun="key"
)


def canonical_key(name: str) -> str:
    """The key of a row for a name with or without the prefix `option.`.

    LMI passes both spellings to its Python process, which does not distinguish them: its tests write model_loading_timeout, and its
    documentation option.max_batch_delay. A name that no row has is returned unchanged.
    """
    if name.lower().removeprefix("option.") == "entrypoint":
        return "option.entryPoint"
    other = name.removeprefix("option.") if name.startswith("option.") else f"option.{name}"
    return other if name not in TABLE and other in TABLE else name
