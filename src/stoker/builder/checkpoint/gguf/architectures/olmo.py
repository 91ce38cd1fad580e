"""olmo, olmo2 (also OLMo 3), olmoe, exaone and exaone4."""

from __future__ import annotations

from typing import Any

from stoker.builder.checkpoint.gguf.architecture import GGUFArchitecture
from stoker.builder.checkpoint.gguf.config_fields import NORM_EPSILON, RMS_EPSILON, expert_config, layer_types, llama_config
from stoker.builder.checkpoint.gguf.metadata import Metadata


def _read_olmo(m: Metadata) -> dict[str, Any]:
    """OLMo 1, whose norms have no weights."""
    m.require_value(NORM_EPSILON, 1e-5)
    clip = m.get("attention.clamp_kqv", float) or None
    return llama_config(m, norm_key=NORM_EPSILON) | {"clip_qkv": clip, "attention_bias": m.has_bias("attn_q", "attn_qkv")}


def _read_olmo2(m: Metadata) -> dict[str, Any]:
    """OLMo 2, or OLMo 3 if there is a sliding window: its scaling applies to the layers with full attention."""
    config = llama_config(m) | {"attention_bias": m.has_bias("attn_q", "attn_qkv")}
    window = m.get("attention.sliding_window", int, 0)
    if not window:
        return config
    m.require_value("rope.freq_base_swa", config.get("rope_theta", 10000.0))
    local = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    wide = config.pop("rope_scaling", {"rope_type": "default"}) | {"rope_theta": local["rope_theta"]}
    config["rope_parameters"] = {"full_attention": wide, "sliding_attention": local}
    return config | {"model_type": "olmo3", "sliding_window": window, "layer_types": layer_types(m, 4)}


def _read_olmoe(m: Metadata) -> dict[str, Any]:
    """OLMoE."""
    config, experts = llama_config(m), expert_config(m)
    config["intermediate_size"] = experts.pop("moe_intermediate_size")
    m.require_value("attention.clamp_kqv", 0.0)
    config |= experts | {"attention_bias": m.has_bias("attn_q", "attn_qkv")}
    return config | {"norm_topk_prob": m.get("expert_weights_norm", bool, False)}


def _read_exaone(m: Metadata) -> dict[str, Any]:
    """EXAONE 3 and 3.5. Newer converters write the epsilon of its RMS norms under the name that its config.json has."""
    return llama_config(m, norm_key=RMS_EPSILON if m.value(RMS_EPSILON) is not None else NORM_EPSILON)


def _read_exaone4(m: Metadata) -> dict[str, Any]:
    """EXAONE 4. With a sliding window, layers with full attention have no rotary embedding."""
    window = m.get("attention.sliding_window", int, 0) or None
    types = layer_types(m, 4) if window else ["full_attention"] * m.require("block_count", int)
    return llama_config(m) | {"sliding_window": window, "layer_types": types}


ARCHITECTURES = (
    GGUFArchitecture(name="olmo", model_types=("olmo",), read_config=_read_olmo, permuted=True),
    GGUFArchitecture(name="olmo2", model_types=("olmo2", "olmo3"), read_config=_read_olmo2),
    GGUFArchitecture(name="olmoe", model_types=("olmoe",), read_config=_read_olmoe),
    GGUFArchitecture(name="exaone", model_types=("exaone",), read_config=_read_exaone),
    GGUFArchitecture(name="exaone4", model_types=("exaone4",), read_config=_read_exaone4),
)
