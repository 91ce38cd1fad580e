"""gemma, gemma2 and gemma3. The converter adds 1 to the weights of norms, which is what the engine stores."""

from __future__ import annotations

from typing import Any

from stoker.builder.checkpoint.gguf.architecture import GGUFArchitecture
from stoker.builder.checkpoint.gguf.config_fields import layer_types, llama_config
from stoker.builder.checkpoint.gguf.metadata import Metadata


def _read_gemma(m: Metadata) -> dict[str, Any]:
    """Gemma 1."""
    return llama_config(m) | {"hidden_act": "gelu_pytorch_tanh"}


def _score_scale(m: Metadata, config: dict[str, Any], layers_of_27b: int) -> dict[str, Any]:
    """query_pre_attn_scalar: the head size, except in the models with 27 billion parameters, as in llama.cpp."""
    is_27b = m.get("block_count", int) == layers_of_27b
    size = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    scale = m.get("attention.scale", float)
    return {"query_pre_attn_scalar": size if scale is None else scale**-2}


def _read_gemma2(m: Metadata) -> dict[str, Any]:
    """Gemma 2, whose layers alternate between a sliding window and full attention."""
    config = llama_config(m)
    config |= {"hidden_activation": "gelu_pytorch_tanh", "head_dim": m.require("attention.key_length", int)}
    config |= {
        "sliding_window": m.get("attention.sliding_window", int, 4096),
        "attn_logit_softcapping": m.get("attn_logit_softcapping", float, 50.0),
        "final_logit_softcapping": m.get("final_logit_softcapping", float, 30.0),
        "layer_types": layer_types(m, 2),
    }
    del config["hidden_act"]
    return config | _score_scale(m, config, 46)


def _read_gemma3(m: Metadata) -> dict[str, Any]:
    """The text model of Gemma 3. Scaling and rope.freq_base apply to the layers with full attention."""
    config = llama_config(m)
    config |= {"hidden_activation": "gelu_pytorch_tanh", "head_dim": m.require("attention.key_length", int)}
    wide = config.pop("rope_scaling", {"rope_type": "default"}) | {"rope_theta": config.pop("rope_theta", 1e6)}
    local = {"rope_type": "default", "rope_theta": m.get("rope.freq_base_swa", float, 10000.0)}
    config |= {
        "sliding_window": m.get("attention.sliding_window", int, 4096),
        "final_logit_softcapping": m.get("final_logit_softcapping", float),
        "layer_types": layer_types(m, 6) if m.get("attention.sliding_window", int) else ["full_attention"] * m.require("block_count", int),
        "rope_parameters": {"full_attention": wide, "sliding_attention": local},
    }
    del config["hidden_act"]
    return config | _score_scale(m, config, 62)


ARCHITECTURES = (
    GGUFArchitecture(name="gemma", model_types=("gemma",), read_config=_read_gemma),
    GGUFArchitecture(name="gemma2", model_types=("gemma2",), read_config=_read_gemma2),
    GGUFArchitecture(
        name="gemma3",
        model_types=("gemma3_text", "gemma3"),
        read_config=_read_gemma3,
    ),
)
