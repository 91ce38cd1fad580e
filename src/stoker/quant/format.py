"""The seam of quantization: a format knows how to make, describe, shard and load a linear. Model code never sees a scale."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import msgspec
from torch import Tensor

from stoker.base.registry import Registry
from stoker.layers.specs import LinearSpec


class LinearOp(ABC):
    """A linear ready to run: called with [..., in_features] gives [..., out_features] in the same dtype."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor: ...


class Format(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A weight format with its settings; the struct itself is what config.json stores under `quantization`."""

    name: ClassVar[str]

    @property
    def needs_calibration(self) -> bool:
        """Whether `quantize` wants activation statistics."""
        return False
