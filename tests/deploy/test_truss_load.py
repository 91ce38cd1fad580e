"""Reading a config.yaml of each Truss generation into a Deployment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from stoker.base import yaml_tree
from stoker.base.config import Mapping
from stoker.base.errors import ConfigError
from stoker.deploy.deployment import BuildOptions, Deployment, EngineSource
from stoker.deploy.truss.keys import TABLE, V2_ONLY
from stoker.deploy.truss.load import is_truss, load_truss
from stoker.server.protocols.truss.options import TrussOptions

FIRST_BUILD = """\
trt_llm:
  build:
    base_model_architecture: LLAMA  # Model architecture, e.g. LLAMA, MISTRAL, DEEPSEEK
    max_input_len: 2048  # Maximum input sequence length
    max_output_len: 256  # Maximum output sequence length
    max_batch_size: 8  # Maximum batch size for inference
    max_beam_width: 4  # Maximum beam width for beam search
    huggingface_ckpt_repository: "decaplusplus/llama-7b-hf" # Path to HuggingFace model checkpoint
    quantization_type: WEIGHTS_KV_INT8 # Quantization type for the engine
    tensor_parallel_count: 1 # Tensor parallelism count
    pipeline_parallel_count: 1 # Pipeline parallelism count
    plugin_configuration:
      multi_block_mode: False  # Enable multi-block mode
      paged_kv_cache: True  # Enable paged KV cache
      use_fused_mlp: False  # Use fused MLP
"""
FIRST_SERVE = """\
trt_llm:
  serve:
    engine_repository: /path/to/engine  # Huggingface repository with TRT engine
    tokenizer_repository: /path/to/tokenizer  # Huggingface repository with TRT engine
    tensor_parallel_count: 1
    pipeline_parallel_count: 1
"""
FIRST_BOTH = FIRST_BUILD + "    \n" + FIRST_SERVE.partition("\n")[2]
OLDEST = """\
model_metadata:
  tensor_parallelism: 1
  engine_repository: org/engine
  tokenizer_repository: org/tok
  example_model_input: {prompt: hello}
secrets:
 hf_access_token: "my_hf_api_key"
"""
MINIMAL = "trt_llm:\n  build:\n    checkpoint_repository: {source: HF, repo: org/model}\n"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.deploy.truss.load.visible_gpus", lambda environment: 0)


def load(folder: Path, text: str, **environment: str) -> Deployment:
    (folder / "config.yaml").write_text(text)
    return load_truss(folder, environment)


def build(deployment: Deployment) -> BuildOptions:
    assert isinstance(deployment.source, BuildOptions)
    return deployment.source


def refuse(folder: Path, text: str, match: str, **environment: str) -> str:
    with pytest.raises(ConfigError, match=match) as caught:
        load(folder, text, **environment)
    return str(caught.value)


def nested(path: str, value: Any) -> dict:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def merged(base: dict, more: dict) -> dict:
    for key, value in more.items():
        base[key] = merged(base.get(key) or {}, value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
    return base


def test_build_of_the_first_generation(tmp_path: Path) -> None:
    deployment = load(tmp_path, FIRST_BUILD)
    source = build(deployment)
    assert (source.checkpoint, source.architecture) == ("decaplusplus/llama-7b-hf", "llama")
    assert (source.quantization, source.kv_cache_dtype) == ("WEIGHTS_ONLY_INT8", "int8")
    limits = source.limits
    assert (limits.max_input_len, limits.max_output_len, limits.max_batch_size, limits.max_beam_width) == (2048, 256, 8, 4)
    assert source.token_secret == "hf_access_token"
    assert (deployment.server.http_port, deployment.server.protocols) == (8080, ("truss", "openai", "anthropic"))
    beam = next(s for s in deployment.settings if s.name == "max_beam_width")
    assert (beam.key, beam.origin.line) == ("trt_llm.build.max_beam_width", 7)
    assert is_truss(tmp_path)


def test_serve_of_the_first_generation(tmp_path: Path) -> None:
    deployment = load(tmp_path, FIRST_SERVE)
    assert deployment.source == EngineSource(location="/path/to/engine", token_secret="hf_access_token", mapping=Mapping())
    assert deployment.tokenizer == "/path/to/tokenizer"


def test_build_and_serve_exclude_each_other(tmp_path: Path) -> None:
    message = refuse(tmp_path, FIRST_BOTH, r"trt_llm.build \(line 2\) and trt_llm.serve \(line 17\) exclude each other")
    assert "config.yaml:1:" in message
    refuse(tmp_path, "trt_llm: {inference_stack: v1}\n", "neither build nor serve")


def test_oldest_generation(tmp_path: Path) -> None:
    deployment = load(tmp_path, OLDEST)
    assert deployment.source == EngineSource(location="org/engine", token_secret="hf_access_token", mapping=Mapping())
    assert deployment.tokenizer == "org/tok"
    warning = next(n for n in deployment.notes if n.key == "secrets.hf_access_token")
    assert (warning.severity, warning.origin.line) == ("warning", 6)
    assert "my_hf_api_key" not in repr(deployment)
    refuse(tmp_path, OLDEST.replace("  tens", "  pipeline_parallelism: 2\n  tens"), "pipeline_parallelism=2 is refused")


PACKAGES = """\
name: "tensorrt_llm"
backend: "tensorrtllm"
parameters: {
  key: "max_tokens_in_paged_kv_cache"
  value: { string_value: "10000" }
}
parameters: { key: "kv_cache_free_gpu_mem_fraction" value: { string_value: "0.1" } }
parameters: { key: "max_num_sequences" value: { string_value: "64" } }
parameters: { key: "enable_trt_overlap" value: { string_value: "${overlap}" } }
parameters: { key: "gpt_model_type" value: { string_value: "inflight_fused_batching" } }
"""


def test_packages_of_the_oldest_generation(tmp_path: Path) -> None:
    folder = tmp_path / "packages" / "inflight_batcher_llm" / "tensorrt_llm"
    folder.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(PACKAGES)
    deployment = load(tmp_path, OLDEST)
    runtime = deployment.runtime
    assert (runtime.kv_cache_tokens, runtime.kv_cache_fraction, runtime.max_num_sequences, runtime.overlap) == (10_000, 0.1, 64, True)
    assert any(n.key == "gpt_model_type" for n in deployment.notes)
    assert deployment.server.num_frontends == 1
    for name, count in (("preprocessing", 2), ("postprocessing", 4)):
        (folder.parent / name).mkdir()
        (folder.parent / name / "config.pbtxt").write_text(f'name: "{name}"\ninstance_group [ {{ count: {count} kind: KIND_CPU }} ]\n')
    assert load(tmp_path, OLDEST).server.num_frontends == 4
    (folder / "config.pbtxt").write_text(PACKAGES.replace('"64"', '"many"'))
    refuse(tmp_path, OLDEST, "max_num_sequences")


SPRING_2024 = {
    "base_model": "mistral",
    "max_input_len": 1000,
    "max_output_len": 100,
    "max_batch_size": 16,
    "max_beam_width": 1,
    "checkpoint_repository": {"source": "HF", "repo": "org/m"},
    "quantization_type": "fp8_kv",
    "kv_cache_free_gpu_mem_fraction": 0.8,
    "plugin_configuration": {"paged_kv_cache": True, "gemm_plugin": "auto", "use_paged_context_fmha": True},
}


def test_spring_2024_generation(tmp_path: Path) -> None:
    deployment = load(tmp_path, yaml.safe_dump({"trt_llm": {"build": SPRING_2024}}))
    source = build(deployment)
    assert (source.architecture, source.quantization, source.kv_cache_dtype) == ("mistral", "FP8", "float8_e4m3fn")
    assert deployment.runtime.kv_cache_fraction == 0.8


def test_current_generation_stack_v1(tmp_path: Path) -> None:
    # section 9 of the recording of config shapes
    runtime = {
        "served_model_name": "q",
        "kv_cache_free_gpu_mem_fraction": 0.9,
        "enable_chunked_context": True,
        "batch_scheduler_policy": "max_utilization",
        "request_default_max_tokens": 512,
    }
    shape = {
        "base_model": "decoder",
        "checkpoint_repository": {"source": "HF", "repo": "Qwen/Qwen2.5-7B-Instruct"},
        "max_seq_len": 8192,
        "max_batch_size": 64,
        "max_num_tokens": 8192,
        "quantization_type": "fp8",
        "tensor_parallel_count": 1,
        "plugin_configuration": {"paged_kv_cache": True, "use_paged_context_fmha": True},
    }
    config = {
        "model_name": "m",
        "python_version": "py311",
        "resources": {"accelerator": "H100", "use_gpu": True},
        "trt_llm": {"inference_stack": "v1", "build": shape, "runtime": runtime},
        "model_metadata": {"tags": ["openai-compatible"]},
    }
    deployment = load(tmp_path, yaml.safe_dump(config))
    limits = build(deployment).limits
    assert (limits.max_seq_len, limits.max_input_len, limits.max_batch_size) == (8192, 8191, 64)
    assert (deployment.runtime.policy, deployment.server.model_name, deployment.server.default_max_tokens) == ("max_utilization", "q", 512)


def test_current_generation_stack_v2(tmp_path: Path) -> None:
    config = {
        "model_name": "m",
        "trt_llm": {
            "inference_stack": "v2",
            "build": {"checkpoint_repository": {"source": "HF", "repo": "Qwen/Qwen3-8B"}, "quantization_type": "fp8"},
            "runtime": {"max_seq_len": 32768, "max_batch_size": 128, "tensor_parallel_size": 1, "served_model_name": "q3"},
        },
    }
    deployment = load(tmp_path, yaml.safe_dump(config))
    assert (build(deployment).limits.max_seq_len, build(deployment).limits.max_batch_size) == (32768, 128)
    config["trt_llm"]["build"]["max_seq_len"] = 4096  # type: ignore[index]
    refuse(tmp_path, yaml.safe_dump(config), r"config.yaml:\d+: trt_llm.build.max_seq_len is refused: inference_stack v2 sets this under")


@pytest.mark.parametrize(
    "name, weights, cache",
    [
        ("NO_QUANT", None, None),
        ("WEIGHTS_ONLY_INT8", "WEIGHTS_ONLY_INT8", None),
        ("WEIGHTS_KV_INT8", "WEIGHTS_ONLY_INT8", "int8"),
        ("WEIGHTS_ONLY_INT4", "WEIGHTS_ONLY_INT4", None),
        ("WEIGHTS_KV_INT4", "WEIGHTS_ONLY_INT4", "int8"),
        ("SMOOTH_QUANT", "SMOOTH_QUANT", None),
        ("FP8", "FP8", None),
        ("FP8_KV", "FP8", "float8_e4m3fn"),
        ("no_quant", None, None),
        ("weights_int8", "WEIGHTS_ONLY_INT8", None),
        ("weights_kv_int8", "WEIGHTS_ONLY_INT8", "int8"),
        ("weights_int4", "WEIGHTS_ONLY_INT4", None),
        ("weights_kv_int4", "WEIGHTS_ONLY_INT4", "int8"),
        ("weights_int4_kv_int8", "WEIGHTS_ONLY_INT4", "int8"),
        ("smooth_quant", "SMOOTH_QUANT", None),
        ("fp8", "FP8", None),
        ("fp8_kv", "FP8", "float8_e4m3fn"),
    ],
)
def test_both_spellings_of_every_quantization(tmp_path: Path, name: str, weights: str | None, cache: str | None) -> None:
    source = build(load(tmp_path, MINIMAL + f"    quantization_type: {name}\n"))
    assert (source.quantization, source.kv_cache_dtype) == (weights, cache)


def test_tags_select_the_request_format(tmp_path: Path) -> None:
    """With openai-compatible, the current generation reads OpenAI requests, and the oldest generation uses the chat template."""
    tag = "model_metadata: {tags: [openai-compatible]}\n"
    assert load(tmp_path, MINIMAL).server.options == TrussOptions()
    assert load(tmp_path, MINIMAL + tag).server.options == TrussOptions(openai=True)
    assert load(tmp_path, MINIMAL + tag.replace("openai", "force-legacy-api-non-openai")).server.options == TrussOptions(legacy=True)
    assert load(tmp_path, OLDEST).server.options == TrussOptions(max_tokens_counts_prompt=True)
    tagged = OLDEST.replace("model_metadata:", "model_metadata:\n  tags: [openai-compatible]\n  max_tokens_counts_prompt: false")
    assert load(tmp_path, tagged).server.options == TrussOptions()


MODEL = {"trt_llm": {"build": {"checkpoint_repository": {"source": "HF", "repo": "org/model"}}}}
ENGINE = {"trt_llm": {"serve": {"engine_repository": "org/engine"}}}
B, R = "trt_llm.build.", "trt_llm.runtime."
ACCEPTED: dict[str, tuple[dict, Any, str, Any]] = {
    B + "base_model_architecture": (MODEL, "MISTRAL", "build.architecture", "mistral"),
    B + "base_model": (MODEL, "qwen", "build.architecture", "qwen"),
    B + "max_input_len": (MODEL, 100, "limits.max_input_len", 100),
    B + "max_output_len": (MODEL, 100, "limits.max_output_len", 100),
    B + "max_seq_len": (MODEL, 100, "limits.max_seq_len", 100),
    B + "max_batch_size": (MODEL, 7, "limits.max_batch_size", 7),
    B + "max_num_tokens": (MODEL, 4096, "limits.max_num_tokens", 4096),
    B + "max_beam_width": (MODEL, 3, "limits.max_beam_width", 3),
    B + "huggingface_ckpt_repository": (MODEL, "org/model", "build.checkpoint", "org/model"),
    B + "checkpoint_repository.source": (MODEL, "HF", "build.checkpoint", "org/model"),
    B + "checkpoint_repository.repo": (MODEL, "org/other", "build.checkpoint", "org/other"),
    B + "checkpoint_repository.revision": (MODEL, "v1", "build.revision", "v1"),
    B + "checkpoint_repository.runtime_secret_name": (MODEL, "my_token", "build.token_secret", "my_token"),
    B + "quantization_type": (MODEL, "fp8", "build.quantization", "FP8"),
    B + "tensor_parallel_count": (MODEL, 2, "mapping.tensor_parallel", 2),
    B + "pipeline_parallel_count": (MODEL, 2, "mapping.pipeline_parallel", 2),
    B + "kv_cache_free_gpu_mem_fraction": (MODEL, 0.5, "runtime.kv_cache_fraction", 0.5),
    "trt_llm.serve.engine_repository": (ENGINE, "org/other", "build.location", "org/other"),
    "trt_llm.serve.tokenizer_repository": (ENGINE, "org/tok", "deployment.tokenizer", "org/tok"),
    "trt_llm.serve.tensor_parallel_count": (ENGINE, 2, "mapping.tensor_parallel", 2),
    "trt_llm.serve.pipeline_parallel_count": (ENGINE, 2, "mapping.pipeline_parallel", 2),
    R + "kv_cache_free_gpu_mem_fraction": (MODEL, 0.5, "runtime.kv_cache_fraction", 0.5),
    B + "speculator.speculative_decoding_mode": (MODEL, "LOOKAHEAD_DECODING", "runtime.speculate", "ngram"),
    B + "speculator.num_draft_tokens": (MODEL, 3, "runtime.draft_tokens", 3),
    B + "enable_chunked_context": (MODEL, False, "runtime.chunked_prefill", False),
    R + "enable_chunked_context": (MODEL, False, "runtime.chunked_prefill", False),
    R + "batch_scheduler_policy": (MODEL, "max_utilization", "runtime.policy", "max_utilization"),
    R + "request_default_max_tokens": (MODEL, 9, "server.default_max_tokens", 9),
    R + "served_model_name": (MODEL, "served", "server.model_name", "served"),
    R + "webserver_default_route": (MODEL, "/v1/completions", "options.default_route", "/v1/completions"),
    R + "max_seq_len": (MODEL, 64, "limits.max_seq_len", 64),
    R + "max_batch_size": (MODEL, 6, "limits.max_batch_size", 6),
    R + "max_num_tokens": (MODEL, 640, "limits.max_num_tokens", 640),
    R + "tensor_parallel_size": (MODEL, 2, "mapping.tensor_parallel", 2),
    R + "enable_chunked_prefill": (MODEL, False, "runtime.chunked_prefill", False),
    "trt_llm.inference_stack": (MODEL, "v1", "build.checkpoint", "org/model"),
    "model_name": (MODEL, "mine", "server.model_name", "mine"),
    "model_metadata.tags": (MODEL, ["force-legacy-api-non-openai-compatible"], "options.legacy", True),
    "model_metadata.max_tokens_counts_prompt": (MODEL, True, "options.max_tokens_counts_prompt", True),
    "resources.use_gpu": (MODEL, False, "runtime.device", "cpu"),
    "runtime.enable_debug_logs": (MODEL, True, "deployment.log_level", "debug"),
}
TOGETHER = {
    *(B + f"speculator.checkpoint_repository.{name}" for name in ("source", "repo", "revision", "runtime_secret_name")),
    "build.arguments.engine_repository",
    "build.arguments.engine_type",
    "build.arguments.quant",
    "build.arguments.calibration.sq_alpha",
    "build.arguments.arguments.max_input_len",
    "build.arguments.arguments.max_output_len",
    "build.arguments.arguments.max_batch_size",
    "build.arguments.arguments.dtype",
    "build.arguments.arguments.per_token",
    "build.arguments.arguments.per_channel",
    "build.arguments.tokenizer_repository",
    "build.arguments.tensor_parallel_count",
    "build.arguments.pipeline_parallel_count",
    "model_metadata.engine_repository",
    "model_metadata.tokenizer_repository",
    "model_metadata.tensor_parallelism",
    "secrets",
    "resources.accelerator",
    "runtime.transport",
    B + "quantization_config.calib_size",
    B + "quantization_config.calib_dataset",
    B + "quantization_config.calib_max_seq_length",
}


def config_with(key: str, value: Any, base: dict = MODEL) -> str:
    config = merged(json.loads(json.dumps(base)), nested(key, value))
    if key in V2_ONLY:
        config["trt_llm"]["inference_stack"] = "v2"
    return yaml.safe_dump(config)


def test_every_accepted_row_is_tested() -> None:
    assert set(ACCEPTED) | TOGETHER == {row.name for row in TABLE if row.status == "accepted"}


@pytest.mark.parametrize("key", ACCEPTED)
def test_accepted(tmp_path: Path, key: str) -> None:
    base, value, path, expected = ACCEPTED[key]
    deployment = load(tmp_path, config_with(key, value, base))
    head, _, name = path.partition(".")
    source: Any = deployment.source
    owner = {
        "build": lambda: source,
        "limits": lambda: source.limits,
        "mapping": lambda: source.mapping,
        "runtime": lambda: deployment.runtime,
        "server": lambda: deployment.server,
        "options": lambda: deployment.server.options,
        "deployment": lambda: deployment,
    }[head]()
    assert getattr(owner, name) == expected


SAMPLES: tuple[Any, ...] = (True, 1, 0.5, "text", ["a"], "LOOKAHEAD_DECODING", "TRT_LLM")


def readable(key: str, value: Any) -> bool:
    try:
        TABLE[key].type.check(value)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("key", [row.name for row in TABLE if row.status == "no effect"])
def test_no_effect_has_a_reason(tmp_path: Path, key: str) -> None:
    value = next(sample for sample in SAMPLES if readable(key, sample))
    note = next(n for n in load(tmp_path, config_with(key, value)).notes if n.key == key)
    assert note.text == TABLE[key].reason and note.origin.line > 0


@pytest.mark.parametrize("key", [row.name for row in TABLE if row.status == "rejected" and not row.name.startswith("model_metadata")])
def test_rejected_by_name(tmp_path: Path, key: str) -> None:
    row = TABLE[key]
    rejected = next(s for s in (True, 7, {"a": 1}) if readable(key, s) and s not in row.harmless)
    message = refuse(tmp_path, config_with(key, rejected), r"config.yaml:\d+: ")
    assert key in message and row.reason in message
    for harmless in row.harmless:
        load(tmp_path, config_with(key, harmless))


def test_calibration(tmp_path: Path) -> None:
    text = MINIMAL + "    quantization_type: smooth_quant\n    quantization_config:\n"
    text += "      {calib_size: 8, calib_dataset: org/text, calib_max_seq_length: 64}\n"
    settings = build(load(tmp_path, text)).quantization_settings
    assert settings == {"calibration_size": 8, "calibration_data": "org/text", "calibration_seq_len": 64}
    assert build(load(tmp_path, text.replace("smooth_quant", "no_quant"))).quantization_settings == {}


@pytest.mark.parametrize(
    "text, match",
    [
        (MINIMAL + "    quantization_type: int3\n", "yaml:4: trt_llm.build.quantization_type=int3 is refused: it must be one of no_quant"),
        (MINIMAL + "    quantization_type: fp4\n", "=fp4 is refused: weights of FP4 are not supported. Use one of no_quant"),
        (MINIMAL + "    quantization_type: fp8_mlp_only\n", "FP8 is applied to all linears"),
        (MINIMAL + "    base_model: encoder\n", "base_model=encoder is refused: embedding, classification and reranking models are not"),
        (MINIMAL + "    base_model: encoder_bert\n", "base_model=encoder_bert is refused: embedding, classification"),
        (MINIMAL + "  runtime: {webserver_default_route: /v1/embeddings}\n", "default_route=/v1/embeddings is refused: embedding, "),
        (MINIMAL + "    lora_adapters: {a: {source: HF, repo: org/a}}\n", "lora_adapters=.* is refused: LoRA adapters are not served"),
        (MINIMAL + "  plugin_configuration: {paged_kv_cahe: true}\n", "Did you mean trt_llm.plugin_configuration.paged_kv_cache"),
        (MINIMAL + "    max_batch_size: '8'\n", "config.yaml:4: trt_llm.build.max_batch_size=8 is refused: it must be a whole number"),
        (MINIMAL + "    max_batch_size: true\n", "whole number"),
        (
            MINIMAL + "    max_batch_sise: 8\n",
            "yaml:4: unknown key trt_llm.build.max_batch_sise. Did you mean trt_llm.build.max_batch_size",
        ),
        (MINIMAL + "    base_model: whisper\n", "speech recognition is not served"),
        (MINIMAL + "    max_beam_width: 11\n", "from 1 to 10"),
        (MINIMAL + "    plugin_configuration: [1]\n", "must be a mapping"),
        (MINIMAL + "    <<: {a: 1}\n", "unknown key trt_llm.build.<<"),
        (MINIMAL + "  inference_stack: v3\n", "must be one of v1, v2"),
        (MINIMAL + "  runtime: {max_seq_len: 5}\n", "inference_stack v1 has no such key"),
        (MINIMAL + "  inference_stack: v2\n  runtime: {total_token_limit: 5}\n", "inference_stack v2 has no such key"),
        (MINIMAL + "resources: {accelerator: 'H100:2'}\n", "config.yaml:4: resources.accelerator=H100:2 is refused: .*make 1 ranks"),
        (MINIMAL + "    tensor_parallel_count: 2\nresources: {accelerator: H100}\n", "make 2 ranks"),
        (MINIMAL + "resources: {accelerator: 'H100:0'}\n", "NAME or NAME:COUNT"),
        (MINIMAL + "runtime: {transport: {kind: websocket}}\n", "transport.kind=websocket"),
        (MINIMAL + "model_metadata: {tags: text}\n", "list of texts"),
        (MINIMAL + "model_metadata: {tags: [openai-compatible, force-legacy-api-non-openai-compatible]}\n", "exclude each other"),
        (MINIMAL + "model_metadata: {engine_repository: org/e}\n", "names an engine already"),
        (MINIMAL.replace("HF", "GCS"), "Google Cloud Storage"),
        (MINIMAL.replace("HF", "S3"), "begins with s3://"),
        (MINIMAL.replace("org/model", "s3://b/p"), "does not accept an address"),
        (MINIMAL.replace("org/model", "https://u:hunter2@h/x.tar"), "contains a credential"),
        ("trt_llm: {build: {}}\n", "checkpoint_repository.repo is missing"),
        ("trt_llm: {serve: {tokenizer_repository: a/b}}\n", "engine_repository is missing"),
        ("model_name: m\n", "neither trt_llm nor model_metadata.engine_repository"),
        (
            FIRST_BUILD.replace("    max_input_len: 2048", "    # removed"),
            "trt_llm.build is refused: required keys are missing: max_input_len",
        ),
        ("trt_llm: [\n", "config.yaml line 2"),
        ("a: 1\na: 2\n", "config.yaml line 2: a is a duplicate; line 1"),
        ("trt_llm: !!python/object/apply:os.system [ls]\n", "line 1: the tag .* is refused"),
        ("- a\n", "not a mapping of keys"),
        ("", "neither trt_llm"),
        ("secrets: [a]\n" + MINIMAL, "mapping of names"),
    ],
)
def test_refusals(tmp_path: Path, text: str, match: str) -> None:
    assert "hunter2" not in refuse(tmp_path, text, match)


def test_plugin_configuration_beside_build(tmp_path: Path) -> None:
    """Two published templates have it there instead of in trt_llm.build."""
    plugins = "{paged_kv_cache: true, use_paged_context_fmha: true, use_fp8_context_fmha: false}"
    beside = load(tmp_path, MINIMAL + f"  plugin_configuration: {plugins}\n")
    inside = load(tmp_path, MINIMAL + f"    plugin_configuration: {plugins}\n")
    assert (beside.source, beside.runtime, beside.server) == (inside.source, inside.runtime, inside.server)
    assert [(n.key.rpartition(".")[2], n.text) for n in beside.notes] == [(n.key.rpartition(".")[2], n.text) for n in inside.notes]
    assert len(beside.notes) == 3


@pytest.mark.parametrize(
    "source, repo", [("S3", "s3://bucket/p"), ("REMOTE_URL", "https://host/m.tar.gz#sha256=aa"), ("LOCAL", "/models/m")]
)
def test_sources(tmp_path: Path, source: str, repo: str) -> None:
    text = MINIMAL.replace("HF", source).replace("org/model", f"'{repo}'")
    assert build(load(tmp_path, text)).checkpoint == repo


def test_ranks_beyond_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.deploy.truss.load.visible_gpus", lambda environment: 1)
    refuse(tmp_path, MINIMAL + "    tensor_parallel_count: 2\n", "config.yaml:4: .*2 ranks in total, and 1 GPU is visible")


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x, x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a]\nc: &c [*b, *b, *b, *b, *b, *b, *b, *b, *b]\n"
        "d: &d [*c, *c, *c, *c, *c, *c, *c, *c, *c]\ne: [*d, *d, *d, *d, *d, *d, *d, *d, *d]\n",
        "a: " + "[" * 5000,
        "a: &a [*a]\n",
        "a: 2024-13-40\n",
        "? [1]\n: 2\n",
        "a: \0\n",
        "\t- x: y\n",
    ],
)
def test_malformed_yaml(text: str) -> None:
    with pytest.raises(ConfigError):
        yaml_tree.parse(text.encode(), "config.yaml")


def test_yaml_size_and_encoding() -> None:
    with pytest.raises(ConfigError, match="at most"):
        yaml_tree.parse(b"#" * (yaml_tree.MAX_BYTES + 1), "f")
    with pytest.raises(ConfigError, match="UTF-8"):
        yaml_tree.parse(b"a: \xff\xfe", "f")


scalars = st.none() | st.booleans() | st.integers(-1000, 1000) | st.text("ab: #-", max_size=8)
trees = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3), max_leaves=12
)


@given(st.dictionaries(st.text("abc", min_size=1), trees, min_size=1))
def test_yaml_values_equal_safe_load(tree: dict) -> None:
    text = yaml.safe_dump(tree)
    assert yaml_tree.parse(text.encode(), "f").plain() == yaml.safe_load(text)
