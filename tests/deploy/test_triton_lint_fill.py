"""Lint reports all findings with their lines; fill substitutes like fill_template.py of tensorrtllm_backend."""

from __future__ import annotations

import pytest
import triton_templates as templates
from hypothesis import given
from hypothesis import strategies as st

from stoker.base.errors import ConfigError
from stoker.deploy.triton.fill import fill_template
from stoker.deploy.triton.lint import lint_repository


def findings(folder, severity):
    return [f"{f.file.rsplit('/', 2)[-2]}:{f.line}: {f.text} {f.cure}" for f in lint_repository(folder) if f.severity == severity]


@pytest.mark.parametrize("era", templates.ERAS)
def test_a_template_without_required_values(tmp_path, era):
    folder = templates.write(tmp_path, templates.repository(era))
    errors = findings(folder, "error")
    assert len(errors) == 2 and "Invalid gpt_model_type" in errors[0] + errors[1] and "gpt_model_path is not set" in errors[0] + errors[1]
    warnings = "\n".join(findings(folder, "warning"))
    for name in ("${triton_max_batch_size}", "${kv_cache_free_gpu_mem_fraction}", "${tokenizer_dir}", "${preprocessing_instance_count}"):
        assert f"{name} is not filled" in warnings


def test_every_finding_at_once_with_its_line(tmp_path):
    text = templates.minimal(batch_schedule_policy="max_utilization", max_beam_width="two", sink_token_length="4", tokenizer_dri="${x}")
    text += templates.parameter("zzz", "1") + "max_batch_sise: 4\nresponse_cache { enable: true }\noptimization { }\n"
    text += 'input { name: "temperatur" data_type: TYPE_FP32 dims: [1] optional: true }\n'
    text += 'input { name: "runtime_top_k" data_type: TYPE_FP32 dims: [1] }\ninput { name: "end_id" dims: ["x"] }\n'
    folder = templates.write(tmp_path, {"tensorrt_llm": text})
    lines = text.splitlines()
    found = lint_repository(folder)
    errors = {lines[f.line - 1].strip(): f for f in found if f.severity == "error"}
    assert set(errors) == {
        'string_value: "max_utilization"',
        'string_value: "two"',
        'string_value: "4"',
        'string_value: "1"',
        "max_batch_sise: 4",
        "response_cache { enable: true }",
        'input { name: "runtime_top_k" data_type: TYPE_FP32 dims: [1] }',
        'input { name: "end_id" dims: ["x"] }',
    }
    assert "batch_scheduler_policy" in errors['string_value: "max_utilization"'].cure
    assert "max_batch_size" in errors["max_batch_sise: 4"].cure
    assert errors['string_value: "1"'].cure == "Remove it."
    warnings = "\n".join(findings(folder, "warning"))
    assert "unknown key, not filled. Did you mean tokenizer_dir " in warnings
    assert "temperatur: unknown input; requests with it are refused. Did you mean temperature?" in warnings
    infos = "\n".join(findings(folder, "info"))
    assert "optimization: the engine of Stoker has no such options" in infos and "the repository has no model preprocessing" in infos


def test_a_broken_file_does_not_hide_the_others(tmp_path):
    files = templates.repository("0.18") | {"ensemble": 'name: "ensemble"\ninput [ {'}
    errors = findings(templates.write(tmp_path, files), "error")
    assert any(e.startswith("ensemble:2: input, opened in line 2, is not closed") for e in errors)
    assert any("Invalid gpt_model_type" in e for e in errors)


def test_errors_between_files(tmp_path):
    files = {
        "preprocessing": 'name: "preprocessing"\n' + templates.parameter("tokenizer_dir", "/a"),
        "postprocessing": 'name: "postprocessing"\n' + templates.parameter("tokenizer_dir", "/b"),
        "tensorrt_llm": templates.minimal(),
    }
    errors = findings(templates.write(tmp_path, files), "error")
    assert len(errors) == 1 and "tokenizer_dir='/a', and it is '/b' elsewhere" in errors[0]


def test_a_clean_repository_has_no_errors_or_warnings(tmp_path):
    folder = templates.write(tmp_path, {"tensorrt_llm": templates.minimal(max_beam_width="1")})
    assert {f.severity for f in lint_repository(folder)} == {"info"}
    with pytest.raises(ConfigError, match="contains no"):
        lint_repository(tmp_path / "tensorrt_llm")


def test_fill_substitutes_and_leaves_the_rest():
    text = "a: ${a} b: ${b} c: ${c} d: $d q: ${max_queue_size} ${not a name}"
    assert fill_template(text, "a:1,b:x y,d:4") == "a: 1 b: x y c: ${c} d: 4 q: 0 ${not a name}"
    assert fill_template(text, "max_queue_size:7") == text.replace("${max_queue_size}", "7")


@pytest.mark.parametrize(
    ("pairs", "value"),
    [
        (r"p:/models\:v1", "/models:v1"),
        (r"p:0\,1\,2", "0,1,2"),
        ("p:s3://bucket/key", "s3://bucket/key"),
        ("p:", ""),
        (r"p:C\x", r"C\x"),
        (r"p:a\,b,", "a,b"),
    ],
)
def test_escapes(pairs, value):
    assert fill_template('x: "${p}"', pairs) == f'x: "{value}"'


@pytest.mark.parametrize("pairs", ["a", ":1"])
def test_fill_refuses(pairs):
    with pytest.raises(ConfigError, match="is not a pair"):
        fill_template("path: ${engine_dir}", pairs)


def test_names_that_the_template_lacks_are_ignored():
    """One list of pairs fills all files of a repository, as with fill_template.py."""
    assert fill_template("path: ${engine_dir}", "triton_max_batch_size:8,engine_dir:/e,zzz:1") == "path: /e"


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.text(alphabet="ab,:/$ {}", max_size=12), min_size=1, max_size=5))
def test_any_value_can_be_escaped(values):
    text = "\n".join(f"${{{key}}}" for key in values)
    pairs = ",".join(f"{key}:" + value.replace(",", r"\,").replace(":", r"\:") for key, value in values.items())
    assert fill_template(text, pairs).split("\n") == list(values.values())


def test_filling_twice_equals_filling_once():
    text = templates.repository("0.18")["tensorrt_llm"]
    twice = fill_template(fill_template(text, "engine_dir:/e,max_queue_size:3"), "decoupled_mode:true")
    assert twice == fill_template(text, "engine_dir:/e,decoupled_mode:true,max_queue_size:3")


def test_the_python_gpt_repository(tmp_path):
    files = templates.gpt_repository()
    unfilled = findings(templates.write(tmp_path / "a", files), "error")
    assert len(unfilled) == 1 and "engine_dir is not set" in unfilled[0]
    filled = {name: fill_template(text, "engine_dir:/e,tokenizer_dir:/e,tokenizer_type:auto") for name, text in files.items()}
    assert findings(templates.write(tmp_path / "b", filled), "error") == []
