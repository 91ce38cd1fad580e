"""Model repositories of all generations: every key is accepted, without effect for a reason, or rejected by name."""

from __future__ import annotations

import re

import pytest
import triton_templates as templates

from stoker.base.config import RuntimeConfig
from stoker.base.draft_tree import DraftTree
from stoker.base.errors import ConfigError
from stoker.deploy.deployment import FORMATS, EngineSource, find_format
from stoker.deploy.triton.fill import fill_template
from stoker.deploy.triton.keys import KEYS
from stoker.deploy.triton.load import load_repository

REPOSITORIES = pytest.mark.compatibility(
    protocol="Triton",
    client="model repositories of tensorrtllm_backend",
    version="0.5, 0.8, 0.18, 1.x",
    feature="all models, filled and unfilled",
)

FILLED = (
    "triton_max_batch_size:64,decoupled_mode:true,max_queue_delay_microseconds:100,max_queue_size:32,preprocessing_instance_count:3,"
    "postprocessing_instance_count:2,bls_instance_count:5,engine_dir:/engine,tokenizer_dir:/tokenizer,batching_strategy:inflight_fused_batching,"
    "logits_datatype:TYPE_FP32,encoder_input_features_data_type:TYPE_FP16,batch_scheduler_policy:max_utilization,max_beam_width:1"
)


def filled(era, more=""):
    pairs = [p for p in f"{FILLED},{more}".split(",") if p]
    return {
        name: fill_template(text, ",".join(p for p in pairs if f"${{{p.split(':')[0]}}}" in text))
        for name, text in templates.repository(era).items()
    }


def repo(tmp_path, **files):
    return templates.write(tmp_path, files)


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    """Eight GPUs are visible."""
    monkeypatch.setattr("stoker.deploy.triton.load.visible_gpus", lambda environment: 8)


def llm(tmp_path, **parameters):
    return load_repository(repo(tmp_path, tensorrt_llm=templates.minimal(**parameters)), {})


def line_of(error):
    return int(re.search(r"config\.pbtxt:(\d+): ", str(error.value)).group(1))


@pytest.mark.parametrize("era", templates.ERAS)
@REPOSITORIES
def test_every_generation_loads(tmp_path, era):
    folder = templates.write(tmp_path, filled(era))
    assert find_format(folder).name == "triton"
    deployment = FORMATS.get("triton").load(folder, {})
    assert deployment.source == EngineSource(location="/engine")
    assert deployment.tokenizer == "/tokenizer"
    assert deployment.runtime == RuntimeConfig(policy="max_utilization", max_queue_size=32)
    server = deployment.server
    assert (server.http_port, server.grpc_port, server.metrics_port) == (8000, 8001, 8002)
    models = {model.kind: model for model in server.options.models}
    assert len(models) == (4 if era == "0.5" else 5)
    assert {model.max_batch_size for model in models.values()} == {64}
    assert models["preprocessing"].instance_count == 3
    assert models["postprocessing"].instance_count == 2
    assert models["tensorrt_llm"].queue.max_queue_delay_us == 100
    assert models["tensorrt_llm"].queue.preferred_batch_sizes == (64,)
    assert models["tensorrt_llm"].decoupled and models["ensemble"].decoupled and not models["preprocessing"].decoupled
    assert [step.model_name for step in models["ensemble"].steps] == ["preprocessing", "tensorrt_llm", "postprocessing"]
    assert models["ensemble"].steps[0].output_map == {"INPUT_ID": "_INPUT_ID", "REQUEST_INPUT_LEN": "_REQUEST_INPUT_LEN"}


@pytest.mark.parametrize("era", templates.ERAS)
@REPOSITORIES
def test_unfilled_values_count_as_unset_with_a_warning(tmp_path, era):
    """Only the two required keys are filled. Each other variable has a warning."""
    files = templates.repository(era)
    files["tensorrt_llm"] = fill_template(
        files["tensorrt_llm"], "engine_dir:/engine,batching_strategy:inflight_fused_batching,max_queue_size:9"
    )
    deployment = load_repository(templates.write(tmp_path, files), {})
    assert deployment.runtime == RuntimeConfig(max_queue_size=9)
    assert {m.max_batch_size for m in deployment.server.options.models} == {128}
    notes = "\n".join(map(str, deployment.notes))
    for key in ("kv_cache_free_gpu_mem_fraction", "max_batch_size", "decoupled", "batch_scheduler_policy", "tokenizer_dir"):
        assert re.search(rf"config\.pbtxt:\d+: {key}: \$\{{\w+\}} is not filled", notes)


def test_renamed_tensors_have_one_role(tmp_path):
    deployment = load_repository(templates.write(tmp_path, filled("1.x")), {})
    roles = {t.name: t.role for m in deployment.server.options.models if m.kind == "ensemble" for t in m.inputs}
    assert roles["min_tokens"] == "min_length" and roles["seed"] == "random_seed" and roles["temperature"] == "temperature"
    ensemble = deployment.server.options.of_kind("ensemble")
    assert [t.name for t in ensemble.outputs].count("kv_cache_alloc_total_blocks") == 1
    assert any("declared twice" in note.text for note in deployment.notes)
    table = next(t for t in ensemble.inputs if t.name == "prompt_embedding_table")
    assert (table.dtype, table.dims, table.optional) == ("FP16", (-1, -1), True)


def test_unsigned_counts_of_the_first_release(tmp_path):
    ensemble = load_repository(templates.write(tmp_path, filled("0.5")), {}).server.options.of_kind("ensemble")
    assert ensemble.input("max_tokens").dtype == "UINT32"


ACCEPTED = [  # key, text, section, field, value
    ("max_beam_width", "4", "options", "max_beam_width", 4),
    ("batch_scheduler_policy", "max_utilization", "runtime", "policy", "max_utilization"),
    ("max_tokens_in_paged_kv_cache", "2560", "runtime", "kv_cache_tokens", 2560),
    ("kv_cache_free_gpu_mem_fraction", "0.2", "runtime", "kv_cache_fraction", 0.2),
    ("max_num_sequences", "7", "runtime", "max_num_sequences", 7),
    ("max_attention_window_size", "512", "runtime", "attention_window", 512),
    ("max_attention_window_size", "512,512", "runtime", "attention_window", 512),
    ("max_kv_cache_length", "256", "runtime", "attention_window", 256),
    ("enable_trt_overlap", "0", "runtime", "overlap", False),
    ("enable_kv_cache_reuse", "False", "runtime", "prefix_reuse", False),
    ("enable_chunked_context", "FALSE", "runtime", "chunked_prefill", False),
    ("enable_chunked_context", "TRUE", "runtime", "chunked_prefill", True),
    ("cuda_graph_mode", "false", "runtime", "cuda_graphs", False),
    ("exclude_input_in_output", "1", "options", "exclude_input_in_output", True),
    ("normalize_log_probs", "false", "options", "normalize_log_probs", False),
    ("decoding_mode", "top_k", "options", "decoding_mode", "top_k"),
    ("decoding_mode", "top_p", "options", "decoding_mode", "top_p"),
    ("gpu_device_ids", "2, 0", "runtime", "devices", (2, 0)),
    ("tokenizer_dir", "/t", "deployment", "tokenizer", "/t"),
]


@pytest.mark.parametrize(("key", "text", "section", "field", "value"), ACCEPTED)
def test_accepted(tmp_path, key, text, section, field, value):
    deployment = llm(tmp_path, **{key: text})
    holder = {"deployment": deployment, "runtime": deployment.runtime, "options": deployment.server.options}[section]
    assert getattr(holder, field) == value
    setting = next(s for s in deployment.settings if s.key == key)
    line = (tmp_path / "tensorrt_llm" / "config.pbtxt").read_text().splitlines()[setting.origin.line - 1]
    assert f'"{text}"' in line


def test_devices_without_a_gpu_are_noted(tmp_path, monkeypatch):
    monkeypatch.setattr("stoker.deploy.triton.load.visible_gpus", lambda environment: 0)
    deployment = llm(tmp_path, gpu_device_ids="2, 0")
    assert deployment.runtime.devices is None
    assert "no GPU is visible" in next(note for note in deployment.notes if note.key == "gpu_device_ids").text


NO_EFFECT = {
    "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
    "kv_cache_onboard_blocks": "true",
    "cancellation_check_period_ms": "100",
    "stats_check_period_ms": "100",
    "recv_poll_period_ms": "0",
    "iter_stats_max_iterations": "1000",
    "lora_cache_optimal_adapter_size": "8",
    "lora_cache_max_adapter_size": "64",
    "lora_cache_gpu_memory_fraction": "0.05",
    "lora_cache_host_memory_bytes": "1073741824",
    "xgrammar_tokenizer_info_path": "/x.json",
    "executor_worker_path": "/opt/w",
    "worker_path": "/opt/w",
    "multi_block_mode": "true",
    "enable_context_fmha_fp32_acc": "false",
    "cuda_graph_cache_size": "1000",
    "lookahead_window_size": "4",
    "lookahead_ngram_size": "4",
    "lookahead_verification_set_size": "4",
}


@pytest.mark.parametrize("mode", ["medusa", "eagle"])
def test_draft_heads_are_in_the_engine(tmp_path, mode):
    """TensorRT-LLM stores them in the engine file; here they are a folder of the engine."""
    engine = tmp_path / "engine"
    with pytest.raises(ConfigError, match=f"decoding_mode {mode} needs draft heads, and {engine}/draft_heads does not exist"):
        llm(tmp_path, decoding_mode=mode, gpt_model_path=str(engine))
    (engine / "draft_heads").mkdir(parents=True)
    deployment = llm(tmp_path, decoding_mode=mode, gpt_model_path=str(engine))
    assert deployment.runtime.speculate == str(engine / "draft_heads")
    assert deployment.server.options.decoding_mode == "top_k_top_p"
    other = {"medusa": "eagle", "eagle": "medusa"}[mode]
    choices = {f"{mode}_choices": "{0},{0,0},{1}", f"{other}_choices": "mc_sim_7b_63"}
    deployment = llm(tmp_path, decoding_mode=mode, gpt_model_path=str(engine), **choices)
    assert deployment.runtime.tree == DraftTree((0, 1, 0), (0, 0, 1))
    (note,) = [note for note in deployment.notes if note.key == f"{other}_choices"]
    assert note.text == f"it has no effect without decoding_mode {other}"


def test_lookahead_decoding_is_prompt_lookup(tmp_path):
    deployment = llm(tmp_path, decoding_mode="lookahead")
    assert deployment.runtime == RuntimeConfig(speculate="ngram")
    assert deployment.server.options.decoding_mode == "top_k_top_p"


@pytest.mark.parametrize(("key", "text"), NO_EFFECT.items())
def test_no_effect(tmp_path, key, text):
    deployment = llm(tmp_path, **{key: text})
    note = next(note for note in deployment.notes if note.key == key)
    assert note.text == KEYS["tensorrt_llm"][key].reason and note.origin.line > 1
    assert deployment.runtime == RuntimeConfig()


REJECTED = {  # key → (rejected text, harmless text)
    "encoder_model_path": ("/encoder", ""),
    "sink_token_length": ("4", "0"),
    "cross_kv_cache_fraction": ("0.5", ""),
    "kv_cache_host_memory_bytes": ("1024", "0"),
    "request_stats_max_iterations": ("10", "0"),
    "participant_ids": ("1,1", "0,1"),
    "num_nodes": ("0", "2"),
    "lora_prefetch_dir": ("/lora", ""),
    "medusa_choices": ("{0};{0,0}", "{0},{0,0}"),
    "eagle_choices": ("{0},{1,0}", ""),
    "speculative_decoding_fast_logits": ("true", "false"),
    "gpu_weights_percent": ("0.5", "1.0"),
    "decoding_mode": ("redrafter", "top_k_top_p"),
    "guided_decoding_backend": ("llguidance", "xgrammar"),
    "gpu_device_ids": ("0,1;2,3", "0,1"),
    "max_attention_window_size": ("512,1024", "512"),
}


@pytest.mark.parametrize(("key", "texts"), REJECTED.items())
def test_rejected_by_name_with_the_cure(tmp_path, key, texts):
    with pytest.raises(ConfigError) as error:
        llm(tmp_path, **{key: texts[0]})
    assert f"{key}={texts[0]} is refused" in str(error.value) and error.value.cure
    assert texts[0] in (tmp_path / "tensorrt_llm" / "config.pbtxt").read_text().splitlines()[line_of(error) - 1]
    assert llm(tmp_path, **{key: texts[1]}).runtime.policy == "guaranteed_no_evict"


def test_every_key_of_the_engine_model_is_tested():
    tested = {row[0] for row in ACCEPTED} | set(NO_EFFECT) | set(REJECTED) | {"gpt_model_type", "gpt_model_path", "engine_dir"}
    assert {row.name for row in KEYS["tensorrt_llm"]} == tested


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("max_beam_width", "two"),
        ("max_beam_width", "0"),
        ("max_beam_width", "-1"),
        ("max_beam_width", "²"),
        ("kv_cache_free_gpu_mem_fraction", "nan"),
        ("kv_cache_free_gpu_mem_fraction", "1.5"),
        ("kv_cache_free_gpu_mem_fraction", "0.9x"),
        ("max_tokens_in_paged_kv_cache", "1e4"),
        ("max_tokens_in_paged_kv_cache", "9" * 5000),
        ("enable_kv_cache_reuse", "yes"),
        ("batch_scheduler_policy", "static"),
        ("gpu_device_ids", "0,0"),
        ("gpu_device_ids", ","),
        ("gpu_device_ids", "99999"),
        ("decoding_mode", "greedy"),
        ("max_attention_window_size", "0"),
        ("multi_block_mode", "perhaps"),
    ],
)
def test_wrong_types_and_ranges(tmp_path, key, text):
    with pytest.raises(ConfigError, match=rf"config\.pbtxt:\d+: {key}") as error:
        llm(tmp_path, **{key: text})
    assert len(str(error.value)) < 500 and error.value.cure


@pytest.mark.parametrize("text", ["V2", "inflight", "${batching_strategy}", ""])
def test_invalid_gpt_model_type(tmp_path, text):
    with pytest.raises(ConfigError, match="Invalid gpt_model_type"):
        llm(tmp_path, gpt_model_type=text)


@pytest.mark.parametrize("text", ["V1", "v1"])
def test_v1_has_the_static_policy(tmp_path, text):
    deployment = llm(tmp_path, gpt_model_type=text, batch_scheduler_policy="max_utilization")
    assert (deployment.runtime.policy, deployment.runtime.max_batch_size) == ("static", 4)
    assert any(note.key == "batch_scheduler_policy" and note.severity == "warning" for note in deployment.notes)


def test_gpt_model_path_is_required(tmp_path):
    with pytest.raises(ConfigError, match="gpt_model_path is not set"):
        llm(tmp_path, gpt_model_path="${engine_dir}")


def test_a_relative_engine_in_the_repository(tmp_path):
    (tmp_path / "tensorrt_llm" / "1").mkdir(parents=True)
    assert llm(tmp_path, gpt_model_path="tensorrt_llm/1").source.location == str((tmp_path / "tensorrt_llm/1").resolve())
    assert llm(tmp_path, gpt_model_path="elsewhere").source.location == "elsewhere"


@pytest.mark.parametrize(
    ("mode", "beams", "expected"),
    [
        (None, "1", "top_k_top_p"),
        (None, "4", "beam_search"),
        ("beam_search", "4", "beam_search"),
        ("top_k", "4", "beam_search"),
        ("beam_search", "1", "top_k_top_p"),
        ("top_p", "1", "top_p"),
        ("auto", "1", "top_k_top_p"),
        ("auto", "4", "beam_search"),
    ],
)
def test_beams_and_decoding_mode_agree(tmp_path, mode, beams, expected):
    deployment = llm(tmp_path, max_beam_width=beams, **({"decoding_mode": mode} if mode else {}))
    assert deployment.server.options.decoding_mode == expected
    assert any(note.key == "decoding_mode" for note in deployment.notes) == (mode not in (None, "auto", expected))


def test_tokenizer_and_bls_keys(tmp_path):
    files = filled("0.18", "add_special_tokens:False,skip_special_tokens:0,accumulate_tokens:yes")
    server = load_repository(templates.write(tmp_path, files), {}).server
    assert (server.add_special_tokens, server.skip_special_tokens, server.options.accumulate_tokens) == (False, False, True)


def test_special_tokens_default_to_true_with_a_warning(tmp_path):
    files = filled("0.18", "add_special_tokens:maybe")
    deployment = load_repository(templates.write(tmp_path, files), {})
    assert deployment.server.add_special_tokens and deployment.server.skip_special_tokens
    notes = {note.key: note for note in deployment.notes}
    assert (
        "'maybe' is not a boolean; the value is true" in notes["add_special_tokens"].text
        and notes["add_special_tokens"].severity == "warning"
    )


@pytest.mark.parametrize(
    ("kind", "key", "text", "part"),
    [
        ("preprocessing", "tokenizer_type", "bert", "one of auto, t5, llama"),
        ("preprocessing", "visual_model_path", "/v", "text models"),
        ("preprocessing", "multimodal_model_path", "/v", "text models"),
        ("tensorrt_llm_bls", "accumulate_tokens", "maybe", "true or false"),
        ("tensorrt_llm_bls", "tensorrt_llm_model_name", "other", "Use tensorrt_llm"),
        ("tensorrt_llm_bls", "tensorrt_llm_draft_model_name", "draft", "draft models are not served"),
        ("tensorrt_llm_bls", "multimodal_encoders_name", "m", "text models"),
        ("postprocessing", "tokenizer_dir", "/other", "elsewhere. Make the two equal"),
        ("postprocessing", "add_special_tokens", "true", "belongs to preprocessing"),
        ("tensorrt_llm", "batch_schedule_policy", "max_utilization", "batch_scheduler_policy"),
    ],
)
def test_rejected_in_the_other_models(tmp_path, kind, key, text, part):
    files = filled("0.18")
    files[kind] += templates.parameter(key, text)
    with pytest.raises(ConfigError, match=rf"config\.pbtxt:\d+: .*{key}.*{part}"):
        load_repository(templates.write(tmp_path, files), {})


@pytest.mark.parametrize("key", ["gpt_model_path", "engine_dir", "hf_model_path", "max_num_images", "tokenizer_type"])
def test_preprocessing_keys_without_effect(tmp_path, key):
    files = filled("0.18")
    files["preprocessing"] += templates.parameter(key, {"max_num_images": "2", "tokenizer_type": "llama"}.get(key, "/engine"))
    deployment = load_repository(templates.write(tmp_path, files), {})
    assert next(n for n in deployment.notes if n.key == key).text == KEYS["preprocessing"][key].reason


@pytest.mark.parametrize(("text", "size"), [("0", 1 << 24), ("17", 17), ("${max_queue_size}", 1024)])
def test_queue_size(tmp_path, text, size):
    batching = f"dynamic_batching {{ default_queue_policy {{ max_queue_size: {text} }} }}\n"
    assert load_repository(repo(tmp_path, tensorrt_llm=templates.minimal() + batching), {}).runtime.max_queue_size == size


def test_queue_policy(tmp_path):
    batching = """dynamic_batching { preferred_batch_size: 8 preferred_batch_size: 16 priority_levels: 3 default_priority_level: 2
      default_queue_policy { timeout_action: REJECT default_timeout_microseconds: 5000 allow_timeout_override: true } }"""
    queue = load_repository(repo(tmp_path, tensorrt_llm=templates.minimal() + batching), {}).server.options.models[0].queue
    assert (queue.preferred_batch_sizes, queue.priority_levels, queue.default_priority_level) == ((8, 16), 3, 2)
    assert (queue.timeout_us, queue.allow_timeout_override) == (5000, True)


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ("instance_group { count: 2 kind: KIND_CPU }", "requests 2 instances"),
        ("instance_group { gpus: [0] }", "gpu_device_ids"),
        ("instance_group [ 3 ]", "instance_group must be a message"),
        ("dynamic_batching { default_queue_policy { timeout_action: DELAY } }", "Use REJECT"),
        ("dynamic_batching { preserve_ordering: true }", "unknown field 'preserve_ordering'"),
        ("dynamic_batching { priority_queue_policy { } }", "unknown field 'priority_queue_policy'"),
        ("model_transaction_policy { decouple: true }", "Did you mean decoupled"),
        ("model_transaction_policy { decoupled: maybe }", "decoupled=maybe is refused"),
        ("model_transaction_policy: true", "must be a message"),
        ("max_batch_size: many", "max_batch_size=many"),
        ("max_batch_size: 99999999", "whole number from 0 to"),
        ("max_batch_sise: 4", "Did you mean max_batch_size"),
        ("max_batch_size { }", "max_batch_size must be one value"),
        ("sequence_batching { }", "sequence_batching is refused"),
        ("response_cache { enable: true }", "response_cache is refused"),
        ("batch_input { }", "batch_input is refused"),
        ('input { name: "image_features" data_type: TYPE_FP16 dims: [1] }', "unknown required input 'image_features'"),
        ("input { data_type: TYPE_FP16 dims: [1] }", "has no name"),
        ('input { name: "temperature" data_type: TYPE_STRING dims: [1] }', "Declare it TYPE_FP32"),
        ('input { name: "temperature" data_type: TYPE_FP32 dims: [0] }', "dims contains '0'"),
        ('input { name: "temperature" data_type: TYPE_FP32 dims: [1] optionl: true }', "Did you mean optional"),
        ('parameters { value { string_value: "x" } }', "has no key"),
        ('name: "other"', "model is 'other' and that of its folder 'tensorrt_llm'"),
    ],
)
def test_fields_rejected(tmp_path, more, part):
    folder = repo(tmp_path, tensorrt_llm=templates.minimal() + more)
    with pytest.raises(ConfigError, match=rf"config\.pbtxt:\d+: .*{re.escape(part)}") as error:
        load_repository(folder, {})
    assert line_of(error) >= len(templates.minimal().splitlines())


@pytest.mark.parametrize(
    "more", ["version_policy { latest { } }", "optimization { }", "response_cache { enable: false }", "model_warmup [ { } ]"]
)
def test_fields_without_effect(tmp_path, more):
    assert load_repository(repo(tmp_path, tensorrt_llm=templates.minimal() + more), {}).runtime == RuntimeConfig()


def test_an_unknown_optional_tensor_is_noted(tmp_path):
    more = 'input { name: "temperatur" data_type: TYPE_FP32 dims: [1] optional: true }'
    deployment = load_repository(repo(tmp_path, tensorrt_llm=templates.minimal() + more), {})
    assert any(n.key == "temperatur" and "Did you mean temperature" in n.text for n in deployment.notes)
    assert deployment.server.options.models[0].input("temperatur") is None


def test_the_last_duplicate_key_is_used(tmp_path):
    text = templates.minimal() + templates.parameter("max_beam_width", "2") + templates.parameter("max_beam_width", "3")
    deployment = load_repository(repo(tmp_path, tensorrt_llm=text), {})
    assert deployment.server.options.max_beam_width == 3
    assert any("more than once" in note.text for note in deployment.notes)


@pytest.mark.compatibility(
    protocol="Triton", client="model repositories of tensorrtllm_backend", version="0.5", feature="the Python gpt model (engine_dir)"
)
def test_the_python_gpt_repository(tmp_path):
    """Its ensemble has other names, which the maps of the steps connect to those of v0.18."""
    pairs = "engine_dir:/engine,tokenizer_dir:/tokenizer,tokenizer_type:auto"
    files = {name: fill_template(text, pairs) for name, text in templates.gpt_repository().items()}
    deployment = load_repository(repo(tmp_path, **files), {})
    assert deployment.source == EngineSource(location="/engine") and deployment.tokenizer == "/tokenizer"
    assert deployment.runtime == RuntimeConfig()
    models = {model.kind: model for model in deployment.server.options.models}
    roles = {tensor.name: tensor.role for tensor in models["ensemble"].inputs}
    assert roles["INPUT_0"] == "text_input" and roles["INPUT_1"] == "max_tokens" and roles["INPUT_3"] == "stop_words"
    assert roles["runtime_top_k"] == "top_k" and roles["len_penalty"] == "length_penalty" and roles["end_id"] == "end_id"
    assert [(tensor.name, tensor.role) for tensor in models["ensemble"].outputs] == [("OUTPUT_0", "text_output")]
    assert [tensor.name for tensor in models["tensorrt_llm"].outputs] == ["output_ids", "log_probs"]
    assert models["tensorrt_llm"].input("request_output_len").dtype == "UINT32" and not models["tensorrt_llm"].decoupled


def test_other_repositories(tmp_path):
    with pytest.raises(ConfigError, match="contains no"):
        load_repository(tmp_path, {})
    with pytest.raises(ConfigError, match="no model with the input input_ids"):
        load_repository(repo(tmp_path / "a", other='name: "other"'), {})
    llmapi = 'name: "tensorrt_llm"\n' + templates.tensors("input", "text_input STRING -1")
    with pytest.raises(ConfigError, match=r"llmapi model.*stoker export triton"):
        load_repository(repo(tmp_path / "b", tensorrt_llm=llmapi), {})
    two = {"tensorrt_llm": templates.minimal(), "draft": templates.minimal().replace('name: "tensorrt_llm"', 'name: "draft"')}
    with pytest.raises(ConfigError, match="are both tensorrt_llm"):
        load_repository(repo(tmp_path / "d", **two), {})


def test_models_under_other_names(tmp_path):
    """In a renamed repository, kinds are found by the inputs of models. BLS and the ensemble name their targets."""
    files = filled("0.18")
    files = {f"my_{name}": re.sub(r'^name: "(\w+)"', r'name: "my_\1"', text) for name, text in files.items()}
    files["my_ensemble"] = re.sub(r'model_name: "', 'model_name: "my_', files["my_ensemble"])
    with pytest.raises(ConfigError, match="my_tensorrt_llm"):
        load_repository(templates.write(tmp_path, files), {})
    files["my_tensorrt_llm_bls"] += templates.parameter("tensorrt_llm_model_name", "my_tensorrt_llm")
    options = load_repository(templates.write(tmp_path, files), {}).server.options
    assert {m.name: m.kind for m in options.models} == {f"my_{k}": k for k in templates.repository("0.18")}
    files["my_ensemble"] = files["my_ensemble"].replace("my_postprocessing", "gone")
    with pytest.raises(ConfigError, match="a step runs 'gone'"):
        load_repository(templates.write(tmp_path, files), {})


def test_folders_of_other_formats_are_not_recognised(tmp_path):
    folder = templates.write(tmp_path, filled("0.18"))
    (folder / "serving.properties").write_text("")
    assert not FORMATS.get("triton").recognise(folder)
    assert not FORMATS.get("triton").recognise(folder / "serving.properties")


def test_too_many_models(tmp_path):
    for number in range(65):
        repo(tmp_path, **{f"m{number}": "name: 1"})
    with pytest.raises(ConfigError, match="65 models, more than 64"):
        load_repository(tmp_path, {})


def test_truncated_anywhere(tmp_path):
    """A truncated file is refused by name or read as a smaller file. No other exception is raised."""
    files = filled("0.18")
    text = files["tensorrt_llm"]
    for cut in range(0, len(text), 97):
        folder = templates.write(tmp_path, files | {"tensorrt_llm": text[:cut]})
        try:
            load_repository(folder, {})
        except ConfigError as error:
            assert "config.pbtxt" in str(error) or "not set" in str(error)
        else:
            assert 'key: "gpt_model_path"' in text[:cut]


def test_settings_have_their_origin(tmp_path):
    setting = next(s for s in llm(tmp_path, max_num_sequences="7").settings if s.name == "max_num_sequences")
    assert (setting.section, setting.value) == ("runtime", 7)
    assert re.fullmatch(r".*/tensorrt_llm/config\.pbtxt:\d+", str(setting.origin))


def test_instances_of_the_tokenizer_models_are_frontends(tmp_path):
    """The larger of the two counts, with its origin. Counts of models that have no instances in Stoker are noted."""
    deployment = load_repository(templates.write(tmp_path, filled("0.18")), {})
    assert deployment.server.num_frontends == 3
    setting = next(s for s in deployment.settings if s.name == "num_frontends")
    assert re.fullmatch(r".*/preprocessing/config\.pbtxt:\d+", str(setting.origin)) and setting.key == "instance_group.count"
    assert any(n.key == "instance_group.count" and "tensorrt_llm_bls" in n.origin.source for n in deployment.notes)
    assert llm(tmp_path / "alone").server.num_frontends == 1
    many = "preprocessing_instance_count:257"
    with pytest.raises(ConfigError, match=r"requests 257 instances of preprocessing.*Use at most 256"):
        load_repository(templates.write(tmp_path / "many", filled("0.18", many)), {})
