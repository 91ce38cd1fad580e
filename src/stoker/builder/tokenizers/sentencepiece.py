"""Sentencepiece models as tokenizer.json, checked against the sentencepiece library itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.weights import FETCH
from stoker.builder.tokenizers.probe_texts import PROBES

UNIGRAM, BPE = 1, 2  # TrainerSpec.model_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # ModelProto.SentencePiece.type
# Classes whose tokenizer puts the begin token first unless tokenizer_config.json says otherwise.
BEGIN_BY_DEFAULT = (
    "LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "BaiChuanTokenizer", "BaichuanTokenizer", "InternLMTokenizer",
    "InternLM2Tokenizer", "InternLM3Tokenizer",
)  # fmt: skip


def from_sentencepiece(file: Path, config: dict[str, Any]) -> Tokenizer | None:
    """The tokenizer of a sentencepiece file and its tokenizer_config.json; None when the file is of another kind.

    Raises CheckpointError when the result splits the probes otherwise than the sentencepiece library.
    """
    proto = parse(file)
    if proto is None or not proto.pieces:
        return None
    if proto.trainer_spec.model_type not in _MODELS:
        raise CheckpointError(f"{file} is a word or character model.", cure="Name another tokenizer with --tokenizer.")
    added, first = _added_tokens(config, file), proto.trainer_spec.bos_id
    _check_id(proto, "unk_id", file)
    _rename(proto, added)
    tokenizer = convert(proto)
    _check(tokenizer, file)
    _add_later_tokens(tokenizer, added, file)
    if config.get("add_bos_token", str(config.get("tokenizer_class")).removesuffix("Fast") in BEGIN_BY_DEFAULT):
        _check_id(proto, "bos_id", file)
        begin(tokenizer, proto.pieces[first].piece, first)
    return tokenizer


def _check_id(proto: Any, name: str, file: Path) -> None:
    found = getattr(proto.trainer_spec, name)
    if not 0 <= found < len(proto.pieces):
        message = f"{file}: {name}={found} is none of its {len(proto.pieces)} pieces"
        raise CheckpointError(f"{message}.", cure="Add a tokenizer.json, or set add_bos_token to false." if name == "bos_id" else FETCH)


def _added_tokens(config: dict[str, Any], file: Path) -> dict[int, dict[str, Any]]:
    """tokenizer_config.json's added_tokens_decoder by id. Raises CheckpointError unless each has its content."""
    try:
        added = {int(i): token for i, token in (config.get("added_tokens_decoder") or {}).items()}
        if all(isinstance(token["content"], str) for token in added.values()):
            return added
        what = "a content is no text"
    except (TypeError, ValueError, AttributeError, KeyError) as problem:
        what = f"{type(problem).__name__}: {problem}"
    raise CheckpointError(f"{file.parent}: tokenizer_config.json has a wrong added_tokens_decoder ({what}).", cure="Download it again.")


def convert(proto: Any) -> Tokenizer:
    """The tokenizer of a ModelProto of kind UNIGRAM or BPE, unchecked."""
    tokens, scores = [piece.piece for piece in proto.pieces], [piece.score for piece in proto.pieces]
    tokenizer = Tokenizer(_MODELS[proto.trainer_spec.model_type](tokens, scores, proto.trainer_spec))
    spaces(tokenizer, prefix=proto.normalizer_spec.add_dummy_prefix)
    tokenizer.normalizer = normalizers.Sequence([*_normalizers(proto.normalizer_spec), tokenizer.normalizer])
    add_tokens(tokenizer, [(piece.piece, piece.type) for piece in proto.pieces])
    return tokenizer


def bpe_merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Merges of a sentencepiece BPE vocabulary: every split of a piece into two, best score first, as Hugging Face's converter does."""
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for piece, i in vocab.items():
        for cut in range(1, len(piece)):
            left, right = vocab.get(piece[:cut]), vocab.get(piece[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[i], left, right, (piece[:cut], piece[cut:])))
    return [pair for *_, pair in sorted(ranked)]


def bpe(tokens: list[str], scores: list[float], unknown: str) -> models.BPE:
    """A sentencepiece BPE model; characters outside the vocabulary become bytes."""
    vocab = {token: i for i, token in enumerate(tokens)}
    return models.BPE(vocab=vocab, merges=bpe_merges(vocab, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)


def spaces(tokenizer: Tokenizer, *, prefix: bool) -> None:
    """Spaces are ▁ inside; `prefix`: text begins with one that decoding takes away."""
    before = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    after = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *after])


def add_tokens(tokenizer: Tokenizer, pieces: list[tuple[str, int]]) -> None:
    """Control pieces are special tokens; user-defined ones are taken whole wherever they stand."""
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token, kind in pieces if kind == CONTROL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in pieces if kind == USER_DEFINED])


def begin(tokenizer: Tokenizer, token: str, token_id: int) -> None:
    """Put the begin token before every text."""
    template = processors.TemplateProcessing(
        single=f"{token}:0 $A:0", pair=f"{token}:0 $A:0 {token}:1 $B:1", special_tokens=[(token, token_id)]
    )
    tokenizer.post_processor = template


def parse(file: Path) -> Any:
    """The ModelProto of a file, or None when it is of another kind."""
    from google.protobuf.message import DecodeError
    from transformers.utils import sentencepiece_model_pb2_new as schema

    try:
        return schema.ModelProto.FromString(file.read_bytes())  # type: ignore[attr-defined]
    except DecodeError:  # the name is also given to tiktoken files
        return None


def _bpe(tokens: list[str], scores: list[float], trainer: Any) -> models.BPE:
    return bpe(tokens, scores, tokens[trainer.unk_id])


def _unigram(tokens: list[str], scores: list[float], trainer: Any) -> models.Unigram:
    return models.Unigram(list(zip(tokens, scores, strict=True)), unk_id=trainer.unk_id, byte_fallback=trainer.byte_fallback)


_MODELS = {UNIGRAM: _unigram, BPE: _bpe}


def _rename(proto: Any, added: dict[int, dict[str, Any]]) -> None:
    """Reserved pieces that tokenizer_config.json gives a name (InternLM 2: [UNUSED_TOKEN_145] is <|im_end|>)."""
    for i, token in added.items():
        if 0 <= i < len(proto.pieces):
            proto.pieces[i].piece = token["content"]


def _normalizers(spec: Any) -> list[Any]:
    found: list[Any] = [normalizers.Precompiled(spec.precompiled_charsmap)] if spec.precompiled_charsmap else []
    if spec.remove_extra_whitespaces:
        found += [normalizers.Strip(left=True, right=True), normalizers.Replace(Regex(" {2,}"), " ")]
    return found


def _add_later_tokens(tokenizer: Tokenizer, tokens: dict[int, dict[str, Any]], file: Path) -> None:
    """Tokens that tokenizer_config.json adds after the sentencepiece vocabulary, in the order of their ids."""
    for i, token in sorted(tokens.items()):
        if tokenizer.token_to_id(token["content"]) is None and i != tokenizer.get_vocab_size():
            sides = f"has id {i}, and {tokenizer.get_vocab_size()} is next"
            raise CheckpointError(f"{file}: added token {token['content']!r} {sides}.", cure="Add a tokenizer.json.")
        added = AddedToken(token["content"], normalized=bool(token.get("normalized")), special=bool(token.get("special")))
        (tokenizer.add_special_tokens if added.special else tokenizer.add_tokens)([added])


def _check(tokenizer: Tokenizer, file: Path) -> None:
    from sentencepiece import SentencePieceProcessor

    original = SentencePieceProcessor(model_file=str(file))
    for text in PROBES:
        ids, wanted = tokenizer.encode(text, add_special_tokens=False).ids, original.encode(text)
        if ids != wanted:
            raise CheckpointError(f"{file}: converted, it splits {text!r} into {ids}, not {wanted}.", cure="Add a tokenizer.json.")
