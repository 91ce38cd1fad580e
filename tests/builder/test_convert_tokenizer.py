"""Tokenizer files of a checkpoint: chat templates in every supported place, special tokens in every form, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import tokenizers
from tokenizers import models, pre_tokenizers

from stoker.base.errors import CheckpointError
from stoker.builder.build import build
from stoker.builder.checkpoint.checkpoint import open_checkpoint
from stoker.builder.config import BuildConfig
from stoker.builder.tokenizers.tokenizer_files import write_tokenizer


@pytest.fixture
def source(tmp_path: Path, llama: Path) -> Path:
    path = tmp_path / "checkpoint"
    path.mkdir()
    for file in llama.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def written(source: Path, out: Path, directory: str | None = None) -> dict:
    """The tokenizer_config.json that the build writes."""
    out.mkdir(exist_ok=True)
    write_tokenizer(open_checkpoint(source), directory, out, trust_remote_code=False)
    assert tokenizers.Tokenizer.from_file(str(out / "tokenizer.json")).get_vocab_size() > 0
    return json.loads((out / "tokenizer_config.json").read_text())


def configure(source: Path, **fields: object) -> None:
    (source / "tokenizer_config.json").write_text(json.dumps(fields))


def test_special_tokens_become_strings(source: Path, tmp_path: Path) -> None:
    found = written(source, tmp_path / "out")
    assert (found["bos_token"], found["eos_token"], found["chat_template"]) == ("<s>", "</s>", tiny.CHAT)
    configure(source, eos_token="</s>")
    (source / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "other", "pad_token": "<unk>"})
    )
    found = written(source, tmp_path / "out")
    assert (found["bos_token"], found["eos_token"], found["pad_token"]) == ("<s>", "</s>", "<unk>")


def test_chat_templates_are_found_in_every_place(source: Path, tmp_path: Path) -> None:
    several = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    configure(source, chat_template=several)
    assert written(source, tmp_path / "out")["chat_template"] == several
    configure(source, chat_template={"default": "a", "tool_use": "b"})
    assert written(source, tmp_path / "out")["chat_template"] == several
    (source / "chat_template.json").write_text('{"chat_template": "c"}')
    assert written(source, tmp_path / "out")["chat_template"] == "c"
    (source / "chat_template.jinja").write_text("d {{ 'é' }}", encoding="utf-8")
    assert written(source, tmp_path / "out")["chat_template"] == "d {{ 'é' }}"
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "rag.jinja").write_text("e")
    names = {row["name"]: row["template"] for row in written(source, tmp_path / "out")["chat_template"]}
    assert names == {"default": "d {{ 'é' }}", "rag": "e"}


def test_a_tokenizer_from_another_directory(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (source / "tokenizer.json").rename(other / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"has no tokenizer: neither tokenizer\.json nor tokenizer\.model.*--tokenizer"):
        build(source, tmp_path / "engine")
    engine = build(source, tmp_path / "engine", BuildConfig(tokenizer=str(other)), verify="files")
    assert (engine.path / "tokenizer.json").is_file()


def test_vocabulary_and_merges_are_converted(source: Path, tmp_path: Path) -> None:
    core = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    model = json.loads(core.to_str())["model"]
    (source / "tokenizer.json").unlink()
    (source / "vocab.json").write_text(json.dumps(model["vocab"]))
    (source / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]) + "\n")
    configure(source, tokenizer_class="GPT2Tokenizer", unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    written(source, tmp_path / "out")
    converted = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    for text in ("the quick brown fox", "naïve 你好\n"):
        assert converted.encode(text, add_special_tokens=False).ids == core.encode(text, add_special_tokens=False).ids


def test_tokenizers_that_do_not_fit_the_model_are_refused(source: Path, tmp_path: Path) -> None:
    (source / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a tokenizer"):
        build(source, tmp_path / "engine")
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(models.BPE({symbol: i + 400 for i, symbol in enumerate(symbols)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.save(str(source / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="the tokenizer has ids up to 655, and the model 320 embeddings"):
        build(source, tmp_path / "engine")
    lossy = tiny.byte_level()
    lossy.normalizer = tokenizers.normalizers.Lowercase()
    lossy.save(str(source / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"the tokenizer turns 'Hello world!.*into 'hello world!"):
        build(source, tmp_path / "engine")


def test_a_template_that_is_not_utf8_is_refused(source: Path, tmp_path: Path) -> None:
    (source / "chat_template.jinja").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja is not UTF-8"):
        build(source, tmp_path / "engine")
