"""The messages between a frontend and the process that renders its chat template.

A frame is a payload after its length (8 bytes, little-endian). The frontend sends pickles: first the template's source, its special tokens
and the limit of processor time, then one pair (variables, max_chars) per rendering. The process returns, in the order of the renderings,
frames of a status byte and UTF-8 text. They are never unpickled, because a template that breaks out of the sandbox could have written them.
"""

from __future__ import annotations

import pickle
from typing import Any, BinaryIO

LENGTH_BYTES = 8
RENDERED = 0  # followed by the prompt
TOO_LONG = 1  # the prompt has more than max_chars characters
FAILED = 2  # followed by the reason
MAX_REASON_CHARS = 1000
UTF8_ERRORS = "surrogatepass"  # JSON can contain lone surrogates, which the tokenizer refuses with its own error


def pack(payload: bytes) -> bytes:
    """The frame of a payload."""
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload


def pack_object(value: Any) -> bytes:
    """The frame of a pickled object. Raises the exceptions of pickle."""
    return pack(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


def read_object(file: BinaryIO) -> Any:
    """The next object of a file of frames. Raises EOFError at its end."""
    head = file.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        raise EOFError
    return pickle.loads(file.read(int.from_bytes(head, "little")))
