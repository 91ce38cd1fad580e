"""Converts ice_text.model of ChatGLM-6B, a sentencepiece model with pieces for line breaks, tabs and runs of spaces.

The published code replaces them with `<n>`, `<|tab|>` and `<|blank_80|>` to `<|blank_2|>` before it calls sentencepiece. The converted
tokenizer maps each to a private-use character instead, so that no other piece merges with it, and a literal `<n>` in a text is not changed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer, decoders, normalizers

from stoker.base.errors import CheckpointError
from stoker.builder.tokenizers.check_splits import check_splits
from stoker.builder.tokenizers.sentencepiece import BYTE, CONTROL, NORMAL, UNUSED, USER_DEFINED, convert_model, parse_model

MAX_SPACES = 80  # longest run of spaces that is one piece
MAX_IMAGE_TOKENS = 1 << 20
_SPECIAL_TOKENS = ("[MASK]", "[gMASK]", "[sMASK]", "<unused_0>", "<sop>", "<eop>", "<ENC>", "<dBLOCK>")
_FIRST_PRIVATE_CHARACTER = 0xE000
# Whitespace → its piece, longest first.
_WHITESPACE_PIECES = {"\n": "<n>", "\t": "<|tab|>"} | {" " * i: f"<|blank_{i}|>" for i in range(MAX_SPACES, 1, -1)}
_PRIVATE_CHARACTERS = {piece: chr(_FIRST_PRIVATE_CHARACTER + i) for i, piece in enumerate(_WHITESPACE_PIECES.values())}
_NONCHARACTER = chr(0x10FFFF)  # first character of placeholder pieces, which therefore match no text


def convert_chatglm_6b(file: Path, num_image_tokens: int) -> Tokenizer:
    """The tokenizer of ice_text.model. The ids of `num_image_tokens` image tokens come before those of text pieces.

    Raises CheckpointError when the file is of another kind, or the result splits the probe texts differently from sentencepiece.
    """
    proto = parse_model(file)
    if proto is None or all(piece.piece != "<n>" for piece in proto.pieces):
        raise CheckpointError(f"{file} is not ChatGLM-6B's vocabulary.", cure="Download it again.")
    if not 0 <= num_image_tokens <= MAX_IMAGE_TOKENS:
        raise CheckpointError(f"tokenizer_config.json: num_image_tokens={num_image_tokens} is refused.", cure="Use 0 to 1048576.")
    _append_missing_pieces(proto)
    original = SentencePieceProcessor(model_proto=proto.SerializeToString())
    tokenizer = convert_model(_with_private_characters(proto, num_image_tokens))
    encode_whitespace = [normalizers.Replace(text, _PRIVATE_CHARACTERS[piece]) for text, piece in _WHITESPACE_PIECES.items()]
    decode_whitespace = [decoders.Replace(_PRIVATE_CHARACTERS[piece], text) for text, piece in _WHITESPACE_PIECES.items()]
    tokenizer.normalizer = normalizers.Sequence([*encode_whitespace, tokenizer.normalizer])
    tokenizer.decoder = decoders.Sequence([*decode_whitespace, tokenizer.decoder])
    check_splits(tokenizer, lambda text: [num_image_tokens + i for i in original.encode(_replace_whitespace(text))], file)
    return tokenizer


def _append_missing_pieces(proto: Any) -> None:
    """Append special tokens, whitespace and bytes to the model of the first release, as the published code does."""
    if any(piece.piece == "[gMASK]" for piece in proto.pieces):
        return
    whitespace = [piece for piece in sorted(_WHITESPACE_PIECES.values(), key=lambda piece: (len(piece), piece)) if piece != "<n>"]
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    for kind, names in ((CONTROL, _SPECIAL_TOKENS), (USER_DEFINED, whitespace), (BYTE, byte_pieces)):
        for name in names:
            proto.pieces.add(piece=name, score=0.0, type=kind)
    proto.trainer_spec.byte_fallback = True


def _with_private_characters(proto: Any, num_image_tokens: int) -> Any:
    """A copy of the model with placeholders for image tokens first, and with private-use characters for whitespace pieces."""
    copy = type(proto)()
    copy.CopyFrom(proto)
    del copy.pieces[:]
    for i in range(num_image_tokens):
        copy.pieces.add(piece=f"{_NONCHARACTER}<image_{i}>", score=0.0, type=UNUSED)
    for piece in proto.pieces:
        character = _PRIVATE_CHARACTERS.get(piece.piece)
        copy.pieces.add(piece=character or piece.piece, score=piece.score, type=NORMAL if character else piece.type)
    copy.trainer_spec.unk_id += num_image_tokens
    copy.trainer_spec.bos_id += num_image_tokens
    return copy


def _replace_whitespace(text: str) -> str:
    """`text` with whitespace replaced as the published code does before it calls sentencepiece."""
    for whitespace, piece in _WHITESPACE_PIECES.items():
        text = text.replace(whitespace, piece)
    return text
