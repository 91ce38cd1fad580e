"""Reading serving.properties and the environment into a Deployment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stoker.base.config import Mapping, RequestLimits
from stoker.base.errors import ConfigError, EngineError
from stoker.deploy.deployment import BuildOptions, Deployment, EngineSource
from stoker.deploy.devices import visible_gpus
from stoker.deploy.lmi.keys import TABLE
from stoker.deploy.lmi.load import is_lmi_folder, load_lmi
from stoker.deploy.lmi.model_settings import complete_lmi
from stoker.deploy.runtime_checks import override_runtime

MODEL = "option.model_id=org/model\n"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.deploy.lmi.load.visible_gpus", lambda environment: 0)


def load(folder: Path, text: str, **environment: str) -> Deployment:
    (folder / "serving.properties").write_text(text)
    return load_lmi(folder, environment)


def build(deployment: Deployment) -> BuildOptions:
    assert isinstance(deployment.source, BuildOptions)
    return deployment.source


def setting(deployment: Deployment, name: str) -> tuple[Any, str]:
    found = next(s for s in deployment.settings if s.name == name)
    return found.value, str(found.origin)


def refuse(folder: Path, text: str, match: str, **environment: str) -> str:
    with pytest.raises(ConfigError, match=match) as caught:
        load(folder, text, **environment)
    return str(caught.value)


def test_example_of_the_documentation(tmp_path: Path) -> None:
    text = (
        "option.model_id=org/model\noption.tensor_parallel_degree=1\noption.max_rolling_batch_size=16 # default is 32\n"
        "option.max_input_len=256 # default is 1024\noption.max_output_len=256 # default is 512\n"
    )
    deployment = load(tmp_path, text)
    source = build(deployment)
    assert (source.checkpoint, source.mapping.tensor_parallel) == ("org/model", 1)
    assert (source.limits.max_batch_size, source.limits.max_input_len, source.limits.max_output_len) == (16, 256, 256)
    assert setting(deployment, "max_batch_size") == (16, f"{tmp_path / 'serving.properties'}:3")
    assert sum("treated as a comment" in note.text for note in deployment.notes) == 3


# Rows of the tables in the LMI documentation: example values, and the setting that the row requires.
DOCUMENTED_ROWS: dict[str, tuple[str, str]] = {
    "max_input_len": ("512 1024", ""),
    "max_output_len": ("512 1024", ""),
    "use_custom_all_reduce": ("true false", ""),
    "tokens_per_block": ("64", ""),
    "batch_scheduler_policy": ("max_utilization guaranteed_no_evict", ""),
    "kv_cache_free_gpu_mem_fraction": ("0.95", ""),
    "max_num_sequences": ("16", ""),
    "enable_trt_overlap": ("true false", ""),
    "enable_kv_cache_reuse": ("true false", ""),
    "baichuan_model_version": ("v1_7b v1_13b v2_7b v2_13b", ""),
    "chatglm_model_version": ("chatglm_6b chatglm2_6b chatglm2_6b_32k chatglm3_6b chatglm3_6b_base chatglm3_6b_32k glm_10b", ""),
    "gpt_model_version": ("gpt2 santacoder starcoder", ""),
    "multi_block_mode": ("true false", ""),
    "use_fused_mlp": ("true false", ""),
    "rotary_base": ("10000.0", ""),
    "rotary_dim": ("64", ""),
    "rotary_scaling_type": ("linear dynamic", "option.rotary_scaling_factor=2.0"),
    "rotary_scaling_factor": ("1.5 8", "option.rotary_scaling_type=linear"),
    "quantize": ("smoothquant awq", ""),
    "smoothquant_alpha": ("0.8", "option.quantize=smoothquant"),
    "smoothquant_per_token": ("true false", "option.quantize=smoothquant"),
    "smoothquant_per_channel": ("true false", "option.quantize=smoothquant"),
    "multi_query_mode": ("true false", "option.quantize=smoothquant"),
    "awq_format": ("int4_awq", "option.quantize=awq"),
    "awq_calib_size": ("32", "option.quantize=awq"),
}


@pytest.mark.parametrize("row", DOCUMENTED_ROWS)
def test_documented_rows_with_their_values(row: str, tmp_path: Path) -> None:
    values, required = DOCUMENTED_ROWS[row]
    for value in values.split():
        deployment = load(tmp_path, f"{MODEL}option.{row}={value}\n{required}\n")
        shown = {s.key for s in deployment.settings} | {n.key for n in deployment.notes}
        assert f"option.{row}" in shown
        assert not [note for note in deployment.notes if note.severity == "warning"]


# Families that LMI builds just in time: architecture, model_type, and the key with its version.
FAMILIES: dict[str, tuple[str, str, str]] = {
    "LLaMA": ("LlamaForCausalLM", "llama", ""),
    "Falcon": ("FalconForCausalLM", "falcon", ""),
    "InternLM": ("InternLMForCausalLM", "internlm", ""),
    "Baichuan": ("BaichuanForCausalLM", "baichuan", "option.baichuan_model_version=v2_7b"),
    "ChatGLM": ("ChatGLMModel", "chatglm", "option.chatglm_model_version=chatglm3_6b"),
    "GLM": ("GLMForConditionalGeneration", "glm", "option.chatglm_model_version=glm_10b"),
    "GPT-J": ("GPTJForCausalLM", "gptj", "option.rotary_dim=64"),
    "Mistral": ("MistralForCausalLM", "mistral", ""),
    "Mixtral": ("MixtralForCausalLM", "mixtral", ""),
    "Qwen": ("QWenLMHeadModel", "qwen", "option.rotary_base=10000.0"),
    "GPT2": ("GPT2LMHeadModel", "gpt2", "option.gpt_model_version=gpt2"),
    "SantaCoder": ("GPT2LMHeadCustomModel", "gpt2", "option.gpt_model_version=santacoder"),
    "StarCoder": ("GPTBigCodeForCausalLM", "gpt_bigcode", "option.gpt_model_version=starcoder"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_that_are_built_just_in_time(family: str, tmp_path: Path) -> None:
    """Each family is a row of the architecture table, and its version key is accepted."""
    from stoker.models import all_architectures

    architecture, kind, version = FAMILIES[family]
    assert [row for row in all_architectures() if architecture in (row.name, *row.aliases)]
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": kind}))
    source = build(load(tmp_path, version + "\n"))
    assert source.checkpoint == str(tmp_path)
    lengths = {"llama": (512, 512), "falcon": (1024, 1024)}.get(kind, (1024, 512))
    assert (source.limits.max_input_len, source.limits.max_output_len) == lengths


def test_placeholder_of_the_documentation_is_refused(tmp_path: Path) -> None:
    refuse(tmp_path, "option.model_id=<your model>\n", "placeholder")


def test_defaults(tmp_path: Path) -> None:
    deployment = load(tmp_path, MODEL)
    limits = build(deployment).limits
    assert (limits.max_batch_size, limits.max_input_len, limits.max_output_len, limits.tokens_per_block) == (32, 1024, 512, 64)
    assert (deployment.runtime.policy, deployment.runtime.max_queue_size) == ("max_utilization", 1000)
    assert (deployment.server.http_port, deployment.server.request_timeout_s, deployment.server.load_timeout_s) == (8080, 120, 1800)
    assert build(deployment).token_secret == "HF_TOKEN"


@pytest.mark.parametrize("kind, lengths", [("llama", (512, 512)), ("falcon", (1024, 1024)), ("mistral", (1024, 512))])
def test_lengths_default_by_family(tmp_path: Path, kind: str, lengths: tuple[int, int]) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps({"model_type": kind}))
    limits = build(load(tmp_path, f"option.model_id={checkpoint}\n")).limits
    assert (limits.max_input_len, limits.max_output_len) == lengths
    remote = load(tmp_path, MODEL + "option.max_output_len=99\n")
    limits = build(complete_lmi(remote, checkpoint)).limits
    assert (limits.max_input_len, limits.max_output_len) == (lengths[0], 99)


def test_kv_fraction_and_ranks_default_to_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.deploy.lmi.load.visible_gpus", lambda environment: 4)
    deployment = load(tmp_path, MODEL + "option.pipeline_parallel_degree=2\n")
    assert deployment.runtime.kv_cache_fraction == 0.95
    assert build(deployment).mapping.tensor_parallel == 2
    assert build(load(tmp_path, MODEL + "option.tensor_parallel_degree=max\n")).mapping.tensor_parallel == 4
    message = refuse(tmp_path, MODEL + "option.tensor_parallel_degree=8\n", "8 ranks in total, and 4 GPUs are visible")
    assert "serving.properties:2" in message


def test_attention_dp_makes_the_ranks_data_parallel(tmp_path: Path) -> None:
    ranks = "option.tensor_parallel_degree=4\noption.enable_attention_dp={}\n"
    assert build(load(tmp_path, MODEL + ranks.format("true"))).mapping == Mapping(data_parallel=4, expert_parallel=True)
    assert build(load(tmp_path, MODEL + ranks.format("false"))).mapping == Mapping(tensor_parallel=4)
    single = load(tmp_path, MODEL + "option.tensor_parallel_degree=1\noption.enable_attention_dp=true\n")
    assert build(single).mapping == Mapping() and "there is one rank" in [note.text for note in single.notes]
    refuse(tmp_path, MODEL + ranks.format("true") + "option.data_parallel_size=2\n", "contradicts option.data_parallel_size=2")


def test_model_folder_is_the_checkpoint_without_model_id(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert build(load(tmp_path, "engine=MPI\n")).checkpoint == str(tmp_path)


ACCEPTED = {
    "job_queue_size": ("7", "runtime.max_queue_size", 7),
    "batch_size": ("4", "options.batch_size", 4),
    "load_on_devices": ("3", "runtime.devices", (3,)),
    "max_request_size": ("2000", "server.max_request_bytes", 2000),
    "http_port": ("9000", "server.http_port", 9000),
    "cors_allowed_origin": ("https://a.example,*", "server.cors_origins", ("https://a.example", "*")),
    "option.model_id": ("org/other", "build.checkpoint", "org/other"),
    "option.s3url": ("s3://bucket/prefix", "build.checkpoint", "s3://bucket/prefix"),
    "option.model_dir": ("s3://bucket/directory", "build.checkpoint", "s3://bucket/directory"),
    "option.revision": ("abc", "build.revision", "abc"),
    "option.trust_remote_code": ("true", "build.trust_remote_code", True),
    "option.dtype": ("fp16", "build.dtype", "float16"),
    "option.tokenizer": ("org/tok", "build.tokenizer", "org/tok"),
    "option.tensor_parallel_degree": ("2", "mapping.tensor_parallel", 2),
    "option.pipeline_parallel_degree": ("2", "mapping.pipeline_parallel", 2),
    "option.pipeline_parallel_size": ("2", "mapping.pipeline_parallel", 2),
    "option.data_parallel_size": ("2", "mapping.data_parallel", 2),
    "option.enable_expert_parallel": ("true", "mapping.expert_parallel", True),
    "option.rolling_batch": ("disable", "options.rolling_batch", False),
    "option.max_rolling_batch_size": ("64", "limits.max_batch_size", 64),
    "option.max_batch_size": ("64", "limits.max_batch_size", 64),
    "option.use_custom_all_reduce": ("false", "runtime.custom_all_reduce", False),
    "option.max_num_sequences": ("5", "runtime.max_num_sequences", 5),
    "option.max_input_len": ("99", "limits.max_input_len", 99),
    "option.max_output_len": ("98", "limits.max_output_len", 98),
    "option.max_seq_len": ("97", "limits.max_total_len", 97),
    "option.max_num_tokens": ("4096", "limits.max_num_tokens", 4096),
    "option.max_beam_width": ("4", "limits.max_beam_width", 4),
    "option.tokens_per_block": ("128", "limits.tokens_per_block", 128),
    "option.batch_scheduler_policy": ("guaranteed_no_evict", "runtime.policy", "guaranteed_no_evict"),
    "option.batching_type": ("static", "runtime.policy", "static"),
    "option.enable_trt_overlap": ("false", "runtime.overlap", False),
    "option.enable_overlap_scheduler": ("false", "runtime.overlap", False),
    "option.enable_chunked_prefill": ("false", "runtime.chunked_prefill", False),
    "option.enable_chunked_context": ("false", "runtime.chunked_prefill", False),
    "option.use_cuda_graph": ("false", "runtime.cuda_graphs", False),
    "option.kv_cache_free_gpu_mem_fraction": ("0.5", "runtime.kv_cache_fraction", 0.5),
    "option.free_gpu_memory_fraction": ("0.5", "runtime.kv_cache_fraction", 0.5),
    "option.enable_kv_cache_reuse": ("false", "runtime.prefix_reuse", False),
    "option.enable_block_reuse": ("false", "runtime.prefix_reuse", False),
    "option.max_tokens": ("5000", "runtime.kv_cache_tokens", 5000),
    "option.speculative_draft_model": ("ngram", "runtime.speculate", "ngram"),
    "option.draft_model_id": ("org/draft", "runtime.speculate", "org/draft"),
    "option.max_draft_len": ("20", "runtime.draft_tokens", 20),
    "option.spec_length": ("3", "runtime.draft_tokens", 3),
    "option.max_attention_window": ("4096", "runtime.attention_window", 4096),
    "option.kv_cache_dtype": ("fp8", "build.kv_cache_dtype", "float8_e4m3fn"),
    "option.baichuan_model_version": ("v2_13b", "extra.baichuan_model_version", "v2_13b"),
    "option.chatglm_model_version": ("chatglm2_6b_32k", "extra.chatglm_model_version", "chatglm2_6b_32k"),
    "option.gpt_model_version": ("santacoder", "extra.gpt_model_version", "santacoder"),
    "option.rotary_base": ("500000", "extra.rotary_base", 500000.0),
    "option.rotary_dim": ("64", "extra.rotary_dim", 64),
    "option.quantize": ("fp8", "build.quantization", "FP8"),
    "option.output_formatter": ("sse", "options.output_formatter", "sse"),
    "option.enable_streaming": ("true", "options.output_formatter", "jsonlines"),
    "option.tool_call_parser": ("llama3_json", "server.tool_parser", "llama3"),
    "option.reasoning_parser": ("qwen3", "server.reasoning_parser", "qwen3"),
    "option.tgi_compat": ("true", "options.tgi_compat", True),
    "option.async_mode": ("true", "options.dialect", "async"),
    "option.lmi_dialect": ("0.27", "options.dialect", "0.27"),
    "option.model_loading_timeout": ("60", "server.load_timeout_s", 60),
    "option.predict_timeout": ("33", "server.request_timeout_s", 33),
}


@pytest.mark.parametrize("name", ["./heads", "org/heads", "s3://bucket/heads"])
def test_draft_heads(tmp_path: Path, name: str) -> None:
    """A directory of the model folder, or a location that is fetched."""
    (tmp_path / "heads").mkdir()
    deployment = load(tmp_path, f"option.model_id=org/model\noption.speculative_draft_model={name}\noption.max_draft_len=3")
    location = str(tmp_path / "heads") if name == "./heads" else name
    assert deployment.drafts == EngineSource(location=location, token_secret="HF_TOKEN")
    assert (deployment.runtime.speculate, deployment.runtime.draft_tokens) == (location, 3)


def test_options_override_the_drafts_of_the_folder(tmp_path: Path) -> None:
    """--speculate none turns off the drafts of a folder with all their settings; an option without an effect is refused."""
    folder = load(tmp_path, "option.model_id=org/model\noption.speculative_draft_model=ngram\noption.max_draft_len=3").runtime
    assert (folder.speculate, folder.draft_tokens) == ("ngram", 3)
    assert override_runtime(folder, {"speculate": "none"}).draft_tokens is None
    assert override_runtime(folder, {"draft_tokens": 5}).draft_tokens == 5
    assert override_runtime(folder, {"speculate": "./heads", "draft_tree": "[0]", "draft_tokens": 1}).draft_tree == "[0]"
    for changed, name in (({"speculate": "none", "draft_tokens": 3}, "draft_tokens=3"), ({"draft_tree": "[0],[1],[2]"}, "draft_tree=")):
        with pytest.raises(ConfigError, match=f"{name}.* has no effect with speculate="):
            override_runtime(folder, changed)
    unused = load(tmp_path, "option.model_id=org/model\noption.max_draft_len=3")
    assert "option.max_draft_len: it has no effect without option.speculative_draft_model" in "\n".join(map(str, unused.notes))
    assert override_runtime(unused.runtime, {"speculate": "ngram"}).draft_tokens == 3


def test_a_draft_model_that_is_no_location(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="speculative_draft_model=medusa is refused: it is neither ngram nor a location"):
        load(tmp_path, "option.model_id=org/model\noption.speculative_draft_model=medusa")


TOGETHER = {  # accepted only together with others; tested below
    "certificate_file",
    "private_key_file",
    "option.rotary_scaling_type",
    "option.rotary_scaling_factor",
    "option.smoothquant_alpha",
    "option.smoothquant_per_token",
    "option.smoothquant_per_channel",
    "option.awq_calib_size",
    "option.awq_block_size",
    "option.calib_size",
    "option.enable_attention_dp",
}


def value_at(deployment: Deployment, path: str) -> Any:
    source = deployment.source
    head, _, name = path.partition(".")
    owner = {
        "build": source,
        "limits": source.limits,
        "mapping": source.mapping,
        "runtime": deployment.runtime,
        "server": deployment.server,
        "options": deployment.server.options,
        "extra": source.extra,
    }[head]
    return owner[name] if isinstance(owner, dict) else getattr(owner, name)


def test_every_accepted_row_is_tested() -> None:
    assert set(ACCEPTED) | TOGETHER == {row.name for row in TABLE if row.status == "accepted"}


@pytest.mark.parametrize("key", ACCEPTED)
def test_accepted(tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, path, value = ACCEPTED[key]
    if key == "load_on_devices":
        monkeypatch.setattr("stoker.deploy.lmi.load.visible_gpus", lambda environment: 1)
    prefix = "" if key in ("option.model_id", "option.s3url", "option.model_dir") else MODEL
    deployment = load(tmp_path, f"{prefix}{key}={text}\n")
    assert value_at(deployment, path) == value
    variable = key.upper().replace(".", "_") if key.startswith("option.") else f"SERVING_{key.upper()}"
    assert value_at(load(tmp_path, prefix, **{variable: text}), path) == value


SAMPLES = ("true", "1", "2", "0.5", "auto", "text", "Python", "int4_awq", "handle", "fp8", "float32", "djl_python.tensorrt_llm")


def sample_for(key: str) -> str:
    for sample in SAMPLES:
        try:
            TABLE[key].type.parse(sample)
        except ValueError:
            continue
        return sample
    raise AssertionError(f"no sample fits {key}")


@pytest.mark.parametrize("key", [row.name for row in TABLE if row.status == "no effect"])
def test_no_effect_has_a_reason(tmp_path: Path, key: str) -> None:
    deployment = load(tmp_path, f"{MODEL}{key}={sample_for(key)}\n")
    note = next(n for n in deployment.notes if n.key == key)
    assert note.text == TABLE[key].reason and note.origin.line == 2


@pytest.mark.parametrize("key", [row.name for row in TABLE if row.status == "rejected"])
def test_rejected_by_name(tmp_path: Path, key: str) -> None:
    row = TABLE[key]
    rejected = next(s for s in ("true", "7", "0.5", "something") if _reads(row, s) and row.type.parse(s) not in row.harmless)
    message = refuse(tmp_path, f"{MODEL}{key}={rejected}\n", r"serving\.properties:2: ")
    assert key in message and row.reason in message
    for harmless in row.harmless:
        load(tmp_path, f"{MODEL}{key}={str(harmless).lower()}\n")


def _reads(row: Any, text: str) -> bool:
    try:
        row.type.parse(text)
    except ValueError:
        return False
    return True


def test_devices_without_a_gpu_are_noted(tmp_path: Path) -> None:
    deployment = load(tmp_path, MODEL + "load_on_devices=0\n")
    assert deployment.runtime.devices is None
    assert next(n for n in deployment.notes if n.key == "load_on_devices").text == "no GPU is visible; all ranks run on the CPU"


def test_https(tmp_path: Path) -> None:
    deployment = load(tmp_path, MODEL + "certificate_file=cert.pem\nprivate_key_file=key.pem\n")
    assert (deployment.server.tls_certificate, deployment.server.tls_key) == ("cert.pem", "key.pem")
    refuse(tmp_path, MODEL + "certificate_file=cert.pem\n", "tls_key is not set")


def test_quantization_settings(tmp_path: Path) -> None:
    smooth = build(load(tmp_path, MODEL + "option.quantize=smoothquant\noption.smoothquant_per_token=true\noption.multi_query_mode=true\n"))
    assert smooth.quantization_settings == {"alpha": 0.8, "per_token": True, "per_channel": False}
    awq = build(load(tmp_path, MODEL + "option.quantize=awq\noption.awq_calib_size=64\noption.awq_format=int4_awq\n"))
    assert awq.quantization_settings == {"calibration_size": 64, "group_size": 128}
    assert build(load(tmp_path, MODEL + "option.quantize=awq\n")).quantization_settings["calibration_size"] == 32
    fp8 = build(load(tmp_path, MODEL + "option.quantize=fp8\noption.calib_size=256\noption.use_fp8_context_fmha=true\n"))
    assert (fp8.quantization, fp8.quantization_settings) == ("FP8", {"calibration_size": 256})


def test_settings_of_another_quantization_have_a_warning(tmp_path: Path) -> None:
    deployment = load(tmp_path, MODEL + "option.quantize=fp8\noption.smoothquant_alpha=0.5\n")
    assert build(deployment).quantization_settings == {}
    note = next(n for n in deployment.notes if n.key == "option.smoothquant_alpha")
    assert (note.severity, note.origin.line) == ("warning", 3)


def test_unknown_quantization(tmp_path: Path) -> None:
    refuse(tmp_path, MODEL + "option.quantize=int3\n", r"serving.properties:2: option.quantize=int3 is refused: .*smoothquant, awq, fp8")


def test_rotary_scaling_goes_together(tmp_path: Path) -> None:
    both = load(tmp_path, MODEL + "option.rotary_scaling_type=linear\noption.rotary_scaling_factor=2.0\n")
    assert build(both).extra == {"rotary_scaling_type": "linear", "rotary_scaling_factor": 2.0}
    refuse(tmp_path, MODEL + "option.rotary_scaling_type=linear\n", "set together")
    refuse(tmp_path, MODEL + "option.rotary_scaling_factor=2\n", "set together")
    refuse(tmp_path, MODEL + "option.rotary_scaling_type=linear\noption.rotary_scaling_factor=1.0\n", "above 1")


@pytest.mark.parametrize(
    "text, match",
    [
        ("option.max_input_length=3", r"serving.properties:2: unknown key option.max_input_length. Did you mean option.max_input_len"),
        ("optoin.dtype=fp16", "Did you mean option.dtype"),
        ("zzzzzz=1", "unknown key zzzzzz"),
        ("option.max_input_len=many", "whole number"),
        ("option.max_input_len=-1", "whole number"),
        ("option.max_input_len=1e99", "whole number"),
        ("option.max_input_len=" + "9" * 4000, "whole number"),
        ("option.tokens_per_block=48", r"serving.properties:2: option.tokens_per_block=48"),
        ("option.kv_cache_free_gpu_mem_fraction=nan", "number above 0"),
        ("option.kv_cache_free_gpu_mem_fraction=1.5", "at most 1"),
        ("option.tgi_compat=yes", "true or false"),
        ("option.entryPoint=model.py", "Stoker is the handler|must be one of"),
        ("option.output_formatter=mine.format", "must be one of json"),
        ("option.awq_format=int8", "int4_awq"),
        ("option.baichuan_model_version=v3_7b", "v1_7b"),
        ("load_on_devices=0;1", "2 devices for 1 ranks"),
        ("load_on_devices=gpu", "device indices"),
        ("engine=PyTorch", "Python, MPI|python, mpi"),
        ("option.max_rolling_batch_size=8\noption.max_batch_size=9", "contradicts option.max_rolling_batch_size=8"),
        ("option.dtype=fp16\noption.dtype=bf16", "line 3: option.dtype is a duplicate; line 2"),
    ],
)
def test_refusals(tmp_path: Path, text: str, match: str) -> None:
    refuse(tmp_path, MODEL + text + "\n", match)


def test_precedence(tmp_path: Path) -> None:
    file = MODEL + "option.max_input_len=100\noption.predict_timeout=5\njob_queue_size=77\n"
    environment = {
        "OPTION_MAX_INPUT_LEN": "200",
        "OPTION_MAX_OUTPUT_LEN": "300",
        "HF_REVISION": "r1",
        "OPTION_REVISION": "r2",
        "MAX_BATCH_SIZE": "9",
        "MAX_CONCURRENT_REQUESTS": "12",
        "SERVING_JOB_QUEUE_SIZE": "55",
        "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": "33",
        "OPTION_EMPTY": "",
        "TENSOR_PARALLEL_DEGREE": "1",
        "SAGEMAKER_MAX_PAYLOAD_IN_MB": "6",
        "HF_MODEL_TRUST_REMOTE_CODE": "true",
        "PATH": "/bin",
    }
    deployment = load(tmp_path, file, **environment)
    source = build(deployment)
    assert (source.limits.max_input_len, source.limits.max_output_len, source.limits.max_batch_size) == (100, 300, 9)
    assert (source.revision, source.trust_remote_code, deployment.runtime.max_queue_size) == ("r1", True, 77)
    assert (deployment.server.request_timeout_s, deployment.server.max_request_bytes) == (33, 6 << 20)
    assert setting(deployment, "max_output_len") == (300, "environment")
    overridden = next(n for n in deployment.notes if n.key == "OPTION_MAX_INPUT_LEN")
    assert "serving.properties:2) takes precedence" in overridden.text


def test_environment_alone(tmp_path: Path) -> None:
    deployment = load_lmi(
        tmp_path, {"HF_MODEL_ID": "org/My-Model.v1", "OPTION_MODEL_ID": "from/option", "OPTION_ENTRYPOINT": "djl_python.tensorrt_llm"}
    )
    assert build(deployment).checkpoint == "org/My-Model.v1"
    assert deployment.server.model_name == "org_My_Model_v1"


def test_unknown_variables_are_errors(tmp_path: Path) -> None:
    refuse(tmp_path, MODEL, "environment: unknown key OPTION_MAX_INPUT_LENGTH. Did you mean", OPTION_MAX_INPUT_LENGTH="3")
    refuse(tmp_path, MODEL, "unknown key OPTION_Max_Input_Len", OPTION_Max_Input_Len="3")


def test_token_is_never_printed(tmp_path: Path) -> None:
    deployment = load(tmp_path, MODEL, HF_TOKEN="hf_secret_value")
    shown = [repr(deployment), *(str(n) for n in deployment.notes)]
    assert not any("hf_secret_value" in text for text in shown)


@pytest.mark.parametrize(
    "address", ["https://u:hunter2@host/m.tar.gz", "https://host/m.tar.gz?X-Amz-Signature=hunter2", "s3://k:hunter2@b/p"]
)
def test_address_with_a_credential_is_refused_and_not_printed(tmp_path: Path, address: str) -> None:
    assert "hunter2" not in refuse(tmp_path, f"option.model_id={address}\n", "contains a credential")


def test_variables_of_a_python_process_are_refused_and_not_printed(tmp_path: Path) -> None:
    assert "hunter2" not in refuse(tmp_path, MODEL + "option.env=TOKEN=hunter2\n", "option.env=.hidden. is refused")


def engine_at(root: Path, **limits: int) -> Path:
    engine = root / "tensorrt_llm" / "1"
    engine.mkdir(parents=True)
    (engine / "config.json").write_text(json.dumps({"format_version": 1, "limits": limits, "dtype": "bfloat16"}))
    return engine


BUILT = {"max_batch_size": 8, "max_num_tokens": 512, "max_input_len": 100, "max_output_len": 50, "max_beam_width": 2}


def test_prebuilt_in_the_model_folder(tmp_path: Path) -> None:
    engine = engine_at(tmp_path, **BUILT)
    deployment = load(tmp_path, "option.dtype=fp16\noption.max_num_sequences=3\n")
    assert deployment.source == EngineSource(location=str(engine))
    assert deployment.runtime.max_num_sequences == 3
    note = next(n for n in deployment.notes if n.key == "option.dtype")
    assert "built already" in note.text
    assert not any(s.section == "build" for s in deployment.settings)
    assert load(tmp_path, "option.dtype=bf16\noption.tokens_per_block=64\n").notes == (), "as the engine was built"


# Property → the setting that it lowers.
LOWER = {
    "option.max_rolling_batch_size=4": ("runtime", "max_batch_size", 4),
    "option.max_num_tokens=256": ("runtime", "max_num_tokens", 256),
    "option.max_input_len=60": ("server", "max_input_len", 60),
    "option.max_output_len=50": ("server", "max_output_len", None),  # equal to that of the engine
    "option.max_output_len=10": ("server", "max_output_len", 10),
    "option.max_seq_len=80": ("server", "max_total_len", 80),
    "option.max_beam_width=1": ("server", "max_beam_width", 1),
}


@pytest.mark.parametrize("line", LOWER)
def test_a_prebuilt_engine_accepts_lower_limits(tmp_path: Path, line: str) -> None:
    engine_at(tmp_path, **BUILT)
    section, name, value = LOWER[line]
    deployment = load(tmp_path, line + "\n")
    owner = deployment.runtime if section == "runtime" else deployment.server.request_limits
    assert getattr(owner, name) == value
    assert not deployment.notes
    assert [(s.section, s.value) for s in deployment.settings if s.name == name] == ([(section, value)] if value else [])


def test_higher_limits_than_those_of_a_prebuilt_engine(tmp_path: Path) -> None:
    """Higher limits of requests are refused. Higher limits of a step have no effect, because requests wait for later steps."""
    engine_at(tmp_path, **BUILT)
    refuse(tmp_path, "option.max_input_len=101\n", "properties:1: option.max_input_len=101 is refused: .* built with max_input_len=100")
    refuse(tmp_path, "option.max_seq_len=151\n", "built with max_total_len=150")
    refuse(tmp_path, "option.max_beam_width=3\n", "Set it to at most 2")
    deployment = load(tmp_path, "option.max_rolling_batch_size=32\n")
    assert deployment.runtime.max_batch_size is None
    assert [note.text for note in deployment.notes] == ["the engine was built with max_batch_size=8, which applies"]


def test_damaged_limits_of_a_prebuilt_engine(tmp_path: Path) -> None:
    (engine_at(tmp_path) / "config.json").write_text('{"format_version": 1, "limits": {"max_input_len": "x"}}')
    with pytest.raises(EngineError, match=r"config\.json is damaged"):
        load(tmp_path, "")


def test_prebuilt_that_model_id_names(tmp_path: Path) -> None:
    engine = engine_at(tmp_path / "repo")
    assert load(tmp_path, f"option.model_id={tmp_path / 'repo'}\n").source == EngineSource(location=str(engine))
    assert load(tmp_path, f"option.model_id={engine}\n").source == EngineSource(location=str(engine))
    remote = load(tmp_path, "option.model_id=s3://bucket/prebuilt\noption.max_output_len=9\n")
    fetched = complete_lmi(remote, tmp_path / "repo")
    assert fetched.source == EngineSource(location=str(engine))
    assert fetched.server.request_limits == RequestLimits(max_output_len=9)


def test_relative_paths_are_of_the_model_folder(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    assert build(load(tmp_path, "option.model_id=weights\n")).checkpoint == str(tmp_path / "weights")
    assert build(load(tmp_path, "option.model_id=org/weights\n")).checkpoint == "org/weights"


def test_engines_of_tensorrt_are_refused(tmp_path: Path) -> None:
    engine = engine_at(tmp_path)
    (engine / "config.json").write_text("{}")
    (engine / "trt_llm_model_float16_tp2_rank0.engine").write_bytes(b"ftrt")
    with pytest.raises(EngineError, match="engine of TensorRT, which"):
        load(tmp_path, "")


def test_adapters_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapters").mkdir()
    refuse(tmp_path, MODEL, "LoRA")


def test_version_of_another_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    refuse(tmp_path, "option.chatglm_model_version=chatglm_6b\n", "the checkpoint's model_type is llama")


def test_nested_folder_of_an_archive(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    assert not is_lmi_folder(tmp_path)
    (tmp_path / "model" / "serving.properties").write_text(MODEL)
    assert is_lmi_folder(tmp_path) and is_lmi_folder(tmp_path / "model" / "serving.properties")
    assert build(load_lmi(tmp_path, {})).checkpoint == "org/model"


def test_max_seq_len_bounds_prompt_and_output_together(tmp_path: Path) -> None:
    limits = build(load(tmp_path, MODEL + "option.max_seq_len=2048\n")).limits
    assert (limits.max_seq_len, limits.max_input_len, limits.max_output_len) == (2048, 2047, 2047)


@pytest.mark.parametrize("devices, count", [(None, 3), ("", 0), ("0,1", 2), ("-1", 0), ("0,-1,2", 1), ("0,1,2,3,4", 3)])
def test_visible_gpus(tmp_path: Path, devices: str | None, count: int) -> None:
    for node in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / node).touch()
    assert visible_gpus({} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}, tmp_path) == count
