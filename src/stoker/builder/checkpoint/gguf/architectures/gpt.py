"""gpt2, gptj, gptneox, and starcoder. The converter stores plain weights [out, in] in place of those of Conv1D."""

from __future__ import annotations

from typing import Any

from stoker.builder.checkpoint.gguf.architecture import GGUFArchitecture
from stoker.builder.checkpoint.gguf.config_fields import gpt_config, layer_norm_config
from stoker.builder.checkpoint.gguf.metadata import Metadata


def _read_gpt2(m: Metadata) -> dict[str, Any]:
    """GPT-2."""
    m.require_value("attention.head_count_kv", m.value("attention.head_count"))
    return gpt_config(m) | {"activation_function": "gelu_new"}


def _read_starcoder(m: Metadata) -> dict[str, Any]:
    """StarCoder and SantaCoder, with one key-value head."""
    m.require_value("attention.head_count_kv", 1)
    return gpt_config(m) | {"activation_function": "gelu_pytorch_tanh", "multi_query": True}


def _read_gptj(m: Metadata) -> dict[str, Any]:
    """GPT-J."""
    m.require_value("attention.head_count_kv", m.value("attention.head_count"))
    m.require_value("rope.freq_base", 10000.0)
    m.require_value("rope.scaling.type", "none")
    return gpt_config(m) | {"rotary_dim": m.require("rope.dimension_count", int), "activation_function": "gelu_new"}


def _read_gpt_neox(m: Metadata) -> dict[str, Any]:
    """GPT-NeoX and Pythia."""
    config = layer_norm_config(m, partial_rotary=True)
    m.require_value("attention.head_count_kv", config.pop("num_key_value_heads", config["num_attention_heads"]))
    m.require_value("attention.key_length", config["hidden_size"] // config["num_attention_heads"])
    config.pop("head_dim", None)
    return config | {
        "hidden_act": "gelu",
        "use_parallel_residual": m.get("use_parallel_residual", bool, True),
        "attention_bias": m.has_bias("attn_qkv", "attn_q"),
    }


ARCHITECTURES = (
    GGUFArchitecture(name="gpt2", model_types=("gpt2",), read_config=_read_gpt2),
    GGUFArchitecture(name="starcoder", model_types=("gpt_bigcode",), read_config=_read_starcoder),
    GGUFArchitecture(name="gptj", model_types=("gptj",), read_config=_read_gptj),
    GGUFArchitecture(name="gptneox", model_types=("gpt_neox",), read_config=_read_gpt_neox),
)
