"""What a kernel is compiled for, as a line of JSON that another process can read.

Triton's own serialization (`JITFunction.preload`) loses two things. Named tuples become lists, so that the kernel can no longer read their
fields by name and gets another cache key; and a string constant that is the name of a type ("bf16") comes back as that type.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from typing import Any

import triton.language as tl
from triton.backends.compiler import BaseBackend
from triton.runtime.jit import JITFunction

Path = tuple[int, ...]  # the index of an argument, and within tuples those of the element


@dataclass(frozen=True, slots=True)
class Specialization:
    """The arguments of `triton.compiler.ASTSource` and the compiler's options."""

    signature: dict[str, Any]  # by argument name: a type ("*bf16", "i32", "constexpr"), or a tuple or named tuple of these
    constants: dict[Path, Any]  # the values of constexpr arguments, and of arguments that are None or 1
    attributes: dict[Path, Any]  # such as [["tt.divisibility", 16]]
    options: dict[str, Any]  # num_warps, num_stages, launch_pdl ...

    @staticmethod
    def of_hook(compile_arguments: dict[str, Any]) -> Specialization:
        """The specialization in the `compile` argument of Triton's `jit_cache_hook`, which has the options as JSON only."""
        options = json.loads(compile_arguments["specialization_data"])["options"]
        return Specialization(
            compile_arguments["signature"],
            compile_arguments["constants"],
            compile_arguments["configs"][0],
            {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()},
        )

    @staticmethod
    def from_json(text: str) -> Specialization:
        """The inverse of `to_json`."""
        return Specialization(*(_decode(part) for part in json.loads(text)))

    def to_json(self) -> str:
        """All four fields as one line of JSON."""
        return json.dumps([_encode(part) for part in (self.signature, self.constants, self.attributes, self.options)])

    def source(self, function: JITFunction) -> Any:
        """The source to compile: `ASTSource`, or `GluonASTSource` for a kernel written in Gluon."""
        return function.ASTSource(function, self.signature, self.constants, self.attributes)

    def parsed_options(self, backend: BaseBackend) -> Any:
        """The backend's options object, as `triton.compile` uses it."""
        return backend.parse_options(dict(self.options))


def _encode(value: Any) -> Any:
    """A JSON value for Python values, Triton types, constants, tuples, named tuples and dictionaries of these.

    Raises TypeError for others.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_encode(each) for each in value]
    if isinstance(value, tl.dtype):
        return {"type": str(value)}
    if isinstance(value, tl.constexpr):
        return {"constexpr": _encode(value.value)}
    if isinstance(value, tuple):
        kind = type(value)
        elements = [_encode(each) for each in value]
        return {"tuple": elements} if kind is tuple else {"named tuple": [kind.__module__, kind.__qualname__], "elements": elements}
    if isinstance(value, dict):
        return {"dict": [[_encode(key), _encode(each)] for key, each in value.items()]}
    raise TypeError(f"{value!r} can't be a constant of a kernel that is compiled ahead of time: it has no JSON form")


def _decode(value: Any) -> Any:
    """The inverse of `_encode`."""
    if isinstance(value, list):
        return [_decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "type" in value:
        return tl.dtype(value["type"])
    if "constexpr" in value:
        return tl.constexpr(_decode(value["constexpr"]))
    if "tuple" in value:
        return tuple(_decode(each) for each in value["tuple"])
    if "named tuple" in value:
        module, name = value["named tuple"]
        return getattr(importlib.import_module(module), name)(*(_decode(each) for each in value["elements"]))
    return {_decode(key): _decode(each) for key, each in value["dict"]}
