"""Keys of `build` in a Truss config.yaml: the image, and the engine of the generation before trt_llm (model_server TRT_LLM)."""

from __future__ import annotations

from stoker.base.fields.table import accepted, no_effect, rejected
from stoker.base.fields.values import Anything, Choice, Flag, Line, Real, Whole, names
from stoker.deploy.locations import Location

ARGUMENTS = "build.arguments."

_FLAG, _TEXT, _ANY = Flag(), Line(allow_empty=True), Anything(hidden=True)
_COUNT, _RANKS = Whole(1, 1 << 24), Whole(1, 1024)
_IMAGE = "it is a setting of the image build; Stoker runs from its own installation"
_ALWAYS, _AUTOMATIC = "Stoker always does this", "Stoker chooses this by shapes and device"
_FILES = "it is a directory of the build scripts of TensorRT-LLM"
_ENGINE = ARGUMENTS + "arguments."
_QUANT = Choice(
    {
        "no_quant": (None, None),
        "weights_only": ("WEIGHTS_ONLY_INT8", None),
        "weights_kv_int8": ("WEIGHTS_ONLY_INT8", "int8"),
        "smooth_quant": ("SMOOTH_QUANT", None),
    }
)
_DTYPES = names("float32", "float16", "bfloat16")

IMAGE_ROWS = (
    accepted(ARGUMENTS + "engine_repository", Location(), "a built engine", "engine.location"),
    accepted(ARGUMENTS + "tokenizer_repository", Location(), "and without engine_repository, the checkpoint", "engine.tokenizer"),
    accepted(ARGUMENTS + "tensor_parallel_count", _RANKS, "default 1", "mapping.tensor_parallel"),
    accepted(ARGUMENTS + "pipeline_parallel_count", _RANKS, "default 1", "mapping.pipeline_parallel"),
    accepted(ARGUMENTS + "quant", _QUANT, "default no_quant", "quantization_type"),
    accepted(ARGUMENTS + "engine_type", names("llama", "mistral"), "the config of the checkpoint decides", "build.architecture"),
    accepted(ARGUMENTS + "calibration.sq_alpha", Real(0.0, 1.0), "with quant smooth_quant", "quantization.alpha"),
    no_effect(ARGUMENTS + "calibration.kv_cache", _FLAG, "quant selects the dtype of the KV cache"),
    accepted(_ENGINE + "max_input_len", _COUNT, target="limits.max_input_len"),
    accepted(_ENGINE + "max_output_len", _COUNT, target="limits.max_output_len"),
    accepted(_ENGINE + "max_batch_size", Whole(1, 65536), target="limits.max_batch_size"),
    accepted(_ENGINE + "dtype", _DTYPES, "default: that of the checkpoint", "build.dtype"),
    accepted(_ENGINE + "per_token", _FLAG, "with quant smooth_quant", "quantization.per_token"),
    accepted(_ENGINE + "per_channel", _FLAG, "with quant smooth_quant", "quantization.per_channel"),
    rejected(_ENGINE + "gather_all_token_logits", "no protocol returns logits", False, type=_FLAG, alternative="Request logprobs."),
    *(
        rejected(_ENGINE + name, f"{ARGUMENTS}quant selects the quantization", False, type=_FLAG, alternative=f"Set {ARGUMENTS}quant.")
        for name in ("use_weight_only", "int8_kv_cache", "use_smooth_quant")
    ),
    *(
        no_effect(_ENGINE + name, _RANKS, f"{ARGUMENTS}tensor_parallel_count and pipeline_parallel_count set it")
        for name in ("tp_size", "pp_size", "world_size")
    ),
    *(no_effect(_ENGINE + name, _TEXT, _FILES) for name in ("output_dir", "model_dir", "ft_model_dir")),
    *(no_effect(_ENGINE + name, _TEXT, _AUTOMATIC) for name in ("use_gpt_attention_plugin", "use_gemm_plugin")),
    *(no_effect(_ENGINE + name, _FLAG, _ALWAYS) for name in ("remove_input_padding", "paged_kv_cache", "use_inflight_batching")),
    *(no_effect(_ENGINE + name, _FLAG, _AUTOMATIC) for name in ("multi_block_mode", "enable_context_fmha", "parallel_build")),
    no_effect("build.model_server", names("TrussServer", "TRT_LLM"), "Stoker is the server"),
    no_effect("build.secret_to_path_mapping", _ANY, _IMAGE),
    no_effect("build.no_cache", _FLAG, _IMAGE),
)
