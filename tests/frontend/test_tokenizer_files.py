"""Loading the tokenizer files of an engine, and the errors for damaged files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_tokenizers import small

from stoker.base.errors import EngineError, RequestError
from stoker.frontend.tokenizer import Tokenizer


def write(path: Path, **files: object) -> Path:
    small("byte_level").save(str(path / "tokenizer.json"))
    for name, value in files.items():
        (path / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_special_ids_and_every_end_id(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None, "chat_template": "{{ bos_token }}"}
    tokenizer = Tokenizer.load(write(tmp_path, tokenizer_config=config, generation_config={"eos_token_id": [3, 7], "pad_token_id": 5}))
    assert (tokenizer.bos_id, tokenizer.pad_id, tokenizer.end_ids) == (1, 5, (3, 7, 2))
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.chat_template == "{{ bos_token }}"


def test_template_file_and_named_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    write(tmp_path, tokenizer_config={"chat_template": named})
    assert Tokenizer.load(tmp_path).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert Tokenizer.load(tmp_path).chat_template == "J"


def test_add_special_tokens_is_honoured(tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode("stop words", add_special_tokens=False)
    assert tokenizer.encode("stop words") == [1, *plain]
    assert tokenizer.decode([1, *plain]) == "stop words"
    assert tokenizer.decode([1, *plain], skip_special_tokens=False) == "<s>stop words"


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_config", "generation_config"])
def test_damaged_files_are_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(EngineError, match=f"{name}.json"):
        Tokenizer.load(write(tmp_path, **{name: "{"}))


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)


def test_wrong_end_id_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="eos_token_id"):
        Tokenizer.load(write(tmp_path, generation_config={"eos_token_id": ["x"]}))


def test_a_text_that_is_too_long_is_refused_without_tokenizing(tokenizer: Tokenizer) -> None:
    longest = tokenizer.max_token_chars
    tokenizer.check_length("x" * (10 * longest), 10)
    with pytest.raises(RequestError, match=f"{10 * longest + 1} characters, and the limit is 10 tokens of at most {longest}"):
        tokenizer.check_length("x" * (10 * longest + 1), 10)


def test_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer.encode("a\ud800b")


def test_ids_outside_the_vocabulary_make_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("fox", add_special_tokens=False)
    assert tokenizer.decode([*ids, 10**6, 2**40, -1]) == "fox"
