"""Values that ops share."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What differs between attention layers."""

    scale: float  # multiplies q · k
    window: int | None = None  # a query sees itself and window - 1 keys before it
    chunk: int | None = None  # a query sees keys of its own chunk of positions only
    softcap: float | None = None  # scores become cap × tanh(scores ÷ cap)
    alibi_slopes: Tensor | None = None  # float32 [heads]: slope × (key position - query position) is added to the scaled scores
    sinks: Tensor | None = None  # float32 [heads]: a logit that joins the softmax and has no value
