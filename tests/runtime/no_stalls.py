"""Detects operations that would make the host wait for a GPU, which the meta device represents."""

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


class StallError(AssertionError):
    """An operation for which the host would wait."""


class NoStalls(TorchDispatchMode):
    """Within the context, values must not be read from the device, and copies to it must not block. `num_copies` counts the copies."""

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
            raise StallError(f"{name} reads from the device")
        result = func(*args, **kwargs)
        devices = sources | {leaf.device.type for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        if name == "aten::lift_fresh" and "meta" in devices:
            raise StallError("a tensor of Python numbers is copied to the device")
        if {"cpu", "meta"} <= devices:
            self._check_copy(name, func, args, kwargs)
        return result

    def _check_copy(self, name: str, func: Any, args: Any, kwargs: Any) -> None:
        if name not in COPIES:
            raise StallError(f"{name} has operands on the host and on the device")
        names = [argument.name for argument in func._schema.arguments]
        arguments = dict(zip(names, args, strict=False)) | kwargs
        source = arguments.get("src", arguments["self"])
        if source.device.type != "cpu" or not arguments.get("non_blocking", False):
            raise StallError(f"{name} blocks")
        self.num_copies += 1


class _Indexing(TorchFunctionMode):
    """Detects implicit copies of Python numbers, which the meta device does not perform."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = args[0].device if args and isinstance(args[0], Tensor) else None
        if func in (torch.tensor, torch.as_tensor, Tensor.new_tensor) and torch.device(kwargs.get("device") or target or "cpu") == META:
            raise StallError("a tensor of Python numbers is copied to the device")
        if func in (Tensor.__getitem__, Tensor.__setitem__) and target == META:
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(part, list) for part in parts):
                raise StallError("an index is a list")
            if func is Tensor.__setitem__ and any(isinstance(part, Tensor) for part in parts) and not isinstance(args[2], Tensor):
                raise StallError("a Python number is assigned through an index")
        return func(*args, **kwargs)
