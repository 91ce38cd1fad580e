"""The table itself: defaults, names, versions, refusals, and the page that is made of it."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from stoker.base.errors import CheckpointError, ConfigError
from stoker.builder.checkpoint.tensorrt_llm.families.table import ARCHITECTURES, FAMILIES
from stoker.core.model_config import decode_model, encode_model
from stoker.core.prefix_lm import find_bidirectional_prefix
from stoker.models import Architecture, all_architectures, check_version, get_architecture, resolve_architecture

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "architectures.py"
ARCHITECTURE_FILES = ROOT / "src" / "stoker" / "models" / "architectures"
NATIVE = [row.name for row in all_architectures() if row.model_types and row.model_types[0] in CONFIG_MAPPING and row.name != "GLMModel"]


def needed(name: str) -> dict:
    """DeepSeek V2's class has no number of experts a token."""
    return {"num_experts_per_tok": 6} if name == "DeepseekV2ForCausalLM" else {}


@pytest.mark.parametrize("name", NATIVE)
def test_keys_left_out_mean_what_transformers_means(name: str) -> None:
    row = get_architecture(name)
    full = CONFIG_MAPPING[row.model_types[0]]().to_dict() | needed(name)
    assert row.read_config(({"text_config": {}} if "text_config" in full else {}) | needed(name)) == row.read_config(full)


@pytest.mark.parametrize("name", NATIVE)
def test_configs_survive_the_engines_json(name: str) -> None:
    config = get_architecture(name).read_config(needed(name))
    assert decode_model(encode_model(config)) == config


def test_rows_are_found_by_name_alias_and_model_type() -> None:
    assert resolve_architecture({"architectures": ["MistralForCausalLM"]}).name == "MistralForCausalLM"
    assert resolve_architecture({"architectures": ["Unheard", "LLaMAForCausalLM"]}).name == "LlamaForCausalLM"
    assert resolve_architecture({"model_type": "qwen3_moe"}).name == "Qwen3MoeForCausalLM"
    assert resolve_architecture({"model_type": "chatglm", "inner_hidden_size": 16384}).name == "ChatGLM1Model"
    assert resolve_architecture({"architectures": ["ChatGLMModel"], "padded_vocab_size": 65024}).name == "ChatGLMModel"
    assert resolve_architecture({"architectures": ["BaichuanForCausalLM"], "vocab_size": 64000}).name == "BaiChuanForCausalLM"
    assert resolve_architecture({"architectures": ["BaichuanForCausalLM"], "vocab_size": 125696}).name == "BaichuanForCausalLM"
    assert resolve_architecture({"model_type": "gpt2", "attention_head_type": "multiquery"}).name == "GPT2LMHeadCustomModel"


def test_unknown_architectures_are_refused_and_only_misspelled_ones_are_corrected() -> None:
    with pytest.raises(CheckpointError, match=r"'MixtralForCausalML' is not supported.*write MixtralForCausalLM"):
        resolve_architecture({"architectures": ["MixtralForCausalML"], "model_type": "mixtral"})
    with pytest.raises(CheckpointError, match=r"'Zamba2ForCausalLM' is not supported\. The \d+ supported architectures are listed"):
        resolve_architecture({"architectures": ["Zamba2ForCausalLM"], "model_type": "zamba2"})
    with pytest.raises(CheckpointError, match=r"'rwkv' is not supported"):
        resolve_architecture({"model_type": "rwkv"})
    with pytest.raises(CheckpointError, match=r"neither architectures nor model_type"):
        resolve_architecture({})


BAICHUAN = {"architectures": ["BaichuanForCausalLM"]}


@pytest.mark.parametrize(
    ("hf", "option", "good", "bad"),
    [
        (BAICHUAN | {"vocab_size": 64000}, "baichuan_model_version", "v1_13b", "v2_13b"),
        (BAICHUAN | {"vocab_size": 125696, "max_position_embeddings": 4096}, "baichuan_model_version", "v2_7b", "v1_7b"),
        ({"model_type": "chatglm", "inner_hidden_size": 9}, "chatglm_model_version", "chatglm_6b", "chatglm2_6b"),
        ({"model_type": "chatglm", "rope_ratio": 50}, "chatglm_model_version", "chatglm3_6b_32k", "chatglm3_6b"),
        ({"model_type": "chatglm"}, "chatglm_model_version", "chatglm2_6b", "glm_10b"),
        ({"model_type": "chatglm", "_name_or_path": "THUDM/chatglm3-6b"}, "chatglm_model_version", "chatglm3_6b_base", "chatglm2_6b"),
        ({"model_type": "chatglm", "padded_vocab_size": 151552}, "chatglm_model_version", "glm4", "chatglm3_6b"),
        ({"architectures": ["Glm4ForCausalLM"]}, "chatglm_model_version", "glm4", "chatglm3"),
        ({"architectures": ["GLMModel"]}, "chatglm_model_version", "glm_10b", "chatglm_6b"),
        ({"model_type": "gpt2"}, "gpt_model_version", "gpt2", "starcoder"),
        ({"model_type": "gpt_bigcode"}, "gpt_model_version", "starcoder", "gpt2"),
    ],
)
def test_version_options_are_checked(hf: dict, option: str, good: str, bad: str) -> None:
    row = resolve_architecture(hf)
    check_version(row, hf, option, good)
    with pytest.raises(ConfigError, match=f"{option}='{bad}'.*{option}="):
        check_version(row, hf, option, bad)


def test_a_version_of_another_family_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'v1_7b': LlamaForCausalLM does not have this option.*BaichuanForCausalLM"):
        check_version(resolve_architecture({"model_type": "llama"}), {}, "baichuan_model_version", "v1_7b")


def test_prefix_models_say_what_a_prompt_must_hold() -> None:
    config = resolve_architecture({"architectures": ["GLMModel"]}).read_config({})
    assert config.requires_whole_prompt and config.prefix is not None
    found = find_bidirectional_prefix(config.prefix, [5, 50263, 6, 50257])
    assert found == (3, 1)
    assert [found.position(i) for i in range(6)] == [0, 1, 2, 1, 1, 1]
    assert [found.block_position(i) for i in range(6)] == [0, 0, 0, 1, 2, 3]
    assert find_bidirectional_prefix(config.prefix, [5, 50260, 50263, 50257]) == (3, 1), "GLM: the first mask, of whatever kind"
    chatglm = resolve_architecture({"model_type": "chatglm", "inner_hidden_size": 9}).read_config({}).prefix
    assert chatglm is not None
    assert find_bidirectional_prefix(chatglm, [5, 150000, 150001, 150004]) == (3, 2), "ChatGLM: [gMASK] wherever it is"
    assert find_bidirectional_prefix(chatglm, [5, 150000, 6, 150004]) == (3, 1)
    for prompt in ([5, 50263], [5, 50257]):
        with pytest.raises(Exception, match="prompt"):
            find_bidirectional_prefix(config.prefix, prompt)


def test_the_page_matches_the_table() -> None:
    printed = runpy.run_path(str(SCRIPT))["markdown"]()
    assert (ROOT / "docs" / "architectures.md").read_text() == printed, "run: python scripts/architectures.py > docs/architectures.md"


def test_the_guide_quotes_the_source() -> None:
    guide = (ROOT / "docs" / "guides" / "architecture.md").read_text()
    source = (ARCHITECTURE_FILES / "olmo2.py").read_text()
    blocks = [block.split("\n```")[0] for block in guide.split("```python\n")[1:]]
    assert blocks, "the guide shows code"
    for block in blocks:
        for line in filter(str.strip, block.splitlines()):
            assert line in source or line in (ROOT / "tests" / "parity" / "cases.py").read_text(), line


# Other source files and folders that name an architecture, and why.
NAMED_ELSEWHERE = {
    # the names in checkpoints of TensorRT-LLM
    "builder/checkpoint/tensorrt_llm/families": ARCHITECTURES | {*FAMILIES},
    "models/architectures/chatglm.py": {"ChatGLM1Model"},  # the variant of ChatGLMModel
}


@pytest.mark.parametrize("row", all_architectures(), ids=lambda row: row.name)
def test_an_architecture_is_named_in_one_file(row: Architecture) -> None:
    """Adding an architecture touches one source file, as the guide says."""
    source = ROOT / "src" / "stoker"
    quoted = re.compile(rf"[\"']{row.name}[\"']")
    files = {str(file.relative_to(source)) for file in source.rglob("*.py") if quoted.search(file.read_text())}
    elsewhere = tuple(path for path, names in NAMED_ELSEWHERE.items() if row.name in names)
    files = {file for file in files if not file.startswith(elsewhere)}
    assert len(files) == 1, files
    assert Path(files.pop()).parent == Path("models/architectures")
