"""Templates of Truss's examples for TensorRT-LLM, of each generation. truss_published.json contains their keys and values.

Descriptions, icons and example inputs are shortened. The oracle is the table of expected outcomes below, and for each template that is
served, the values in its YAML.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker.base.errors import ConfigError
from stoker.deploy.deployment import BuildOptions, Deployment, EngineSource
from stoker.deploy.prepare import build_config, with_local_drafts
from stoker.deploy.truss.load import load_truss

pytestmark = pytest.mark.compatibility(
    protocol="Truss", client="templates of truss-examples", version="December 2023 to 2026",
    feature="each key has its effect, or is refused with the reason",
)  # fmt: skip

PUBLISHED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "truss_published.json").read_text())
# Template → a part of the reason why it is refused. All others are served.
REFUSED = {
    "llama/llama-13b-trt-llm-build-engine": "engine_build=.* is refused: it runs a build script of TensorRT-LLM. Use trt_llm.build",
    "mistral/engine-mixtral-8x7b-instruct": "accelerator=A100:2 is refused: .* make 1 ranks",  # the current truss refuses it, too
    "llama/engine-llama-3.1-405b-instruct": "the address contains a credential",
    "qwen/qwen-3-235B-A22B-instruct-2507-trt/b200-fp8": "patch_kwargs=.* is refused: it patches arguments of another engine",
    "documentation: BEI with FP8": "base_model=encoder is refused: embedding, classification and reranking models are not served",
}
QUANTIZATIONS = {"no_quant": (None, None), "fp8": ("FP8", None), "fp8_kv": ("FP8", "float8_e4m3fn")}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.deploy.truss.load.visible_gpus", lambda environment: 0)


def load(folder: Path, template: dict[str, Any]) -> Deployment:
    (folder / "config.yaml").write_text(yaml.safe_dump(template))
    return load_truss(folder, {})


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in REFUSED])
def test_served(tmp_path: Path, name: str) -> None:
    template = PUBLISHED[name]
    deployment = load(tmp_path, template)
    assert deployment.server.model_name == template["model_name"].strip()
    assert [note.key for note in deployment.notes if note.severity == "warning" and not note.key.startswith("secrets.")] == []
    trt_llm = template.get("trt_llm")
    check_finished_engine(deployment, template) if trt_llm is None else check_build(deployment, template, trt_llm["build"])


def check_finished_engine(deployment: Deployment, template: dict[str, Any]) -> None:
    """The generations before trt_llm name an engine, and have their own format of requests."""
    keys = template["model_metadata"] if "engine_repository" in template["model_metadata"] else template["build"]["arguments"]
    source, options = deployment.source, deployment.server.options
    assert isinstance(source, EngineSource) and source.mapping is not None
    ranks = keys.get("tensor_parallelism") or keys["tensor_parallel_count"]
    assert (source.location, deployment.tokenizer) == (keys["engine_repository"], keys["tokenizer_repository"])
    assert (source.mapping.tensor_parallel, source.token_secret) == (ranks, "hf_access_token")
    oldest = "engine_repository" in template["model_metadata"]
    assert (options.openai, options.max_tokens_counts_prompt) == (False, oldest)  # type: ignore[union-attr]


def check_build(deployment: Deployment, template: dict[str, Any], build: dict[str, Any]) -> None:
    source, runtime, run = deployment.source, template["trt_llm"].get("runtime", {}), deployment.runtime
    assert isinstance(source, BuildOptions)
    assert build_config(deployment).mapping == source.mapping, "the builder accepts all settings"
    repository = build.get("checkpoint_repository", {})
    assert source.checkpoint == repository.get("repo", build.get("huggingface_ckpt_repository"))
    assert source.revision == repository.get("revision")
    assert (source.quantization, source.kv_cache_dtype) == QUANTIZATIONS[build["quantization_type"]]
    assert source.mapping.tensor_parallel == build.get("tensor_parallel_count", 1)
    assert source.limits.max_batch_size == build.get("max_batch_size", 256)
    assert source.limits.max_num_tokens == build.get("max_num_tokens", 8192)
    if "max_seq_len" in build:
        assert source.limits.max_seq_len == build["max_seq_len"]
    else:
        assert (source.limits.max_input_len, source.limits.max_output_len) == (build["max_input_len"], build["max_output_len"])
    assert run.chunked_prefill is runtime.get("enable_chunked_context", build.get("enable_chunked_context", True))
    assert run.policy == runtime.get("batch_scheduler_policy", "guaranteed_no_evict")
    assert deployment.server.default_max_tokens == runtime.get("request_default_max_tokens")
    tags = template["model_metadata"].get("tags", [])
    assert deployment.server.options.openai is ("openai-compatible" in tags)  # type: ignore[union-attr]
    noted = {note.key.removeprefix("trt_llm.build.") for note in deployment.notes}
    assert {f"plugin_configuration.{name}" for name in build.get("plugin_configuration", {})} <= noted
    speculator = build.get("speculator", {})
    assert {f"speculator.{name}" for name in speculator} - {"speculator.speculative_decoding_mode"} <= noted
    assert run.speculate == ("ngram" if speculator.get("speculative_decoding_mode") == "LOOKAHEAD_DECODING" else "none")


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[name]) as caught:
        load(tmp_path, PUBLISHED[name])
    assert "config.yaml:" in str(caught.value) and "IQ&" not in str(caught.value)


@pytest.mark.parametrize(
    "speculator, reason",
    [
        ({"speculative_decoding_mode": "MEDUSA"}, "mode=MEDUSA or EAGLE is refused: it needs draft heads"),
        ({"speculative_decoding_mode": "EAGLE", "checkpoint_repository": {"source": "GCS", "repo": "a/b"}}, "source='?GCS'? is refused"),
        ({"num_draft_tokens": 64}, "num_draft_tokens=64 is refused"),
        (
            {"checkpoint_repository": {"source": "HF", "repo": "org/draft"}},
            "speculator.checkpoint_repository.repo=.* only DRAFT_TOKENS_EXTERNAL, MEDUSA and EAGLE",
        ),
        ({"lookahead_window_size": 4}, "Did you mean trt_llm.build.speculator.lookahead_windows_size"),
    ],
)
def test_draft_models_are_refused(tmp_path: Path, speculator: dict[str, Any], reason: str) -> None:
    template = json.loads(json.dumps(PUBLISHED["qwen/engine-qwen-3-06b"]))
    template["trt_llm"]["build"]["speculator"] = speculator
    with pytest.raises(ConfigError, match=reason):
        load(tmp_path, template)


@pytest.mark.parametrize("mode", ["MEDUSA", "EAGLE"])
@pytest.mark.parametrize("source", ["HF", "LOCAL"])
def test_draft_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, source: str) -> None:
    """Their repository is fetched with its own revision and secret; a directory of the Truss is one."""
    template = json.loads(json.dumps(PUBLISHED["qwen/engine-qwen-3-06b"]))
    repository = {"source": source, "repo": "org/heads" if source == "HF" else "data/heads"}
    repository |= {"revision": "abc", "runtime_secret_name": "my_secret"} if source == "HF" else {}
    (tmp_path / "data" / "heads").mkdir(parents=True)
    template["trt_llm"]["build"]["speculator"] = {
        "speculative_decoding_mode": mode, "num_draft_tokens": 4, "checkpoint_repository": repository,
    }  # fmt: skip
    deployment = load(tmp_path, template)
    location = "org/heads" if source == "HF" else str(tmp_path / "data" / "heads")
    revision, secret = ("abc", "my_secret") if source == "HF" else (None, "hf_access_token")
    assert deployment.drafts == EngineSource(location=location, revision=revision, token_secret=secret)
    assert (deployment.runtime.speculate, deployment.runtime.draft_tokens) == (location, 4)

    def resolve(location: str, **options: Any) -> Path:
        assert (location, options["revision"], options["token"].reveal()) == ("org/heads", "abc", "secret")
        return tmp_path / "fetched"

    monkeypatch.setattr("stoker.deploy.sources.resolve", resolve)
    fetched = with_local_drafts(deployment, {"MY_SECRET": "secret", "my_secret": "secret"}, None)
    assert fetched.runtime.speculate == (str(tmp_path / "fetched") if source == "HF" else location)


def test_drafts_of_requests(tmp_path: Path) -> None:
    template = json.loads(json.dumps(PUBLISHED["qwen/engine-qwen-3-06b"]))
    template["trt_llm"]["build"]["speculator"] = {"speculative_decoding_mode": "DRAFT_TOKENS_EXTERNAL", "num_draft_tokens": 4}
    runtime = load(tmp_path, template).runtime
    assert (runtime.speculate, runtime.draft_tokens) == ("request", 4)
    template["trt_llm"]["build"]["speculator"]["checkpoint_repository"] = {"source": "HF", "repo": "org/draft", "revision": "v1"}
    deployment = load(tmp_path, template)
    assert deployment.runtime.speculate == "org/draft" and deployment.drafts is not None
    assert (deployment.drafts.location, deployment.drafts.revision) == ("org/draft", "v1")


def test_both_kinds_of_engine_exclude_each_other(tmp_path: Path) -> None:
    arguments = PUBLISHED["llama/medusa"]["build"]
    with pytest.raises(ConfigError, match=r"build\.arguments\.engine_repository names an engine already"):
        load(tmp_path, PUBLISHED["qwen/engine-qwen-3-06b"] | {"build": arguments})
    with pytest.raises(ConfigError, match="contradicts"):
        load(tmp_path, PUBLISHED["llama/llama-7b-trt"] | {"build": arguments})


ARGUMENTS = {
    "model_server": "TRT_LLM",
    "arguments": {
        "tokenizer_repository": "mistralai/mistral-v2-instruct",
        "arguments": {"max_input_len": 1024, "max_output_len": 1000, "max_batch_size": 64, "paged_kv_cache": True, "per_token": True},
        "quant": "smooth_quant",
        "calibration": {"sq_alpha": 0.7},
        "tensor_parallel_count": 2,
        "pipeline_parallel_count": 1,
    },
}  # the example of TrussBuildConfig in the templates of truss 0.7, with a quantization


def test_an_engine_is_built_from_build_arguments(tmp_path: Path) -> None:
    source = load(tmp_path, {"build": ARGUMENTS, "model_name": "m"}).source
    assert isinstance(source, BuildOptions)
    limits = source.limits
    assert (limits.max_input_len, limits.max_output_len, limits.max_batch_size) == (1024, 1000, 64)
    assert (source.checkpoint, source.mapping.tensor_parallel, source.token_secret) == (
        "mistralai/mistral-v2-instruct",
        2,
        "hf_access_token",
    )
    assert (source.quantization, source.quantization_settings) == ("SMOOTH_QUANT", {"alpha": 0.7, "per_token": True})
    built = json.loads(json.dumps(ARGUMENTS))
    built["arguments"]["engine_repository"] = "baseten/mistral-v2-32k"
    deployment = load(tmp_path, {"build": built, "model_name": "m"})
    assert isinstance(deployment.source, EngineSource) and deployment.tokenizer == "mistralai/mistral-v2-instruct"
    warned = {note.key.removeprefix("build.arguments.") for note in deployment.notes if note.severity == "warning"}
    assert warned == {
        "arguments.max_input_len",
        "arguments.max_output_len",
        "arguments.max_batch_size",
        "arguments.per_token",
        "quant",
        "calibration.sq_alpha",
    }
    built["arguments"]["arguments"]["use_smooth_quant"] = True
    with pytest.raises(ConfigError, match=r"use_smooth_quant=True is refused: .* Set build\.arguments\.quant"):
        load(tmp_path, {"build": built, "model_name": "m"})
