"""ChatGLM-6B's ice_text.model: a sentencepiece vocabulary in which line breaks, tabs and runs of blanks are pieces of their own.

The published code writes them as `<n>`, `<|tab|>` and `<|blank_80|>` to `<|blank_2|>` before sentencepiece sees the text. Here each is one
character of a private range, so that nothing merges with it. A literal `<n>` in a text stays what it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer, decoders, normalizers

from stoker.base.errors import CheckpointError
from stoker.builder.tokenizers.probe_texts import PROBES
from stoker.builder.tokenizers.sentencepiece import BYTE, CONTROL, NORMAL, UNUSED, USER_DEFINED, convert, parse

LONGEST = 80  # blanks that are one piece
_SPECIAL = ("[MASK]", "[gMASK]", "[sMASK]", "<unused_0>", "<sop>", "<eop>", "<ENC>", "<dBLOCK>")
_PRIVATE = 0xE000
# Text → its piece, in the order that it is looked for.
_SPACES = {"\n": "<n>", "\t": "<|tab|>"} | {" " * i: f"<|blank_{i}|>" for i in range(LONGEST, 1, -1)}
_MARKS = {piece: chr(_PRIVATE + i) for i, piece in enumerate(_SPACES.values())}
_UNTYPED = chr(0x10FFFF)  # begins the names of pieces that no text holds


def from_ice(file: Path, shift: int) -> Tokenizer:
    """The tokenizer of ice_text.model; ids of text begin at `shift`, after those of images.

    Raises CheckpointError when it is no such file, or splits the probes otherwise than the sentencepiece library.
    """
    proto = parse(file)
    if proto is None or all(piece.piece != "<n>" for piece in proto.pieces):
        raise CheckpointError(f"{file} is not ChatGLM-6B's vocabulary.", cure="Download it again.")
    if not 0 <= shift <= 1 << 20:
        raise CheckpointError(f"tokenizer_config.json: num_image_tokens={shift} is refused.", cure="Use 0 to 1048576.")
    _complete(proto)
    original = SentencePieceProcessor(model_proto=proto.SerializeToString())
    tokenizer = convert(_marked(proto, shift))
    before = [normalizers.Replace(text, _MARKS[piece]) for text, piece in _SPACES.items()]
    after = [decoders.Replace(_MARKS[piece], text) for text, piece in _SPACES.items()]
    tokenizer.normalizer = normalizers.Sequence([*before, tokenizer.normalizer])
    tokenizer.decoder = decoders.Sequence([*after, tokenizer.decoder])
    _check(tokenizer, original, shift, file)
    return tokenizer


def _complete(proto: Any) -> None:
    """The first release's file ends before the special tokens, the blanks and the bytes: its code appends them."""
    if any(piece.piece == "[gMASK]" for piece in proto.pieces):
        return
    spaces = [piece for piece in sorted(_SPACES.values(), key=lambda piece: (len(piece), piece)) if piece != "<n>"]
    for kind, names in ((CONTROL, _SPECIAL), (USER_DEFINED, spaces), (BYTE, [f"<0x{byte:02X}>" for byte in range(256)])):
        for name in names:
            proto.pieces.add(piece=name, score=0.0, type=kind)
    proto.trainer_spec.byte_fallback = True


def _marked(proto: Any, shift: int) -> Any:
    """`proto` with `shift` pieces before it, and the spaces as private characters."""
    made = type(proto)()
    made.CopyFrom(proto)
    del made.pieces[:]
    for i in range(shift):
        made.pieces.add(piece=f"{_UNTYPED}<image_{i}>", score=0.0, type=UNUSED)
    for piece in proto.pieces:
        marked = _MARKS.get(piece.piece)
        made.pieces.add(piece=marked or piece.piece, score=piece.score, type=NORMAL if marked else piece.type)
    made.trainer_spec.unk_id += shift
    made.trainer_spec.bos_id += shift
    return made


def _written(text: str) -> str:
    """`text` as the published code hands it to sentencepiece."""
    for space, piece in _SPACES.items():
        text = text.replace(space, piece)
    return text


def _check(tokenizer: Tokenizer, original: SentencePieceProcessor, shift: int, file: Path) -> None:
    for text in PROBES:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        wanted = [shift + i for i in original.encode(_written(text))]
        if ids != wanted:
            raise CheckpointError(f"{file}: converted, it splits {text!r} into {ids}, not {wanted}.", cure="Add a tokenizer.json.")
