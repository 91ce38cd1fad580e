"""Reads the file of API keys: named keys with limits in YAML, or one key a line.

Only digests of the keys are kept. An error names the file, the line and the field, and never a key.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import msgspec

from stoker.base import yaml_tree
from stoker.base.errors import ConfigError
from stoker.base.registry import nearest
from stoker.base.yaml_tree import Node
from stoker.server.settings import MIN_KEY_CHARS

MAX_KEY_CHARS = 1024
MAX_NAMES = 1000  # each is a label value of metrics
MAX_COUNT = 1 << 50
MAX_PRIORITY = 1000
SUFFIXES = (".yaml", ".yml", ".json")  # JSON is YAML
QUOTAS = ("tokens_per_day", "tokens_per_month")
COUNTS = ("requests_per_minute", "tokens_per_minute", *QUOTAS)
_FIELDS = ("name", "key", "sha256", *COUNTS, "priority")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The keys with one name, and their limits. Keys of a file without names have an empty name and no limits."""

    name: str = ""
    digests: tuple[bytes, ...]  # SHA-256 of the keys
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None  # days and months of UTC
    tokens_per_month: int | None = None
    priority: int = 0  # requests of a key with a lower value are admitted first
    slot: int = 0  # index of its counters


def digest_of(key: str | bytes) -> bytes:
    """The SHA-256 of a key."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()


def read_key_file(path: Path | str, *, counts_quotas: bool) -> tuple[KeyEntry, ...]:
    """The entries of a file. Raises ConfigError for a file that cannot be read or is invalid, with line and field.

    Limits per day and month are refused unless `counts_quotas`, which needs a log of the usage.
    """
    file = Path(path)
    try:
        with file.open("rb") as opened:
            data = opened.read(yaml_tree.MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.", cure="Name a file with API keys.") from None
    if file.suffix.lower() in SUFFIXES:
        return _Reader(str(file), counts_quotas).read(yaml_tree.parse(data, str(file)))
    return (KeyEntry(digests=tuple(dict.fromkeys(_line_digests(str(file), data)))),)


def _line_digests(file: str, data: bytes) -> list[bytes]:
    """The digests of a file with one key a line."""
    digests = []
    for number, line in enumerate(data.splitlines(), 1):
        if line.strip():
            digests.append(_digest_of_text(f"{file}:{number}", line.strip().decode("latin-1")))
    if not digests:  # an empty list of keys would turn authentication off
        raise ConfigError(f"{file} holds no key.", cure="Name a UTF-8 text file with one key a line.")
    return digests


def _digest_of_text(place: str, key: Any) -> bytes:
    """The digest of one key. Raises ConfigError, without the key, if it is too short or contains other characters."""
    if not isinstance(key, str) or not MIN_KEY_CHARS <= len(key) <= MAX_KEY_CHARS or not key.isascii() or not key.isprintable():
        cure = f"Use {MIN_KEY_CHARS} to {MAX_KEY_CHARS} printable ASCII characters, in quotes if they are digits."
        raise ConfigError(f"{place}: an API key is refused.", cure=cure)
    return digest_of(key)


class _Reader:
    """Checks the tree of one YAML file."""

    def __init__(self, file: str, counts_quotas: bool) -> None:
        self._file = file
        self._counts_quotas = counts_quotas
        self._lines: dict[Any, int] = {}  # line of each name and digest

    def read(self, root: Node) -> tuple[KeyEntry, ...]:
        """The entries of the document. Raises ConfigError."""
        example = "Write keys: and below it entries such as - {name: team-a, key: …}."
        if not isinstance(root.value, dict) or "keys" not in root.value:
            raise self._error(root.line, "keys", "is missing", example)
        for key, node in root.value.items():
            if key != "keys":
                raise self._error(node.line, key, "is an unknown field", "Use keys.")
        keys = root.value["keys"]
        if not isinstance(keys.value, list) or not keys.value:
            raise self._error(keys.line, "keys", "is not a list with an entry for each name", example)
        if len(keys.value) > MAX_NAMES:
            raise self._error(keys.line, "keys", f"has {len(keys.value)} entries, and the limit is {MAX_NAMES}", "Use fewer names.")
        return tuple(self._entry(node) for node in keys.value)

    def _entry(self, node: Node) -> KeyEntry:
        """One entry of the list."""
        if not isinstance(node.value, dict):
            raise self._error(node.line, "keys", "has an entry without fields", f"Use the fields {', '.join(_FIELDS)}.")
        for field, child in node.value.items():
            if field not in _FIELDS:
                near = nearest(field, list(_FIELDS)) or list(_FIELDS)
                raise self._error(child.line, field, "is an unknown field", f"Use one of: {', '.join(near)}.")
        for field in QUOTAS:
            if field in node.value and not self._counts_quotas:
                raise self._error(node.value[field].line, field, "needs a log of the usage", "Set --usage-log.")
        fields = {name: self._number(node, name, 1, MAX_COUNT) for name in COUNTS if name in node.value}
        if "priority" in node.value:
            fields["priority"] = self._number(node, "priority", -MAX_PRIORITY, MAX_PRIORITY)
        return KeyEntry(name=self._name(node), digests=self._digests(node), **fields)

    def _name(self, entry: Node) -> str:
        """The name, which no other entry has."""
        node = entry.value.get("name")
        if node is None:
            raise self._error(entry.line, "name", "is missing", "Give each entry a name, such as team-a.")
        if not isinstance(node.value, str) or not _NAME.fullmatch(node.value):
            raise self._error(node.line, "name", "is refused", "Use 1 to 64 letters, digits, and . _ - after the first one.")
        self._check_unique(node.line, "name", node.value)
        return str(node.value)

    def _digests(self, entry: Node) -> tuple[bytes, ...]:
        """The digests of `key` and `sha256`, each of which is one value or a list."""
        digests = []
        for field in ("key", "sha256"):
            if (node := entry.value.get(field)) is None:
                continue
            for item in node.value if isinstance(node.value, list) else [node]:
                place = f"{self._file}:{item.line}: {field}"
                if field == "key":
                    digest = _digest_of_text(place, item.value)
                elif isinstance(item.value, str) and _DIGEST.fullmatch(item.value.lower()):
                    digest = bytes.fromhex(item.value)
                else:
                    raise ConfigError(f"{place} is refused.", cure="Use the 64 hexadecimal digits that sha256sum prints, in quotes.")
                self._check_unique(item.line, field, digest)
                digests.append(digest)
        if not digests:
            raise self._error(entry.line, "key", "is missing", "Set key, or sha256, the digest of a key.")
        return tuple(digests)

    def _number(self, entry: Node, field: str, low: int, high: int) -> int:
        """A whole number of the entry."""
        node = entry.value[field]
        if type(node.value) is not int or not low <= node.value <= high:
            raise self._error(node.line, field, f"is {str(node.value)[:40]!r}", f"Use a whole number from {low} to {high}.")
        return int(node.value)

    def _check_unique(self, line: int, field: str, value: Any) -> None:
        """Raise ConfigError if another entry has this value."""
        if value in self._lines:
            raise self._error(line, field, f"is the same as in line {self._lines[value]}", "Use different ones.")
        self._lines[value] = line

    def _error(self, line: int, field: str, problem: str, cure: str) -> ConfigError:
        """The error of a field."""
        return ConfigError(f"{self._file}:{line}: {field} {problem}.", cure=cure)
