"""GGUF files result in the tensors, config and tokenizer of the model that they were made from."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import gguf
import gguf_files
import pytest
import sentencepiece
import tiny
import tokenizers
import torch
from safetensors.torch import load_file
from tokenizers import models

from stoker.base.errors import CheckpointError
from stoker.builder.build import build
from stoker.builder.checkpoint import chunked_file as module
from stoker.builder.checkpoint.checkpoint import open_checkpoint
from stoker.builder.checkpoint.gguf.file import GGUFFile
from stoker.builder.checkpoint.gguf.weights import GGUFWeights
from stoker.builder.config import BuildConfig
from stoker.builder.prepare import prepare
from stoker.builder.tokenizers.gguf import convert_gguf_tokenizer
from stoker.builder.tokenizers.gguf_keys import REJECTED_UNLESS_EMPTY, check_tokenizer_keys
from stoker.builder.tokenizers.gguf_pre_tokenizers import PATTERNS, pre_tokenizer
from stoker.builder.tokenizers.probe_texts import PROBE_TEXTS
from stoker.builder.tokenizers.sentencepiece import convert_sentencepiece, parse_model

TEXTS = [*PROBE_TEXTS, "  two  spaces\tand\n\n\nlines ", "I'm we'LL 12345.678 x²", "<s>hello</s>"]


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_tensors_equal_those_of_the_model(tmp_path: Path, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 3000)
    made = tiny.model(arch)
    opened = open_checkpoint(gguf_files.write(tmp_path / "m.gguf", made))
    given = made.state_dict()
    assert set(opened.weights.tensors) == {gguf_files.gguf_name(name) for name in given}
    for name, tensor in given.items():
        assert torch.equal(opened.weights.read(gguf_files.gguf_name(name)), tensor), name
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads", "vocab_size", "rms_norm_eps"):
        assert opened.config[name] == getattr(made.config, name), name
    assert opened.config["dtype"] == "float32"


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_quantized_blocks_are_dequantized(tmp_path: Path, kind: str) -> None:
    made = tiny.model(hidden_size=64, intermediate_size=96, num_attention_heads=8)
    code = gguf.GGMLQuantizationType[kind]
    opened = open_checkpoint(gguf_files.write(tmp_path / "m.gguf", made, code))
    for name, tensor in made.state_dict().items():
        values = opened.weights.read(gguf_files.gguf_name(name))
        if tensor.ndim == 2:
            expected = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), code), code))
            assert torch.equal(values.float(), expected), name
            assert float((values.float() - tensor).abs().max()) < 0.08
    assert opened.config["dtype"] == ("float16" if kind == "F16" else "bfloat16")


def test_a_gguf_file_builds_the_engine_of_its_checkpoint(tmp_path: Path) -> None:
    made = tiny.model()
    source = tiny.save(made, tmp_path / "hf")
    engine = build(gguf_files.write(tmp_path / "m.gguf", made), tmp_path / "a", verify="full")
    reference = build(source, tmp_path / "b", verify="files")
    # The digests of the files differ, because each file names its engine.
    stored, expected = (load_file(built.path / "rank0.safetensors") for built in (engine, reference))
    assert stored.keys() == expected.keys() and all(torch.equal(stored[name], expected[name]) for name in expected)
    assert engine.config.checks["greedy"]["equal"] == 32
    settings = json.loads((engine.path / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"], settings["chat_template"]) == ("<s>", "</s>", tiny.CHAT)
    assert json.loads((engine.path / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": [2]}


def test_a_split_file_is_read_from_any_of_its_parts(tmp_path: Path) -> None:
    made = tiny.model()
    gguf_files.write(tmp_path / "m.gguf", made, max_tensors=12)
    parts = sorted(tmp_path.glob("m-*-of-*.gguf"))
    assert len(parts) > 2
    for source in (parts[0], parts[-1], tmp_path):
        weights = open_checkpoint(source).weights
        assert weights.files == parts
        for name, tensor in made.state_dict().items():
            assert torch.equal(weights.read(gguf_files.gguf_name(name)), tensor), name
    build(tmp_path, tmp_path / "engine", verify="files")
    whole = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(CheckpointError, match=r"00002-of-\d+\.gguf is not part 2 of"):
        open_checkpoint(parts[0])
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"is split into \d parts, and m-00002-of-\d+\.gguf is missing"):
        open_checkpoint(parts[0])
    parts[1].write_bytes(whole)
    parts[0].rename(tmp_path / "first.gguf")
    with pytest.raises(CheckpointError, match=r"is one of \d parts of a split file"):
        open_checkpoint(tmp_path / "first.gguf")
    with pytest.raises(CheckpointError, match=r"m-00001-of-\d+\.gguf is missing"):
        open_checkpoint(parts[2])


def test_named_chat_templates_are_a_list(tmp_path: Path) -> None:
    source = gguf_files.write(
        tmp_path / "m.gguf", tiny.model(), metadata={"tokenizer.chat_template.tool_use": "T", "tokenizer.chat_templates": ["tool_use"]}
    )
    _, settings = convert_gguf_tokenizer(GGUFWeights(source))
    assert settings["chat_template"] == [{"name": "default", "template": tiny.CHAT}, {"name": "tool_use", "template": "T"}]


def test_every_tokenizer_key_of_the_library_is_known(tmp_path: Path) -> None:
    """The keys of the gguf library are read or have no effect, except for the values that change a text before it is split."""
    file = GGUFFile(gguf_files.write(tmp_path / "m.gguf", tiny.model()))
    known = {key for name, key in vars(gguf.Keys.Tokenizer).items() if not name.startswith("__")}
    rejected = {f"tokenizer.{name}" for name in REJECTED_UNLESS_EMPTY}
    file.metadata |= dict.fromkeys(known - rejected, 1) | dict.fromkeys(rejected, False)
    check_tokenizer_keys(file)
    for key in rejected:
        file.metadata[key] = True
        with pytest.raises(CheckpointError, match=rf"{key} \(True\) is not supported"):
            check_tokenizer_keys(file)
        file.metadata[key] = []


def test_a_missing_head_means_tied_embeddings(tmp_path: Path) -> None:
    made = tiny.model(tie_word_embeddings=True)
    engine = build(gguf_files.write(tmp_path / "m.gguf", made), tmp_path / "engine", verify="full")
    assert engine.config.model.tie_head and engine.config.checks["greedy"]["equal"] == 32


def test_stored_frequency_divisors_are_llama_3_scaling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaling = {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    made = tiny.model(rope_parameters=scaling, tie_word_embeddings=True)
    plain = 1e4 ** -(torch.arange(0, 8, 2) / 8)
    divisors = plain / made.model.rotary_emb.inv_freq
    real = gguf.GGUFWriter.write_header_to_file
    monkeypatch.setattr(
        gguf.GGUFWriter, "write_header_to_file", lambda self: (self.add_tensor("rope_freqs.weight", divisors.numpy()), real(self))
    )
    engine = build(gguf_files.write(tmp_path / "m.gguf", made), tmp_path / "engine", verify="files")
    from stoker.layers.rope import rope_table

    rope = engine.config.model.layers[0].attention.rope
    angles = torch.arange(200.0)[:, None] * made.model.rotary_emb.inv_freq
    assert torch.allclose(rope_table(rope, 200, "cpu"), torch.cat((angles.cos(), angles.sin()), -1), atol=2e-5)


@pytest.mark.parametrize("pre", {patterns: name for name, patterns in reversed(PATTERNS.items())}.values())
def test_byte_level_tokenizers_split_like_the_original(tmp_path: Path, pre: str) -> None:
    core = tiny.byte_level()
    core.pre_tokenizer = pre_tokenizer(pre)
    if begins := pre in ("llama-bpe", "tekken"):
        core.model = models.BPE(**{k: [tuple(m) for m in v] if k == "merges" else v for k, v in bpe(core).items()}, ignore_merges=True)
    if pre == "qwen2":
        core.normalizer = tokenizers.normalizers.NFC()
    file = open_checkpoint(gguf_files.write(tmp_path / "m.gguf", tiny.model(), tokenizer=gguf_files.byte_level(core, pre))).gguf
    assert file is not None
    converted, settings = convert_gguf_tokenizer(file)
    assert settings["add_bos_token"] == begins
    for text in TEXTS:
        assert converted.encode(text, add_special_tokens=False).ids == core.encode(text, add_special_tokens=False).ids, text
        assert converted.decode(converted.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text
    assert (converted.encode("a").ids[0] == 1) == settings["add_bos_token"]


def bpe(core: tokenizers.Tokenizer) -> dict:
    model = json.loads(core.to_str())["model"]
    return {"vocab": model["vocab"], "merges": model["merges"]}


def test_smollm_splits_digits() -> None:
    parts = pre_tokenizer("smollm").pre_tokenize_str("ab 123")
    assert [text for text, _ in parts] == ["ab", "Ġ", "1", "2", "3"]


def test_split_patterns_match_the_published_tokenizers() -> None:
    """The patterns in tokenizer.json of Llama 3 and Qwen 2 differ in the length of digit groups."""
    for pre, digits in (("llama-bpe", ["123", "45"]), ("qwen2", ["1", "2", "3", "4", "5"])):
        parts = [text for text, _ in pre_tokenizer(pre).pre_tokenize_str("it's 12345\n\nx  y")]
        assert parts == ["it", "'s", "Ġ", *digits, "ĊĊ", "x", "Ġ", "Ġy"]


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small sentencepiece BPE model with byte fallback."""
    path = tmp_path_factory.mktemp("spm")
    (path / "text").write_text("\n".join([*PROBE_TEXTS, "the quick brown fox jumps over the lazy dog and runs"] * 8))
    sentencepiece.SentencePieceTrainer.train(
        input=str(path / "text"), model_prefix=str(path / "tokenizer"), vocab_size=tiny.VOCAB + 40, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2, hard_vocab_limit=False, num_threads=1,
    )  # fmt: skip
    return path / "tokenizer.model"


def test_a_sentencepiece_vocabulary_in_gguf_splits_like_the_library(tmp_path: Path, pieces: Path) -> None:
    original = sentencepiece.SentencePieceProcessor(model_file=str(pieces))
    count = original.vocab_size()
    kinds = [3 if original.is_control(i) else 2 if original.is_unknown(i) else 6 if original.is_byte(i) else 1 for i in range(count)]
    metadata = {
        "ggml.model": "llama", "ggml.tokens": [original.id_to_piece(i) for i in range(count)], "ggml.token_type": kinds,
        "ggml.scores": [original.get_score(i) for i in range(count)], "ggml.bos_token_id": 1, "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
    }  # fmt: skip
    made = tiny.model(vocab_size=count)
    file = open_checkpoint(gguf_files.write(tmp_path / "m.gguf", made, tokenizer=metadata)).gguf
    assert file is not None
    converted, settings = convert_gguf_tokenizer(file)
    assert settings["add_bos_token"] and converted.encode("fox").ids[0] == 1
    for text in TEXTS[:-1]:
        assert converted.encode(text, add_special_tokens=False).ids == original.encode(text), text
        assert converted.decode(original.encode(text)) == original.decode(original.encode(text)) == text


def added(ids: list[int], begins: bool, ends: bool) -> list[int]:
    return [*([1] if begins else []), *ids, *([2] if ends else [])]


@pytest.mark.parametrize(("begins", "ends"), [(True, True), (False, True), (False, False)])
def test_tokens_are_added_before_and_after_a_text_as_the_file_requires(tmp_path: Path, begins: bool, ends: bool) -> None:
    """llama.cpp appends eos to each text if add_eos_token is true, and so does the Hugging Face tokenizer with this setting."""
    core = tiny.byte_level()
    keys = gguf_files.byte_level(core) | {"ggml.add_bos_token": begins, "ggml.add_eos_token": ends, "ggml.eos_token_id": 2}
    file = open_checkpoint(gguf_files.write(tmp_path / "m.gguf", tiny.model(), tokenizer=keys)).gguf
    assert file is not None
    converted, settings = convert_gguf_tokenizer(file)
    plain = converted.encode("fox", add_special_tokens=False).ids
    assert converted.encode("fox").ids == added(plain, begins, ends) and settings["add_eos_token"] == ends
    assert converted.encode("fox", "dog").ids[-1:] == ([2] if ends else converted.encode("dog", add_special_tokens=False).ids[-1:])


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_a_token_that_must_be_added_must_exist(tmp_path: Path, name: str) -> None:
    keys = gguf_files.byte_level(tiny.byte_level()) | {f"ggml.add_{name}_token": True, f"ggml.{name}_token_id": 1 << 20}
    file = open_checkpoint(gguf_files.write(tmp_path / "m.gguf", tiny.model(), tokenizer=keys)).gguf
    assert file is not None
    with pytest.raises(CheckpointError, match=rf"add_{name}_token is true, and tokenizer\.ggml\.{name}_token_id=1048576 is no token"):
        convert_gguf_tokenizer(file)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"general.type": "adapter"}, "general.type='adapter' is not supported. Name the file with the language model"),
        ({"general.quantization_version": 1}, "general.quantization_version=1 is not supported. Only 2 is"),
        ({"xielu.beta": [0.5, 0.5]}, "the metadata xielu.beta is not supported"),
        ({"adapter.type": "lora"}, "the metadata adapter.type is not supported"),
    ],
)
def test_keys_outside_the_architecture_that_change_a_model_are_refused(tmp_path: Path, metadata: dict, reason: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(reason)):
        open_checkpoint(gguf_files.write(tmp_path / "m.gguf", tiny.model(), metadata=metadata))


def test_directories_with_a_sentencepiece_model_are_converted(tmp_path: Path, pieces: Path) -> None:
    original = sentencepiece.SentencePieceProcessor(model_file=str(pieces))
    source = tiny.save(tiny.model(vocab_size=original.vocab_size()), tmp_path / "hf")
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.model").write_bytes(pieces.read_bytes())
    (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", "legacy": True}))
    engine = build(source, tmp_path / "engine", verify="files")
    converted = tokenizers.Tokenizer.from_file(str(engine.path / "tokenizer.json"))
    for text in PROBE_TEXTS:
        assert converted.encode(text, add_special_tokens=False).ids == original.encode(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ggml.pre": "deepseek-v9"}, "pre-tokenizer 'deepseek-v9' is not known.*smollm"),
        ({"ggml.model": "bert"}, "a tokenizer of kind 'bert'"),
        (
            {"ggml.tokens": ["a", "a", "b", "ab"], "ggml.merges": ["a b"], "ggml.token_type": [1, 1, 1, 1]},
            "4 tokens, of which 3",
        ),
    ],
)
def test_unsupported_tokenizers_are_refused(tmp_path: Path, change: dict, message: str) -> None:
    metadata = gguf_files.byte_level(tiny.byte_level()) | change
    source = gguf_files.write(tmp_path / "m.gguf", tiny.model(), tokenizer=metadata)
    with pytest.raises(CheckpointError, match=message):
        build(source, tmp_path / "engine")


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    whole = gguf_files.write(tmp_path / "m.gguf", tiny.model()).read_bytes()
    for cut in (0, 3, 20, 200, 5000, len(whole) // 2, len(whole) - 1000):
        (tmp_path / "cut.gguf").write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            build(tmp_path / "cut.gguf", tmp_path / "engine")
    (tmp_path / "other.gguf").write_bytes(whole.replace(b"llama", b"rwkv6"))
    with pytest.raises(CheckpointError, match="architecture 'rwkv6' is not supported"):
        build(tmp_path / "other.gguf", tmp_path / "engine")
    with pytest.raises(CheckpointError, match=r"several GGUF files: cut\.gguf, m\.gguf, other\.gguf"):
        build(tmp_path, tmp_path / "engine")


def test_the_number_of_key_heads_defaults_to_the_number_of_heads(tmp_path: Path) -> None:
    made = tiny.model(num_key_value_heads=6)
    source = gguf_files.write(tmp_path / "m.gguf", made, metadata={"llama.attention.head_count_kv": None})
    assert torch.equal(GGUFWeights(source).read("blk.0.attn_k.weight"), made.model.layers[0].self_attn.k_proj.weight)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": 7}, "the metadata general.architecture=7 is not str"),
        ({"llama.block_count": "x"}, "llama.block_count=x is not int"),
        ({"llama.attention.head_count": [6, 6, 6]}, "num_attention_heads=.6, 6, 6. is refused"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count=4 is not supported.*Only 8 is"),
        ({"llama.attention.value_length": 16}, "attention.value_length=16 is not supported"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 2.0}, "rope.scaling.attn_factor=2.0 is not supported"),
        ({"llama.attention.temperature_scale": 0.5}, "the metadata llama.attention.temperature_scale is not supported"),
        ({"llama.expert_count": "x"}, "llama.expert_count=x is not int"),
        ({"llama.attention.causal": False}, "attention.causal=False is not supported"),
        ({"llama.context_length": None}, "lacks llama.context_length"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "lacks llama.attention.layer_norm_rms_epsilon"),
        ({"split.count": 3}, "is one of 3 parts"),
        ({"llama.rope.scaling.type": 1}, "rope.scaling.type=1 is not str"),
        ({"tokenizer.ggml.tokens": "x"}, "tokenizer.ggml.tokens=x is not an array of str"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "is not an array of str"),
        ({"tokenizer.ggml.merges": ["ab"]}, "tokens and merges do not form a tokenizer"),
        ({"tokenizer.ggml.merges": ["a zzz"]}, "tokens and merges do not form a tokenizer"),
        ({"tokenizer.ggml.token_type": 1}, "token_type=1 is not an array of int"),
        ({"tokenizer.ggml.bos_token_id": "x"}, "bos_token_id=x is not int"),
        ({"tokenizer.ggml.model": [1]}, "tokenizer.ggml.model=.1. is not str"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.5]}, "unknown_token_id=0 and 1 scores do not fit 291 tokens"),
        ({"tokenizer.ggml.precompiled_charsmap": [1, 2]}, r"precompiled_charsmap \(2 elements\) is not supported.*--tokenizer"),
        ({"tokenizer.ggml.remove_extra_whitespaces": True}, r"remove_extra_whitespaces \(True\) is not supported"),
        ({"tokenizer.ggml.new_option": 1}, r"tokenizer\.ggml\.new_option \(1\) is not supported"),
        (
            {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a", "b" * 4097], "tokenizer.ggml.token_type": [1, 1]},
            "a token of the vocabulary has 4097 characters",
        ),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.unknown_token_id": 999}, "unknown_token_id=999 and 291 scores do not fit"),
    ],
)
def test_inconsistent_metadata_is_refused_by_name(tmp_path: Path, metadata: dict, message: str) -> None:
    source = gguf_files.write(tmp_path / "m.gguf", tiny.model(), metadata=metadata)
    with pytest.raises(CheckpointError, match=message):
        build(source, tmp_path / "engine", BuildConfig(device="cpu"), verify="none")


def test_the_position_scale_of_older_files_is_applied(tmp_path: Path) -> None:
    source = gguf_files.write(tmp_path / "m.gguf", tiny.model(), metadata={"llama.rope.scale_linear": 4.0})
    rope = prepare(source, BuildConfig(device="cpu")).config.model.layers[0].attention.rope
    assert rope is not None and (rope.scaling, rope.factor) == ("linear", 4.0)


def test_oversized_counts_and_offsets_raise_only_checkpoint_errors(tmp_path: Path) -> None:
    """Counts, lengths and offsets in the header are replaced by very large numbers."""
    whole = gguf_files.write(tmp_path / "m.gguf", tiny.model()).read_bytes()
    for at in (8, 16, 24, *range(32, 4096, 61)):
        for value in (2**31, 2**63, 2**64 - 1):
            (tmp_path / "x.gguf").write_bytes(whole[:at] + value.to_bytes(8, "little") + whole[at + 8 :])
            with contextlib.suppress(CheckpointError):
                prepare(tmp_path / "x.gguf", BuildConfig(device="cpu"))


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ({"tokenizer_class": "LlamaTokenizer"}, {"bos_id": -1}, r"bos_id=-1 is not the id of one of its \d+ pieces.*add_bos_token"),
        ({"add_bos_token": True}, {"bos_id": 9999}, "bos_id=9999 is not the id of one of its"),
        ({}, {"unk_id": 9999}, "unk_id=9999 is not the id of one of its"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, {}, r"wrong added_tokens_decoder \(ValueError"),
        ({"added_tokens_decoder": {"3": "a"}}, {}, r"wrong added_tokens_decoder \(TypeError"),
        ({"added_tokens_decoder": {"3": {"content": 7}}}, {}, "a content is not a string"),
        ({"added_tokens_decoder": [1]}, {}, r"wrong added_tokens_decoder \(AttributeError"),
    ],
)
def test_inconsistent_sentencepiece_files_are_refused(tmp_path: Path, pieces: Path, config: dict, change: dict, message: str) -> None:
    proto = parse_model(pieces)
    for name, value in change.items():
        setattr(proto.trainer_spec, name, value)
    (tmp_path / "tokenizer.model").write_bytes(proto.SerializeToString())
    with pytest.raises(CheckpointError, match=message):
        convert_sentencepiece(tmp_path / "tokenizer.model", config)
