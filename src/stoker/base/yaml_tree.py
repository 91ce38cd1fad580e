"""Reads YAML into scalars, lists and mappings with line numbers. Other objects are never constructed."""

from __future__ import annotations

from typing import Any

import msgspec
import yaml

from stoker.base.errors import ConfigError

MAX_BYTES = 1 << 20
MAX_NODES = 20_000
_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


class Node(msgspec.Struct, frozen=True):
    """A value and the number of its first line, counted from 1. The entries of a mapping have the line of their key."""

    value: Any  # scalar, list[Node] or dict[str, Node]
    line: int

    def plain(self) -> Any:
        """The value without line numbers."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        return [child.plain() for child in self.value] if isinstance(self.value, list) else self.value


def parse(data: bytes, name: str) -> Node:
    """The document in `data`. Raises ConfigError with the line for wrong syntax, a duplicate key, custom tags, and too many values."""
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"{name} has {len(data)} bytes; a configuration has at most {MAX_BYTES}.", cure="Check that it is a YAML configuration."
        )
    loader: Any = None
    try:
        loader = yaml.SafeLoader(data)
        root = loader.get_single_node()
        return Node({}, 1) if root is None else _Reader(loader, name).read(root)
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{name}{line}: {error.problem or error.context}.", cure="Correct the YAML.") from None
    except (yaml.YAMLError, UnicodeError):
        raise ConfigError(f"{name} is not YAML text in UTF-8.", cure="Save it as UTF-8 text.") from None
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply.", cure="Flatten it.") from None
    finally:
        if loader is not None:
            loader.dispose()


class _Reader:
    """Converts the nodes of one document. Nodes are counted, because aliases can expand a small file without limit."""

    def __init__(self, loader: yaml.SafeLoader, name: str) -> None:
        self._loader = loader
        self._name = name
        self._seen = 0

    def read(self, node: yaml.Node) -> Node:
        """The Node of a YAML node. Raises ConfigError for too many or unsupported nodes, duplicate keys, and keys that are not text."""
        self._seen += 1
        line = node.start_mark.line + 1
        if self._seen > MAX_NODES:
            raise ConfigError(
                f"{self._name} line {line}: more than {MAX_NODES} values.", cure="Remove everything that is not configuration."
            )
        if not isinstance(node, yaml.ScalarNode) and node.tag not in _COLLECTIONS:
            raise ConfigError(f"{self._name} line {line}: the tag {node.tag[:80]} is refused.", cure="Write plain values.")
        if isinstance(node, yaml.MappingNode):
            return Node(self._entries(node), line)
        if isinstance(node, yaml.SequenceNode):
            return Node([self.read(child) for child in node.value], line)
        return Node(self._scalar(node), line)

    def _entries(self, node: yaml.MappingNode) -> dict[str, Node]:
        """The entries of a mapping. Raises ConfigError for a duplicate key or one that is not text."""
        entries: dict[str, Node] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode) or not key:
                raise ConfigError(f"{self._name} line {line}: a key must be plain text.", cure="Correct the key.")
            if key in entries:
                raise ConfigError(
                    f"{self._name} line {line}: {key} is a duplicate; line {entries[key].line} sets it already.",
                    cure="Keep one of the two.",
                )
            entries[key] = Node(self.read(value_node).value, line)
        return entries

    def _scalar(self, node: yaml.Node) -> Any:
        """The Python value of a scalar. Raises ConfigError for an invalid one."""
        try:
            return self._loader.construct_object(node)
        except (ValueError, OverflowError):  # 2024-13-40, an integer of a million digits
            raise ConfigError(
                f"{self._name} line {node.start_mark.line + 1}: the value cannot be read.", cure="Put it in quotes."
            ) from None
