"""falcon: Falcon 7B, 40B, 180B and 11B. The converter moves q, k and v of all groups apart."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from stoker.builder.checkpoint.gguf.architecture import GGUFArchitecture, ModuleNames
from stoker.builder.checkpoint.gguf.config_fields import layer_norm_config
from stoker.builder.checkpoint.gguf.metadata import Metadata


def _read_falcon(m: Metadata) -> dict[str, Any]:
    """Falcon. A second norm per layer, or several key-value heads, mean the decoder of 40B."""
    config = layer_norm_config(m, "layer_norm_epsilon")
    kv_heads, two_norms = config.pop("num_key_value_heads", 1), m.has_tensor("blk.0.attn_norm_2.weight")
    config |= {"activation": "gelu", "ffn_hidden_size": config.pop("intermediate_size"), "bias": m.has_bias("attn_qkv", "attn_q")}
    del config["hidden_act"]
    m.require_value("attention.key_length", config["hidden_size"] // config["num_attention_heads"])
    config.pop("head_dim", None)
    if kv_heads == 1 and not two_norms:
        return config | {"multi_query": True}
    return config | {"new_decoder_architecture": True, "num_kv_heads": kv_heads, "num_ln_in_parallel_attn": 2 if two_norms else 1}


def _names(tensors: Container[str]) -> ModuleNames:
    """With two norms, attn_norm_2 is that of the attention and attn_norm that of the MLP."""
    return {"attention_norm": "attn_norm_2", "mlp_norm": "attn_norm"} if "blk.0.attn_norm_2.weight" in tensors else {}


ARCHITECTURES = (
    GGUFArchitecture(
        name="falcon",
        model_types=("falcon",),
        read_config=_read_falcon,
        names=_names,
    ),
)
