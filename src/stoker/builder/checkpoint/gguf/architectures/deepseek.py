"""deepseek (DeepSeek MoE) and deepseek2 (DeepSeek V2, V3, R1 and Kimi K2)."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch import Tensor

from stoker.builder.checkpoint.gguf.architecture import GGUFArchitecture, ModuleNames
from stoker.builder.checkpoint.gguf.config_fields import expert_config, llama_config, shared_expert_width
from stoker.builder.checkpoint.gguf.metadata import Metadata
from stoker.builder.checkpoint.gguf.rope import rope_scaling
from stoker.core.model_config import ModelConfig
from stoker.models.architecture import Transformed
from stoker.models.architectures.deepseek import latent_attention_names

_SIGMOID = 2  # of expert_gating_func; 1 is softmax


def _experts(m: Metadata) -> dict[str, Any]:
    """The keys of routed and shared experts."""
    experts = expert_config(m)
    width = experts["moe_intermediate_size"]
    shared = shared_expert_width(m) or 0
    if width and shared != width * m.get("expert_shared_count", int, shared // width):
        raise m.unsupported("expert_shared_count", m.value("expert_shared_count"), f"The shared expert has {shared} features.")
    return {
        "n_routed_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "moe_intermediate_size": width,
        "n_shared_experts": shared // width if width and shared else None,
        "first_k_dense_replace": m.get("leading_dense_block_count", int, 0),
        "norm_topk_prob": m.get("expert_weights_norm", bool, False),
    }


def _read_deepseek(m: Metadata) -> dict[str, Any]:
    """DeepSeek MoE."""
    m.require_value("expert_weights_scale", 1.0, 0.0)
    return llama_config(m) | _experts(m)


def _read_deepseek2(m: Metadata) -> dict[str, Any]:
    """DeepSeek V3 if experts are scored with a sigmoid, otherwise V2."""
    nope, rope = m.value("attention.key_length_mla", m.value("attention.key_length")), m.require("rope.dimension_count", int)
    config: dict[str, Any] = {
        "vocab_size": m.tensors.get("token_embd.weight", (0,))[0],
        "tie_word_embeddings": not m.has_tensor("output.weight"),
        "hidden_act": "silu",
        "kv_lora_rank": m.require("attention.kv_lora_rank", int),
        "q_lora_rank": m.get("attention.q_lora_rank", int) or None,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": nope - rope if type(nope) is int else nope,
        "v_head_dim": m.value("attention.value_length_mla", m.value("attention.value_length")),
    }
    keys = {
        "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads", "rope.freq_base": "rope_theta",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    }  # fmt: skip
    config |= {name: value for key, name in keys.items() if (value := m.value(key)) is not None} | _experts(m)
    for ignored in ("attention.head_count_kv", "attention.key_length", "attention.value_length"):
        m.value(ignored)  # those of the computation in the latent space
    config["num_hidden_layers"] -= m.get("nextn_predict_layers", int, 0)
    scale = m.get("expert_weights_scale", float, 1.0)
    config |= {"routed_scaling_factor": scale or 1.0, "n_group": m.get("expert_group_count", int, 1)}
    config["topk_group"] = m.get("expert_group_used_count", int, 1)
    if (scaling := rope_scaling(m)) is not None:
        log_multiplier = m.get("rope.scaling.yarn_log_multiplier", float, 0.0)
        config["rope_scaling"] = scaling | {"mscale": log_multiplier * 10, "mscale_all_dim": log_multiplier * 10}
    if m.get("expert_gating_func", int, 1) == _SIGMOID:
        return config | {"model_type": "deepseek_v3"}
    m.require_value("expert_gating_func", 1, 0)
    return config | {"topk_method": "group_limited_greedy" if config["n_group"] > 1 else "greedy"}


def _names(tensors: Container[str]) -> ModuleNames:
    """The modules of latent attention. Newer files have the up-projection of keys transposed, and apart from that of values."""
    without_query_rank = "blk.0.attn_q.weight" in tensors
    names: dict[str, str | tuple[str, ...] | Transformed] = {
        "attention.down": "attn_kv_a_mqa" if without_query_rank else ("attn_q_a", "attn_kv_a_mqa"),
        "attention.q": "attn_q" if without_query_rank else "attn_q_b",
        "attention.q_norm": "attn_q_a_norm",
        "attention.kv_norm": "attn_kv_a_norm",
        "attention.k_up": Transformed(("attn_k_b.weight",), _transposed),
        "attention.v_up": "attn_v_b.weight",
    }
    return names if "blk.0.attn_k_b.weight" in tensors else names | _FUSED_UP


def _transposed(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """The up-projection of keys [heads, nope_size, kv_rank] from [heads, kv_rank, nope_size]."""
    return tensors[0].transpose(1, 2)


def _fused_up(key: str) -> Transformed:
    """A part of kv_b_proj, which is computed as for a Hugging Face checkpoint."""

    def transform(tensors: list[Tensor], config: ModelConfig) -> Tensor:
        """The part of the rows of kv_b_proj."""
        found = latent_attention_names(config)[f"layers.{{i}}.attention.{key}"]
        assert isinstance(found, Transformed)
        return found.transform(tensors, config)

    return Transformed(("attn_kv_b.weight",), transform)


_FUSED_UP = {"attention.k_up": _fused_up("k_up"), "attention.v_up": _fused_up("v_up")}
ARCHITECTURES = (
    GGUFArchitecture(name="deepseek", model_types=("deepseek",), read_config=_read_deepseek, permuted=True),
    GGUFArchitecture(
        name="deepseek2",
        model_types=("deepseek_v2", "deepseek_v3"),
        read_config=_read_deepseek2,
        names=_names,
        ignored_tensors=("blk.*.nextn.*",),
    ),
)
