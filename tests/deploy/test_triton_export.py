"""An exported repository is read by Stoker and by the strict reader of protobuf, and its models fit together."""

from __future__ import annotations

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from stoker.base.config import Limits, RuntimeConfig
from stoker.base.errors import ConfigError
from stoker.deploy.deployment import EngineInfo, EngineSource, find_format
from stoker.deploy.triton.export import export_triton, five_models
from stoker.deploy.triton.lint import lint_repository
from stoker.deploy.triton.load import load_repository
from stoker.server.protocols.kserve.model_config import KINDS, tensors
from stoker.server.protocols.kserve.tensors.table import ERAS

ENGINE = EngineInfo(
    path="/engines/a b", architecture="LlamaForCausalLM", vocab_size=32000, limits=Limits(max_batch_size=48, max_beam_width=2)
)
OPTIONS = {
    "decoupled_mode": "true",
    "preprocessing_instance_count": "3",
    "bls_instance_count": "2",
    "max_queue_size": "77",
    "max_queue_delay_microseconds": "50",
    "kv_cache_free_gpu_mem_fraction": "0.5",
    "tokenizer_dir": 'odd "dir"\\',
    "accumulate_tokens": "true",
    "batching_strategy": "inflight_batching",
    "add_special_tokens": "false",
}


def parse_with_protobuf(repo):
    parse = text_format.Parse
    return {file.parent.name: parse(file.read_text(), model_config_pb2.ModelConfig()) for file in repo.glob("*/config.pbtxt")}


@pytest.mark.parametrize("options", [{}, OPTIONS])
def test_round_trip(tmp_path, options):
    repo = tmp_path / "repo"
    written = export_triton(ENGINE, repo, options)
    assert {p.relative_to(repo).as_posix() for p in written} >= {f"{kind}/config.pbtxt" for kind in KINDS}
    assert all((repo / kind / "1").is_dir() for kind in KINDS)
    assert find_format(repo).name == "triton"
    deployment = load_repository(repo, {})
    assert deployment.source == EngineSource(location="/engines/a b")
    assert {m.kind: m for m in deployment.server.options.models} == {m.kind: m for m in five_models(ENGINE, options)}
    assert [note for note in deployment.notes if note.severity == "warning"] == []
    assert [f for f in lint_repository(repo) if f.severity != "info"] == []


def test_options_reach_the_deployment(tmp_path):
    export_triton(ENGINE, tmp_path, OPTIONS)
    deployment = load_repository(tmp_path, {})
    assert deployment.runtime == RuntimeConfig(max_queue_size=77, kv_cache_fraction=0.5)
    assert deployment.tokenizer == 'odd "dir"\\'
    options = deployment.server.options
    assert options.accumulate_tokens and not deployment.server.add_special_tokens and options.max_beam_width == 2
    assert options.of_kind("ensemble").decoupled and options.of_kind("tensorrt_llm_bls").instance_count == 2
    assert options.of_kind("preprocessing").instance_count == 3


def test_the_reader_of_protobuf(tmp_path):
    export_triton(ENGINE, tmp_path, OPTIONS)
    configs = parse_with_protobuf(tmp_path)
    assert set(configs) == set(KINDS)
    llm = configs["tensorrt_llm"]
    assert llm.parameters["gpt_model_path"].string_value == "/engines/a b" and llm.model_transaction_policy.decoupled
    assert llm.dynamic_batching.default_queue_policy.max_queue_size == 77
    for kind, config in configs.items():
        assert config.max_batch_size == 48
        assert (config.platform == "ensemble") == (kind == "ensemble") == bool(config.ensemble_scheduling.step)
        assert config.backend == ("" if kind == "ensemble" else "python")


def test_the_models_of_the_ensemble_fit_together(tmp_path):
    """A tensor of two models has the same dtype. Each input is used. Each output and internal tensor has one source."""
    export_triton(ENGINE, tmp_path, {})
    configs = parse_with_protobuf(tmp_path)
    ensemble = configs["ensemble"]
    available = {tensor.name: tensor.data_type for tensor in ensemble.input}
    used = set()
    for step in ensemble.ensemble_scheduling.step:
        member = configs[step.model_name]
        inputs = {tensor.name: tensor for tensor in member.input}
        for name, source in step.input_map.items():
            assert inputs[name].data_type == available[source], (step.model_name, name, source)
            used.add(source)
        assert {t.name for t in member.input if not t.optional} <= set(step.input_map)
        outputs = {tensor.name: tensor.data_type for tensor in member.output}
        for name, target in step.output_map.items():
            assert target not in available
            available[target] = outputs[name]
    assert {tensor.name for tensor in ensemble.input} <= used
    assert {tensor.name: tensor.data_type for tensor in ensemble.output}.items() <= available.items()


def test_nothing_is_overwritten(tmp_path):
    export_triton(ENGINE, tmp_path, {})
    with pytest.raises(ConfigError, match="exists"):
        export_triton(ENGINE, tmp_path, {})


@pytest.mark.parametrize(
    ("option", "value", "part"),
    [
        ("decoupled_mod", "true", "decoupled_mode"),
        ("decoupled_mode", "maybe", "true or false"),
        ("max_queue_size", "-1", "max_queue_size"),
        ("batching_strategy", "V3", "Invalid gpt_model_type"),
        ("lookahead_window_size", "4", "no effect"),
        ("multi_block_mode", "true", "no effect"),
        ("triton_max_batch_size", "99999999", "max_batch_size"),
        ("preprocessing_instance_count", "0", "instance_count"),
    ],
)
def test_options_are_checked(tmp_path, option, value, part):
    with pytest.raises(ConfigError, match=part):
        export_triton(ENGINE, tmp_path / "repo", {option: value})
    assert not (tmp_path / "repo").exists()


def test_the_table_of_tensors():
    """Samples of the templates: counts by release, dims, renamed, added and removed tensors."""
    counts = {(kind, era): tuple(map(len, tensors(kind, era))) for kind in KINDS for era in ERAS}
    assert (
        counts["tensorrt_llm", "0.8"] == (28, 6)
        and counts["postprocessing", "0.18"] == (2, 1)
        and counts["postprocessing", "0.8"] == (6, 5)
    )
    inputs = {era: {t.name: t for t in tensors("ensemble", era)[0]} for era in ERAS}
    assert inputs["0.8"]["text_input"].dims == (-1,) and inputs["0.18"]["text_input"].dims == (1,)
    assert "seed" in inputs["1.x"] and "random_seed" not in inputs["1.x"] and inputs["1.x"]["seed"].role == "random_seed"
    assert "return_kv_cache_reuse_stats" in inputs["0.18"] and "return_kv_cache_reuse_stats" not in inputs["1.x"]
    llm = {t.name: t for t in tensors("tensorrt_llm")[0]}
    assert llm["input_ids"].ragged and llm["beam_width"].scalar and llm["stop_words_list"].dims == (2, -1)
    assert {name for name, t in llm.items() if not t.optional} == {"input_ids", "input_lengths", "request_output_len"}
