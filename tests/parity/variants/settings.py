"""Settings that many variants share, and the form of a table of variants: row → (configuration class, sizes, {variant: settings})."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from cases import GROUPED, native
from oracles import Reference

Settings = dict[str, Any]
Table = dict[str, tuple[str, Settings, dict[str, Settings]]]
Variants = dict[tuple[str, str], Callable[[], Reference]]

SMALL: Settings = GROUPED | {"num_hidden_layers": 2}
HEAD: Settings = {"head_dim": 8}
WIDE: Settings = {"head_dim": 12}  # six heads of which are wider than the hidden size
MQA: Settings = {"num_key_value_heads": 1}
MHA: Settings = {"num_key_value_heads": 6}
TIED: Settings = {"tie_word_embeddings": True}
UNTIED: Settings = {"tie_word_embeddings": False}
BIASED: Settings = {"attention_bias": True, "mlp_bias": True}
ONE_LAYER: Settings = {"num_hidden_layers": 1}
GELU: Settings = {"hidden_act": "gelu_pytorch_tanh"}
LAST_SLIDES = ["full_attention", "sliding_attention"]
FIRST_SLIDES = LAST_SLIDES[::-1]

DEFAULT: Settings = {"rope_type": "default", "rope_theta": 20000.0}
LINEAR: Settings = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
# Within the first context of 256 positions, so that the reference does not depend on the length of a sequence.
DYNAMIC: Settings = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LLAMA3: Settings = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    "rope_theta": 500000.0,
}  # fmt: skip


def rope(parameters: Settings, fraction: float | None = None) -> Settings:
    """The setting of rotary embeddings, of which `fraction` of each head is rotated."""
    return {"rope_parameters": parameters if fraction is None else parameters | {"partial_rotary_factor": fraction}}


def long_rope(frequencies: int, **more: Any) -> Settings:
    """Longrope with other factors for short and long contexts, for heads of which 2 × `frequencies` features are rotated."""
    long = [2.0 + i for i in range(frequencies)]
    short = [1.0 + 0.2 * i for i in range(frequencies)]
    return {"rope_type": "longrope", "short_factor": short, "long_factor": long, "rope_theta": 1e4} | more


def natives(table: Table) -> Variants:
    """The models of transformers that a table describes."""
    return {(row, what): partial(native, name, **sizes | more) for row, (name, sizes, rows) in table.items() for what, more in rows.items()}
