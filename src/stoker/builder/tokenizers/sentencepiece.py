"""Converts sentencepiece models to tokenizer.json, and compares the result with the sentencepiece library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN
from stoker.builder.tokenizers.check_splits import check_splits
from stoker.builder.tokenizers.merges import divisions

UNIGRAM, BPE = 1, 2  # TrainerSpec.model_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # ModelProto.SentencePiece.type
# Classes that put the begin token first unless tokenizer_config.json sets add_bos_token.
_BOS_BY_DEFAULT = (
    "LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "BaiChuanTokenizer", "BaichuanTokenizer", "InternLMTokenizer",
    "InternLM2Tokenizer", "InternLM3Tokenizer",
)  # fmt: skip


def convert_sentencepiece(file: Path, config: dict[str, Any]) -> Tokenizer | None:
    """The tokenizer of a sentencepiece file, or None when the file is of another kind. `config` is the content of tokenizer_config.json.

    Raises CheckpointError when the converted tokenizer splits the probe texts differently from the sentencepiece library.
    """
    proto = parse_model(file)
    if proto is None or not proto.pieces:
        return None
    if proto.trainer_spec.model_type not in _MODELS:
        raise CheckpointError(f"{file} is a word or character model.", cure="Name another tokenizer with --tokenizer.")
    added = _read_added_tokens(config, file)
    _check_piece_id(proto, "unk_id", file)
    _rename_pieces(proto, added)
    tokenizer = convert_model(proto)
    _compare_with_library(tokenizer, file)
    _append_added_tokens(tokenizer, added, file)
    tokenizer_class = str(config.get("tokenizer_class")).removesuffix("Fast")
    added_pieces = {"bos": config.get("add_bos_token", tokenizer_class in _BOS_BY_DEFAULT), "eos": config.get("add_eos_token", False)}
    ends = {name: _special_piece(proto, f"{name}_id", file) for name, is_added in added_pieces.items() if is_added}
    add_begin_and_end(tokenizer, ends.get("bos"), ends.get("eos"))
    return tokenizer


def parse_model(file: Path) -> Any:
    """The sentencepiece ModelProto in a file, or None when the file is of another kind, such as tiktoken."""
    from google.protobuf.message import DecodeError
    from transformers.utils import sentencepiece_model_pb2_new as schema

    try:
        return schema.ModelProto.FromString(file.read_bytes())  # type: ignore[attr-defined]
    except DecodeError:
        return None


def convert_model(proto: Any) -> Tokenizer:
    """The tokenizer of a ModelProto of kind UNIGRAM or BPE. It is not compared with the library."""
    tokens, scores = [piece.piece for piece in proto.pieces], [piece.score for piece in proto.pieces]
    tokenizer = Tokenizer(_MODELS[proto.trainer_spec.model_type](tokens, scores, proto.trainer_spec))
    use_space_symbol(tokenizer, prefix=proto.normalizer_spec.add_dummy_prefix)
    tokenizer.normalizer = normalizers.Sequence([*_normalizers(proto.normalizer_spec), tokenizer.normalizer])
    add_special_pieces(tokenizer, [(piece.piece, piece.type) for piece in proto.pieces])
    return tokenizer


def make_bpe(tokens: list[str], scores: list[float], unknown: str) -> models.BPE:
    """A sentencepiece BPE model. Characters that are not in the vocabulary are encoded as bytes."""
    vocab = {token: i for i, token in enumerate(tokens)}
    return models.BPE(vocab=vocab, merges=_derive_merges(vocab, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)


def use_space_symbol(tokenizer: Tokenizer, *, prefix: bool) -> None:
    """Represent spaces by ▁ inside the tokenizer. `prefix`: prepend a space when encoding, and remove it when decoding."""
    before = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    after = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *after])


def add_special_pieces(tokenizer: Tokenizer, pieces: list[tuple[str, int]]) -> None:
    """Make control pieces special tokens, and user-defined pieces tokens that are never split. `pieces`: (text, type) by id."""
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token, kind in pieces if kind == CONTROL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in pieces if kind == USER_DEFINED])


def add_begin_and_end(tokenizer: Tokenizer, begin: tuple[str, int] | None, end: tuple[str, int] | None) -> None:
    """Add a (token, id) before every text that is encoded, and one after it. None adds nothing."""
    tokens = [token for token in (begin, end) if token is not None]
    if not tokens:
        return
    before, after = (f"{begin[0]}:0 " if begin else ""), (f" {end[0]}:0" if end else "")
    single = f"{before}$A:0{after}"
    pair = f"{single} {single.replace('$A', '$B').replace(':0', ':1')}"
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=list(dict.fromkeys(tokens)))


def _derive_merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges of a sentencepiece BPE vocabulary, best score first, derived as Hugging Face's converter does.

    Every division of a piece into two other pieces is a merge.
    """
    ranked = [(-scores[vocab[piece]], vocab[left], vocab[right], (left, right)) for piece, left, right in divisions(vocab)]
    return [pair for *_, pair in sorted(ranked)]


def _make_bpe(tokens: list[str], scores: list[float], trainer: Any) -> models.BPE:
    """The BPE model of a sentencepiece vocabulary."""
    return make_bpe(tokens, scores, tokens[trainer.unk_id])


def _make_unigram(tokens: list[str], scores: list[float], trainer: Any) -> models.Unigram:
    """The unigram model of a sentencepiece vocabulary."""
    return models.Unigram(list(zip(tokens, scores, strict=True)), unk_id=trainer.unk_id, byte_fallback=trainer.byte_fallback)


_MODELS = {UNIGRAM: _make_unigram, BPE: _make_bpe}


def _normalizers(spec: Any) -> list[Any]:
    """The normalizers that a sentencepiece specification requires, besides the handling of spaces."""
    found: list[Any] = [normalizers.Precompiled(spec.precompiled_charsmap)] if spec.precompiled_charsmap else []
    if spec.remove_extra_whitespaces:
        found += [normalizers.Strip(left=True, right=True), normalizers.Replace(Regex(" {2,}"), " ")]
    return found


def _special_piece(proto: Any, name: str, file: Path) -> tuple[str, int]:
    """(text, id) of the piece in the field `name` of the trainer's specification. Raises CheckpointError if there is none."""
    _check_piece_id(proto, name, file)
    piece_id: int = getattr(proto.trainer_spec, name)
    return proto.pieces[piece_id].piece, piece_id


def _check_piece_id(proto: Any, name: str, file: Path) -> None:
    """Raise CheckpointError unless the field `name` of the trainer's specification is the id of a piece."""
    piece_id = getattr(proto.trainer_spec, name)
    if not 0 <= piece_id < len(proto.pieces):
        switch = {"bos_id": "add_bos_token", "eos_id": "add_eos_token"}.get(name)
        cure = f"Add a tokenizer.json, or set {switch} to false." if switch else DOWNLOAD_AGAIN
        raise CheckpointError(f"{file}: {name}={piece_id} is not the id of one of its {len(proto.pieces)} pieces.", cure=cure)


def _read_added_tokens(config: dict[str, Any], file: Path) -> dict[int, dict[str, Any]]:
    """The field added_tokens_decoder of tokenizer_config.json, by id. Raises CheckpointError for a token without content."""
    try:
        added = {int(i): token for i, token in (config.get("added_tokens_decoder") or {}).items()}
        if all(isinstance(token["content"], str) for token in added.values()):
            return added
        reason = "a content is not a string"
    except (TypeError, ValueError, AttributeError, KeyError) as problem:
        reason = f"{type(problem).__name__}: {problem}"
    raise CheckpointError(f"{file.parent}: tokenizer_config.json has a wrong added_tokens_decoder ({reason}).", cure="Download it again.")


def _rename_pieces(proto: Any, added: dict[int, dict[str, Any]]) -> None:
    """Rename reserved pieces as tokenizer_config.json specifies (InternLM 2: [UNUSED_TOKEN_145] becomes <|im_end|>)."""
    for i, token in added.items():
        if 0 <= i < len(proto.pieces):
            proto.pieces[i].piece = token["content"]


def _append_added_tokens(tokenizer: Tokenizer, tokens: dict[int, dict[str, Any]], file: Path) -> None:
    """Append the tokens that follow the sentencepiece vocabulary, in the order of ids. Raises CheckpointError for a gap."""
    for i, token in sorted(tokens.items()):
        if tokenizer.token_to_id(token["content"]) is None and i != tokenizer.get_vocab_size():
            ids = f"has id {i}, and {tokenizer.get_vocab_size()} is next"
            raise CheckpointError(f"{file}: added token {token['content']!r} {ids}.", cure="Add a tokenizer.json.")
        added = AddedToken(token["content"], normalized=bool(token.get("normalized")), special=bool(token.get("special")))
        (tokenizer.add_special_tokens if added.special else tokenizer.add_tokens)([added])


def _compare_with_library(tokenizer: Tokenizer, file: Path) -> None:
    """Raise CheckpointError unless the tokenizer splits the probe texts like the sentencepiece library."""
    from sentencepiece import SentencePieceProcessor

    check_splits(tokenizer, SentencePieceProcessor(model_file=str(file)).encode, file)
