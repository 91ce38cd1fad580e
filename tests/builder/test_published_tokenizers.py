"""Converted tokenizers of publishers' own classes are compared with tiktoken and sentencepiece, on small trained vocabularies."""

from __future__ import annotations

import base64
import io
import json
import random
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.checkpoint import open_checkpoint
from stoker.builder.tokenizers.chatglm_6b import MAX_SPACES
from stoker.builder.tokenizers.merges import divisions
from stoker.builder.tokenizers.probe_texts import PROBE_TEXTS
from stoker.builder.tokenizers.split_patterns import ONE_DIGIT, THREE_DIGITS
from stoker.builder.tokenizers.tiktoken import read_ranks
from stoker.builder.tokenizers.tokenizer_files import write_tokenizer
from stoker.frontend.tokenizer import Tokenizer as Served

CORPUS = [*PROBE_TEXTS, "the quick brown fox jumps over the lazy dog 1234 5678", "return self.value\n        if x:\n\treturn 3"] * 3
TEXTS = (
    *PROBE_TEXTS, "the fox", "\n\nthe\tfox  jumps\n", "  two blanks first", " " * 83 + "x", "a" * 30, "12345 it's IT'S", "e\u0301 ﬁ Å",
    "sophisticated developers", "ends in a line\n",
)  # fmt: skip


def write_ranks(file: Path) -> dict[bytes, int]:
    """Write a tiktoken vocabulary with merges trained on CORPUS. Returns its ranks."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    # GPT-2's alphabet: bytes that are not printable are mapped to U+0100 and up.
    spelled = {chr(b): b for b in (*range(33, 127), *range(161, 173), *range(174, 256))}
    spelled |= {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in spelled.values())}
    merges = [tuple(pair) for pair in json.loads(core.to_str())["model"]["merges"]]
    tokens = [bytes([b]) for b in range(256)] + [bytes(spelled[c] for c in left + right) for left, right in merges]
    ranks = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    file.write_bytes(b"\n".join(base64.b64encode(token) + f" {rank}".encode() for token, rank in ranks.items()) + b"\n")
    return ranks


_PLAIN = {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"}


def train_pieces(kind: str, **settings: object) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3), model_writer=model, model_type=kind, vocab_size=460, minloglevel=2, num_threads=1,
        hard_vocab_limit=False, **settings,
    )  # fmt: skip
    return model.getvalue()


def checkpoint(path: Path, tokenizer_class: str, **fields: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 40000}))
    auto = {"AutoTokenizer": ["tokenization_own.X", None]}
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class, "auto_map": auto} | fields))
    (path / "tokenization_own.py").write_text("raise SystemExit('this code must not run')\n")
    return path


def written(source: Path, out: Path) -> Served:
    """The tokenizer as the frontend loads it from an engine."""
    out.mkdir(exist_ok=True)
    write_tokenizer(open_checkpoint(source, weights=False), None, out, trust_remote_code=False)
    return Served.load(out)


def agree(served: Served, encode: Callable[[str], list[int]], before: tuple[int, ...] = (), after: tuple[int, ...] = ()) -> None:
    generator = random.Random(0)
    alphabet = "".join(PROBE_TEXTS) + "\n\t  "
    made = ["".join(generator.choices(alphabet, k=generator.randrange(1, 60))) for _ in range(60)]
    for text in (*TEXTS, *made):
        assert served.encode(text) == [*before, *encode(text), *after], text


def test_qwen(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "qwen", "QWenTokenizer")
    ranks = write_ranks(source / "qwen.tiktoken")
    served = written(source, tmp_path / "out")
    original = tiktoken.Encoding("q", pat_str=ONE_DIGIT, mergeable_ranks=ranks, special_tokens={})

    agree(served, lambda text: original.encode_ordinary(unicodedata.normalize("NFC", text)))
    first = len(ranks)
    found = served.encode("<|im_start|>user<|extra_204|>")
    assert (found[0], found[-1]) == (first + 1, first + 207)
    assert served.decode(served.encode("naïve 👩‍👩‍👧\n"), skip_special_tokens=False) == "naïve 👩‍👩‍👧\n"
    assert tuple(served.end_ids) == (first,) and served.chat_template is None
    (source / "generation_config.json").write_text('{"chat_format": "chatml", "eos_token_id": 9}')
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<|endoftext|>"
    written(source, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<|im_end|>" and "<|im_start|>assistant" in config["chat_template"]


@pytest.mark.parametrize("name", ["ChatGLM4Tokenizer", "ChatGLMTokenizer"])
def test_glm4(tmp_path: Path, name: str) -> None:
    source = checkpoint(tmp_path / "glm4", name)
    ranks = write_ranks(source / "tokenizer.model")
    served = written(source, tmp_path / "out")
    original = tiktoken.Encoding("g", pat_str=THREE_DIGITS, mergeable_ranks=ranks, special_tokens={})
    first = len(ranks)
    agree(served, original.encode_ordinary, before=(first + 2, first + 4))
    assert served.encode("<|user|><|end_of_video|>", add_special_tokens=False) == [first + 7, first + 13]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("is_complete", [False, True], ids=["first release", "complete"])
def test_chatglm_6b(tmp_path: Path, kind: str, is_complete: bool) -> None:
    """The file of the first release lacks the pieces that its code appends, and text ids begin after the image ids."""
    blanks = [f"<|blank_{i}|>" for i in range(2, MAX_SPACES + 1)]
    more = {"byte_fallback": True, "control_symbols": ["[MASK]", "[gMASK]", "<sop>", "<eop>"]} if is_complete else {}
    data = train_pieces(kind, user_defined_symbols=["<n>", *(["<|tab|>", *blanks] if is_complete else [])], **more)
    fields = {"num_image_tokens": 0} if is_complete else {}
    source = checkpoint(tmp_path / "chatglm", "ChatGLMTokenizer", **fields)
    (source / "ice_text.model").write_bytes(data)
    served = written(source, tmp_path / "out")

    original, shift = (
        sentencepiece.SentencePieceProcessor(model_proto=data if is_complete else appended(data, blanks)),
        0 if is_complete else 20000,
    )

    def encode(text: str) -> list[int]:
        text = text.replace("\n", "<n>").replace("\t", "<|tab|>")
        for i in range(MAX_SPACES, 1, -1):
            text = text.replace(" " * i, f"<|blank_{i}|>")
        return [shift + i for i in original.encode(text)]

    ends = tuple(shift + original.piece_to_id(name) for name in ("[gMASK]", "<sop>"))
    agree(served, encode, after=ends)
    for text in (*PROBE_TEXTS, "def f():\n\treturn  3\n", "a" + " " * 83 + "b"):
        assert served.decode(served.encode(text, add_special_tokens=False)) == text


def appended(data: bytes, blanks: list[str]) -> bytes:
    """The pieces that SPTokenizer._configure_tokenizer of the published code appends."""
    from transformers.utils import sentencepiece_model_pb2_new as schema

    proto = schema.ModelProto.FromString(data)
    for name in ("[MASK]", "[gMASK]", "[sMASK]", "<unused_0>", "<sop>", "<eop>", "<ENC>", "<dBLOCK>"):
        proto.pieces.add(piece=name, score=0.0, type=3)
    for name in ("<|tab|>", *blanks):
        proto.pieces.add(piece=name, score=0.0, type=4)
    for i in range(256):
        proto.pieces.add(piece=f"<0x{i:02X}>", score=0.0, type=6)
    proto.trainer_spec.byte_fallback = True
    return bytes(proto.SerializeToString())


def test_chatglm_2_and_3(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "chatglm3", "ChatGLMTokenizer", added_tokens_decoder={"464": {"content": "<|user|>", "special": True}})
    data = train_pieces("bpe", byte_fallback=True, **_PLAIN)
    (source / "tokenizer.model").write_bytes(data)
    served = written(source, tmp_path / "out")
    original = sentencepiece.SentencePieceProcessor(model_proto=data)
    first = original.vocab_size()
    agree(served, original.encode, before=(first + 1, first + 3))
    start = served.encode("[gMASK]sop<|user|>", add_special_tokens=False)
    assert start == [first + 1, first + 3, first + 6]
    assert served.decode(served.encode(PROBE_TEXTS[1], add_special_tokens=False)) == PROBE_TEXTS[1]


@pytest.mark.parametrize(("name", "begins"), [("BaichuanTokenizer", True), ("InternLMTokenizer", True), ("SomeTokenizer", False)])
def test_baichuan_and_internlm(tmp_path: Path, name: str, begins: bool) -> None:
    """Python classes for a plain sentencepiece file. Whether the begin token is added is a default of their code."""
    data = train_pieces("bpe", byte_fallback=True, **_PLAIN)
    source = checkpoint(tmp_path / "plain", name)
    (source / "tokenizer.model").write_bytes(data)
    original = sentencepiece.SentencePieceProcessor(model_proto=data)
    agree(written(source, tmp_path / "out"), original.encode, before=(1,) if begins else ())
    checkpoint(source, name, add_bos_token=not begins)
    agree(written(source, tmp_path / "out"), original.encode, before=() if begins else (1,))
    checkpoint(source, name, add_bos_token=False, add_eos_token=True)
    agree(written(source, tmp_path / "out"), original.encode, after=(2,))


def test_internlm_2_renames_reserved_pieces(tmp_path: Path) -> None:
    data = train_pieces("bpe", byte_fallback=True, user_defined_symbols=["[UNUSED_TOKEN_145]", "[UNUSED_TOKEN_146]"], **_PLAIN)
    original = sentencepiece.SentencePieceProcessor(model_proto=data)
    found = original.piece_to_id("[UNUSED_TOKEN_145]")
    later = {str(found): {"content": "<|im_end|>", "special": True}}
    source = checkpoint(tmp_path / "internlm2", "InternLM2Tokenizer", added_tokens_decoder=later)
    (source / "tokenizer.model").write_bytes(data)
    served = written(source, tmp_path / "out")
    assert served.encode("fox<|im_end|>")[-1] == found and served.vocab_size == original.vocab_size()


def test_glm_10b(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "glm", "GLMGPT2Tokenizer")
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    core.model.save(str(source))
    size = core.get_vocab_size()
    names = ["<|endoftext|>", "<|startofpiece|>", "<|endofpiece|>", "[CLS]", "[MASK]", "[SEP]", "[gMASK]", "[sMASK]"]
    added = {name: size + i for i, name in enumerate(names)}
    (source / "added_tokens.json").write_text(json.dumps(added))
    served = written(source, tmp_path / "out")
    agree(served, lambda text: core.encode(text).ids, before=(size + 3,), after=(size, size + 1))
    assert served.encode("the [MASK]", add_special_tokens=False)[-1] == added["[MASK]"]
    (source / "added_tokens.json").write_text(json.dumps(added | {"[sMASK]": size + 20}))
    with pytest.raises(CheckpointError, match=r"'\[sMASK\]' cannot have id"):
        written(source, tmp_path / "out")
    (source / "added_tokens.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no vocab.json and merges.txt and added_tokens.json, which GLMGPT2Tokenizer needs"):
        written(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("QWenTokenizer", "has no qwen.tiktoken, which QWenTokenizer needs"),
        ("ChatGLMTokenizer", "has no ice_text.model or tokenizer.model, which"),
        ("ChatGLM4Tokenizer", "has no tokenizer.model"),
        ("SomebodysTokenizer", "the tokenizer SomebodysTokenizer is Python code in the checkpoint.*--trust-remote-code"),
    ],
)
def test_a_missing_file_is_named_and_no_code_runs(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        written(checkpoint(tmp_path / "model", name), tmp_path / "out")
    assert not (tmp_path / "out" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [*lines[:3], b"@@@ 3", *lines[4:]], "line 4: not a token in base64"),
        (lambda lines: [*lines[:3], b"AA==", *lines[4:]], "line 4: not a token"),
        (lambda lines: lines[:-2] + lines[-1:], "are not 0 to"),
        (lambda lines: [re.sub(rb"^\S+", b"cXE=", lines[0]), *lines[1:]], "no token for byte 0x00"),
    ],
)
def test_damaged_ranks_are_refused(tmp_path: Path, change: Callable[[list[bytes]], list[bytes]], message: str) -> None:
    file = tmp_path / "qwen.tiktoken"
    write_ranks(file)
    file.write_bytes(b"\n".join(change(file.read_bytes().splitlines())))
    with pytest.raises(CheckpointError, match=message):
        read_ranks(file)


def test_merges_are_all_divisions_into_two_tokens() -> None:
    random_words = random.Random(5)
    tokens = ["a", "b", *("".join(random_words.choices("ab", k=random_words.randint(2, 9))) for _ in range(300))]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    expected = [
        (token, token[:cut], token[cut:])
        for token in vocabulary
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    assert list(divisions(vocabulary)) == expected


def test_the_time_of_merges_is_bounded() -> None:
    """One long token costs little; many of different lengths are refused before any is compared."""
    rest = "b" * 4000
    assert list(divisions({"a": 0, rest: 1, "a" + rest: 2})) == [("a" + rest, "a", rest)]
    hostile = {letter * size: 0 for size in range(1, 4097) for letter in "abcd"}
    with pytest.raises(CheckpointError, match=r"16384 tokens of the vocabulary are too long \(at most 4096 characters"):
        next(divisions(hostile))
    with pytest.raises(CheckpointError, match="a token of the vocabulary has 5000 characters"):
        next(divisions({b"x" * 5000: 0}))
