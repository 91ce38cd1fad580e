"""The sets of serving.properties that DJL's integration tests generate for TensorRT-LLM, from version 0.25 to 0.36.

lmi_published.json contains the properties as they are, one entry per distinct set. The oracle of each key is the table below, which is
independent of Stoker's table of keys.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stoker.base.errors import ConfigError, EngineError
from stoker.deploy.deployment import BuildOptions, Deployment
from stoker.deploy.lmi.load import load_lmi
from stoker.deploy.lmi.model_settings import complete_lmi
from stoker.deploy.prepare import build_config
from stoker.models import all_architectures

pytestmark = pytest.mark.compatibility(
    protocol="LMI and SageMaker",
    client="serving.properties of DJL's tests",
    version="0.25 to 0.36",
    feature="all sets for TensorRT-LLM are read, and each key has its effect",
)

PUBLISHED: list[dict[str, Any]] = json.loads((Path(__file__).parent / "lmi_published.json").read_text())
NAMES = [f"{entry['version']} {entry['handler']} {entry['model']}" for entry in PUBLISHED]

QUANTIZATIONS = {"smoothquant": "SMOOTH_QUANT", "awq": "AWQ", "fp8": "FP8"}
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
# Key → where its value is in the Deployment, and the value that the text stands for.
EFFECTS: dict[str, tuple[str, Any]] = {
    "option.model_id": ("source.checkpoint", str),
    "option.tensor_parallel_degree": ("source.mapping.tensor_parallel", int),
    "option.quantize": ("source.quantization", QUANTIZATIONS.__getitem__),
    "option.smoothquant_per_token": ("source.quantization_settings.per_token", "True".__eq__),
    "option.smoothquant_per_channel": ("source.quantization_settings.per_channel", "True".__eq__),
    "option.dtype": ("source.dtype", DTYPES.__getitem__),
    "option.trust_remote_code": ("source.trust_remote_code", "True".__eq__),
    "option.baichuan_model_version": ("source.extra.baichuan_model_version", str),
    "option.chatglm_model_version": ("source.extra.chatglm_model_version", str),
    "option.gpt_model_version": ("source.extra.gpt_model_version", str),
    "option.max_rolling_batch_size": ("source.limits.max_batch_size", int),
    "option.max_input_len": ("source.limits.max_input_len", int),
    "option.max_output_len": ("source.limits.max_output_len", int),
    "option.use_custom_all_reduce": ("runtime.custom_all_reduce", "True".__eq__),
    "option.batch_scheduler_policy": ("runtime.policy", str),
    "option.max_draft_len": ("runtime.draft_tokens", int),
    "option.model_loading_timeout": ("server.load_timeout_s", int),
    "model_loading_timeout": ("server.load_timeout_s", int),
    "batch_size": ("server.options.batch_size", int),
    "option.output_formatter": ("server.options.output_formatter", str),
    "option.rolling_batch": ("server.options.rolling_batch", "disable".__ne__),
    "option.async_mode": ("server.options.dialect", {"True": "async"}.__getitem__),
}
# Key → a part of the reason why it has no effect.
NO_EFFECT = {
    "engine": "Stoker is the engine",
    "option.entryPoint": "Stoker is the handler",
}
DEFAULT = {"option.task": "text-generation"}  # key → the only value that is served

# Part of the model id → architecture of the checkpoint, and whether Stoker builds it.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "falcon": "FalconForCausalLM",
    "internlm": "InternLMForCausalLM",
    "baichuan": "BaichuanForCausalLM",
    "chatglm": "ChatGLMModel",
    "gpt-j": "GPTJForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "codestral": "MistralForCausalLM",
    "qwen": "QWenLMHeadModel",
    "gpt2": "GPT2LMHeadModel",
    "santacoder": "GPT2LMHeadCustomModel",
    "flan-t5": "T5ForConditionalGeneration",
}
TENSORRT = ("triton/", "-compiled/")  # in the addresses of engines that TensorRT-LLM built


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.deploy.lmi.load.visible_gpus", lambda environment: 0)


def load(folder: Path, properties: dict[str, str]) -> Deployment:
    (folder / "serving.properties").write_text("".join(f"{key}={value}\n" for key, value in properties.items()))
    return load_lmi(folder, {})


def value_at(owner: Any, path: str) -> Any:
    for name in path.split("."):
        owner = owner[name] if isinstance(owner, dict) else getattr(owner, name)
    return owner


@pytest.mark.parametrize("properties", [entry["properties"] for entry in PUBLISHED], ids=NAMES)
def test_each_key_has_its_effect(tmp_path: Path, properties: dict[str, str]) -> None:
    deployment = load(tmp_path, properties)
    reasons = {note.key: note.text for note in deployment.notes if note.severity == "info"}
    warnings = [note for note in deployment.notes if note.severity == "warning" and "no GPU is visible" not in note.text]
    assert warnings == []
    for key, text in properties.items():
        if key == "option.rolling_batch" and "option.async_mode" in properties:
            assert reasons.pop(key) == "the async handler has one response format"
        elif key in EFFECTS:
            path, meaning = EFFECTS[key]
            assert value_at(deployment, path) == meaning(text), key
            if key == "option.max_draft_len":
                assert "it has no effect without option.speculative_draft_model" in reasons.pop(key)
        elif key in NO_EFFECT:
            assert NO_EFFECT[key] in reasons.pop(key)
        else:
            assert text == DEFAULT[key]
    assert reasons == {}, "no other key has a note"


def outcome(properties: dict[str, str], deployment: Deployment, folder: Path) -> str:
    """What a start would do with the model: serve it, or refuse its architecture or its engine. The builder accepts all settings."""
    build_config(deployment)
    model = properties["option.model_id"]
    if any(part in model for part in TENSORRT):
        engine = folder / "tensorrt_llm" / "1"
        engine.mkdir(parents=True)
        (engine / "trt_llm_model_float16_tp1_rank0.engine").write_bytes(b"ftrt")
        with pytest.raises(EngineError, match="engine of TensorRT, which Stoker cannot run"):
            complete_lmi(deployment, folder)
        return "TensorRT engine"
    name = next(architecture for part, architecture in ARCHITECTURES.items() if part in model.lower())
    known = any(name in (row.name, *row.aliases) for row in all_architectures())
    return "served" if known else f"{name} is not supported"


def test_expected_outcomes(tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    for index, entry in enumerate(PUBLISHED):
        (folder := tmp_path / str(index)).mkdir()
        outcomes[outcome(entry["properties"], load(folder, entry["properties"]), folder)] += 1
    assert outcomes == {"served": 82, "TensorRT engine": 5, "T5ForConditionalGeneration is not supported": 4}


@pytest.mark.parametrize(
    "key, value, reason",
    [
        ("option.enable_lora", "true", "LoRA adapters are not served"),
        ("option.adapters", "adapters", "LoRA adapters are not served"),
        ("option.draft_model_id", "draft", "it is neither ngram nor a location"),
        ("option.entryPoint", "model.py", "it must be one of djl_python"),
    ],
)
def test_keys_of_what_is_not_served_are_rejected(tmp_path: Path, key: str, value: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}={value} is refused: {reason}"):
        load(tmp_path, {"option.model_id": "org/model", key: value})


@pytest.mark.parametrize(
    "spelling, path, value",
    [
        ("rolling_batch=disable", "server.options.rolling_batch", False),
        ("option.rolling_batch=deepspeed", "server.options.rolling_batch", True),
        ("tensor_parallel_degree=2", "source.mapping.tensor_parallel", 2),
        ("option.batch_size=4", "server.options.batch_size", 4),
        ("option.job_queue_size=9", "runtime.max_queue_size", 9),
        ("OPTION_MODEL_LOADING_TIMEOUT=77", "server.load_timeout_s", 77),
        ("ARGS_PREDICT_TIMEOUT=78", "server.request_timeout_s", 78),
        ("SERVING_MODEL_LOADING_TIMEOUT=79", "server.load_timeout_s", 79),
        ("MODEL_LOADING_TIMEOUT=80", "server.load_timeout_s", 80),
        ("PREDICT_TIMEOUT=81", "server.request_timeout_s", 81),
        ("HF_TRUST_REMOTE_CODE=true", "source.trust_remote_code", True),
        ("SERVING_CORS_ALLOWED_ORIGIN=*", "server.cors_origins", ("*",)),
    ],
)
def test_both_spellings_and_the_variables_of_images(tmp_path: Path, spelling: str, path: str, value: Any) -> None:
    """LMI passes keys with and without `option.` to the same handler, and its images set variables."""
    key, _, text = spelling.partition("=")
    variables = {key: text} if key.isupper() else {}
    properties = {"option.model_id": "org/model"} | ({} if variables else {key: text})
    (tmp_path / "serving.properties").write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
    assert value_at(load_lmi(tmp_path, variables), path) == value


@pytest.mark.parametrize("key", ["option.max_batch_delay", "option.max_idle_time", "max_batch_delay", "max_idle_time"])
def test_dynamic_batching_keys_of_the_documentation(tmp_path: Path, key: str) -> None:
    deployment = load(tmp_path, {"option.model_id": "org/model", key: "60"})
    assert [note.severity for note in deployment.notes if note.key == key] == ["info"]


def test_images_set_the_lowest_precedence(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.model_id=org/model\n")
    deployment = load_lmi(tmp_path, {"PREDICT_TIMEOUT": "240", "OPTION_PREDICT_TIMEOUT": "33"})
    assert deployment.server.request_timeout_s == 33


def test_model_dir(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    alone = load(tmp_path, {"option.model_dir": "weights"})
    assert isinstance(alone.source, BuildOptions)
    assert alone.source.checkpoint == str(tmp_path / "weights")
    both = load(tmp_path, {"option.model_dir": "weights", "option.model_id": "org/model"})
    assert isinstance(both.source, BuildOptions)
    assert both.source.checkpoint == "org/model"
    assert next(note for note in both.notes if note.key == "option.model_dir").text == "option.model_id names the model"
