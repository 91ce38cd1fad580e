"""Decodes JSON bodies of any size without holding the interpreter lock for long.

A body above INLINE_BYTES is decoded in a thread (`RequestContext.compute`). One call of msgspec would hold the interpreter lock for the
whole body, and the event loop would wait for it: 16 MiB take 0.1 s as numbers and 1 s as empty lists. A large body is therefore scanned
first, in steps of at most STEP_BYTES. The scan counts values, which are limited, and finds long lists of numbers, which are decoded in
steps, too. What remains is mostly the content of strings, which msgspec decodes at several GB/s.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

import msgspec

from stoker.server.errors import BodyError

INLINE_BYTES = 256 << 10  # bodies up to this size are decoded in the event loop
STEP_BYTES = 128 << 10  # decoded or scanned by one call that holds the interpreter lock
LONG_LIST_BYTES = 4 << 10  # lists of numbers that are longer are decoded alone
MAX_VALUES = 1 << 16  # strings (keys included), lists and objects in a body above INLINE_BYTES
MAX_SHORT_NUMBERS = 1 << 19  # numbers there that are not in a long list
_STRUCTURE = re.compile(rb'["\[\]{}]')
_CHARACTERS = re.compile(rb'(?:[^"\\]+|\\.)*+', re.DOTALL)  # of a string, up to its end
_QUOTE, _OPEN, _CLOSE = b'"[]'


def decode_json(body: bytes, *, long_lists: bool = True) -> Any:
    """The value of standard JSON: no NaN, no Infinity, no number beyond a double, no lone surrogates. Raises BodyError.

    Call it in a thread for a body above INLINE_BYTES. Without `long_lists`, such a body has at most MAX_SHORT_NUMBERS numbers.
    """
    try:
        return decode_standard(body, long_lists=long_lists)
    except msgspec.MsgspecError as error:
        detail = "it is empty" if not body else str(error)
    except UnicodeDecodeError as error:
        detail = f"byte {error.start} is not UTF-8"
    except RecursionError:
        detail = "it is nested too deeply"
    raise BodyError(f"the request's body is not JSON: {detail}.", cure="Send UTF-8 JSON with finite numbers.")


def decode_standard(body: bytes | memoryview, *, long_lists: bool = True) -> Any:
    """As `decode_json`, with the errors of msgspec. Raises BodyError only for a large body with too many values."""
    if len(body) <= INLINE_BYTES:
        return msgspec.json.decode(body)
    data = bytes(body)
    lists = _Scan(data, long_lists).run()
    if not lists:
        return msgspec.json.decode(data)
    mark = secrets.token_hex(16)  # a string that no client can guess stands for a list
    parts, at = [], 0
    for i, (start, end) in enumerate(lists):
        parts += [data[at:start], b'"%b%d"' % (mark.encode(), i)]
        at = end
    value = msgspec.json.decode(b"".join([*parts, data[at:]]))
    return _with_lists(value, {f"{mark}{i}": _decode_numbers(data, start, end) for i, (start, end) in enumerate(lists)})


class _Scan:
    """One pass over a large body, which counts its values and finds its long lists of numbers."""

    def __init__(self, data: bytes, long_lists: bool) -> None:
        self._data = data
        self._long_lists = long_lists
        self._num_values = 0  # strings, lists and objects
        self._num_commas = 0  # outside of strings and of the lists that were found
        self._opened = -1  # start of the present list, if it contains numbers only so far
        self._inside = 0  # commas in that list

    def run(self) -> list[tuple[int, int]]:
        """(start, end) of each list that is longer than LONG_LIST_BYTES and contains neither strings, lists nor objects.

        Raises BodyError for too many values.
        """
        data, found, at = self._data, [], 0
        while at < len(data):
            match = _STRUCTURE.search(data, at, at + STEP_BYTES)
            self._inside += data.count(b",", at, match.start() if match is not None else at + STEP_BYTES)
            if match is None:
                at += STEP_BYTES
                continue
            at = match.end()
            kind = data[at - 1]
            if kind == _CLOSE and self._long_lists and self._opened >= 0 and at - self._opened > LONG_LIST_BYTES:
                found.append((self._opened, at))
                self._inside = 0
            self._num_commas += self._inside
            self._num_values += kind not in b"]}"
            self._opened, self._inside = at - 1 if kind == _OPEN else -1, 0
            self._check_counts()
            if kind == _QUOTE:
                at = _end_of_string(data, at)
        self._num_commas += self._inside
        self._check_counts()
        return found

    def _check_counts(self) -> None:
        """Raise BodyError for too many values."""
        if self._num_values > MAX_VALUES:
            what = f"more than {MAX_VALUES} strings, lists and objects"
        elif self._num_commas > MAX_SHORT_NUMBERS + MAX_VALUES:
            what = f"more than {MAX_SHORT_NUMBERS} numbers"
        else:
            return
        cure = f"Send several requests, or at most {INLINE_BYTES} bytes."
        raise BodyError(f"the request's body has {len(self._data)} bytes and {what}.", cure=cure)


def _end_of_string(data: bytes, at: int) -> int:
    """The position after the closing quotation mark of the string whose first character is at `at`; the end of the data without one."""
    while at < len(data):
        match = _CHARACTERS.match(data, at, at + STEP_BYTES)
        assert match is not None  # the pattern also matches nothing
        at = match.end()
        if data[at : at + 1] == b'"':
            return at + 1
        if match.end() == match.start():  # a backslash is the last byte
            break
    return len(data)


def _decode_numbers(data: bytes, start: int, end: int) -> list[Any]:
    """The list of numbers at [start, end), which includes the brackets. Raises msgspec.DecodeError."""
    values: list[Any] = []
    at, last = start + 1, end - 1
    while at <= last:
        cut = last if last - at <= STEP_BYTES else data.rfind(b",", at, at + STEP_BYTES)
        if cut < 0:  # white space, or a number of this length
            cut = max(data.find(b",", at, last), 0) or last
        chunk = msgspec.json.decode(b"[%b]" % data[at:cut]) if cut > at else []
        if not chunk:
            raise msgspec.DecodeError(f"JSON is malformed: a list of numbers lacks an item (byte {at})")
        values += chunk
        at = cut + 1
    return values


def _with_lists(value: Any, lists: dict[str, list[Any]]) -> Any:
    """`value`, in which the strings that are keys of `lists` are replaced by these lists. Changes it in place."""
    if isinstance(value, str):
        return lists.get(value, value)
    if isinstance(value, dict):
        for name, item in value.items():
            if isinstance(item, (str, dict, list)):
                value[name] = _with_lists(item, lists)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            if isinstance(item, (str, dict, list)):
                value[i] = _with_lists(item, lists)
    return value
