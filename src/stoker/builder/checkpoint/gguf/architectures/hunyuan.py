"""hunyuan-dense and hunyuan-moe: norms on queries and keys after the rotary embedding, whose base contains the alpha of config.json."""

from __future__ import annotations

from typing import Any

from stoker.builder.checkpoint.gguf.architecture import GGUFArchitecture
from stoker.builder.checkpoint.gguf.config_fields import expert_config, llama_config, shared_expert_width
from stoker.builder.checkpoint.gguf.metadata import Metadata


def _read_hunyuan(m: Metadata) -> dict[str, Any]:
    """Hunyuan (dense)."""
    return llama_config(m) | {"attention_bias": m.has_bias("attn_q", "attn_qkv")}


def _read_hunyuan_moe(m: Metadata) -> dict[str, Any]:
    """Hunyuan-A13B. The shared expert is as wide as the others."""
    experts, shared = expert_config(m), shared_expert_width(m)
    width = experts["moe_intermediate_size"]
    if shared != width:
        raise m.unsupported("expert_shared_feed_forward_length", shared, f"The width of the other experts, {width}, is.")
    m.require_value("expert_shared_count", 1)
    sizes = {"num_experts": experts["num_experts"], "moe_topk": experts["num_experts_per_tok"], "intermediate_size": width}
    return _read_hunyuan(m) | sizes


ARCHITECTURES = (
    GGUFArchitecture(name="hunyuan-dense", model_types=("hunyuan_v1_dense",), read_config=_read_hunyuan),
    GGUFArchitecture(name="hunyuan-moe", model_types=("hunyuan_v1_moe",), read_config=_read_hunyuan_moe),
)
