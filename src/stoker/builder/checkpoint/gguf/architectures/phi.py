"""phi2 (Phi-1 to Phi-2) and phi3 (Phi-3 and Phi-4)."""

from __future__ import annotations

from typing import Any

from stoker.builder.checkpoint.gguf.architecture import GGUFArchitecture
from stoker.builder.checkpoint.gguf.config_fields import layer_norm_config, llama_config
from stoker.builder.checkpoint.gguf.metadata import Metadata


def _read_phi2(m: Metadata) -> dict[str, Any]:
    """Phi-1, Phi-1.5 and Phi-2. llama.cpp's converter has no other width than four times the hidden size."""
    return layer_norm_config(m, partial_rotary=True) | {"hidden_act": "gelu_new", "qk_layernorm": False}


def _read_phi3(m: Metadata) -> dict[str, Any]:
    """Phi-3 and Phi-4. A sliding window of 0 means full attention."""
    config = llama_config(m, partial_rotary=True)
    original = m.get("rope.scaling.original_context_length", int, config.get("max_position_embeddings"))
    return config | {"sliding_window": m.get("attention.sliding_window", int) or None, "original_max_position_embeddings": original}


ARCHITECTURES = (
    GGUFArchitecture(name="phi2", model_types=("phi",), read_config=_read_phi2),
    GGUFArchitecture(name="phi3", model_types=("phi3",), read_config=_read_phi3, names=lambda tensors: {"mlp.up": "ffn_up"}),
)
