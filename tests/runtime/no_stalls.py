"""A watch over tensors of the meta device that stands for a GPU: it refuses whatever would stop the host there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

META = torch.device("meta")
COPIES = ("aten::copy_", "aten::_to_copy", "aten::to")
READS = (
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::nonzero",
    "aten::masked_select",
    "aten::equal",
    "aten::is_nonzero",
    "aten::unique",
)


class Stall(AssertionError):
    """An operation for which the host would wait."""


class NoStalls(TorchDispatchMode):
    """While it is entered: no number comes back, and what goes over is a copy that does not block; `num_copies` counts those."""

    def __init__(self) -> None:
        super().__init__()
        self.num_copies = 0
        self._indexing = _Indexing()

    def __enter__(self) -> NoStalls:
        self._indexing.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._indexing.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        sources = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        if "meta" in sources and name in READS:
            raise Stall(f"{name} reads from the device")
        result = func(*args, **kwargs)
        devices = sources | {leaf.device.type for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        if name == "aten::lift_fresh" and "meta" in devices:
            raise Stall("a tensor of Python numbers goes over by itself")
        if {"cpu", "meta"} <= devices:
            self._cross(name, func, args, kwargs)
        return result

    def _cross(self, name: str, func: Any, args: Any, kwargs: Any) -> None:
        if name not in COPIES:
            raise Stall(f"{name} takes tensors of the host and of the device")
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        source = given.get("src", given["self"])
        if source.device.type != "cpu" or not given.get("non_blocking", False):
            raise Stall(f"{name} blocks")
        self.num_copies += 1


class _Indexing(TorchFunctionMode):
    """Python numbers that would be copied to a GPU by themselves, and of which the meta device shows nothing."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = args[0].device if args and isinstance(args[0], Tensor) else None
        if func in (torch.tensor, torch.as_tensor, Tensor.new_tensor) and torch.device(kwargs.get("device") or target or "cpu") == META:
            raise Stall("a tensor of Python numbers goes over by itself")
        if func in (Tensor.__getitem__, Tensor.__setitem__) and target == META:
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(part, list) for part in parts):
                raise Stall("an index is a list")
            if func is Tensor.__setitem__ and any(isinstance(part, Tensor) for part in parts) and not isinstance(args[2], Tensor):
                raise Stall("a number is stored through an index")
        return func(*args, **kwargs)
