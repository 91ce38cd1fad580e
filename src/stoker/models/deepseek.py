"""DeepSeek MoE (Llama's attention, shared and routed experts), V2 and V3/R1 (latent attention, group-limited routing).

DeepSeek LLM is a LlamaForCausalLM.
"""

from __future__ import annotations

from typing import Any

import msgspec
from torch import Tensor

from stoker.core.model_config import MLAConfig, MLPConfig, ModelConfig, MoEConfig, NormConfig
from stoker.layers.rope import yarn_mscale
from stoker.models.architecture import Architecture, Custom, Names, register
from stoker.models.llama import IGNORED, llama_config, llama_names
from stoker.models.read import activation, defaults, positions, refuse, revise, rope


def with_experts(config: ModelConfig, hf: dict[str, Any], **moe: Any) -> ModelConfig:
    """Layers from first_k_dense_replace on, every moe_layer_freq-th, have experts."""
    size, act = hf["moe_intermediate_size"], activation(hf)
    shared = hf.get("n_shared_experts")
    mlp = MoEConfig(
        num_experts=hf["n_routed_experts"],
        top_k=hf["num_experts_per_tok"],
        expert=MLPConfig(size=size, activation=act),
        shared=MLPConfig(size=size * shared, activation=act) if shared else None,
        **moe,
    )
    first, every = hf.get("first_k_dense_replace", 0), hf.get("moe_layer_freq", 1)
    return revise(config, layer=lambda i: {"mlp": mlp} if i >= first and i % every == 0 else {})


@defaults(
    vocab_size=102400, moe_intermediate_size=1407, n_routed_experts=None, norm_topk_prob=False,
    scoring_func="softmax",
)  # fmt: skip
def deepseek_config(hf: dict[str, Any]) -> ModelConfig:
    config = llama_config(hf, architecture="DeepseekForCausalLM")
    if hf["n_routed_experts"] is None:
        return config
    return with_experts(config, hf, score=hf["scoring_func"], renormalize=bool(hf["norm_topk_prob"]))


@defaults(
    vocab_size=102400, moe_intermediate_size=1407, n_shared_experts=2, n_routed_experts=64,
    routed_scaling_factor=1.0, kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64, v_head_dim=128, qk_nope_head_dim=128,
    topk_method="greedy", norm_topk_prob=False,
)  # fmt: skip
def deepseek2_config(hf: dict[str, Any]) -> ModelConfig:
    limited = hf["topk_method"] == "group_limited_greedy"
    refuse(hf, scoring_func="softmax", topk_method="group_limited_greedy" if limited else "greedy")
    config = latent(hf, "DeepseekV2ForCausalLM")
    normed = bool(hf["norm_topk_prob"])  # weights are either normalised or scaled
    groups = {"num_groups": hf["n_group"], "top_groups": hf["topk_group"]} if limited else {}
    return with_experts(config, hf, renormalize=normed, scale=1.0 if normed else float(hf["routed_scaling_factor"]), **groups)


@defaults(
    vocab_size=129280, hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048, num_hidden_layers=61,
    num_attention_heads=128, n_shared_experts=1, n_routed_experts=256, routed_scaling_factor=2.5, kv_lora_rank=512, q_lora_rank=1536,
    qk_rope_head_dim=64, v_head_dim=128, qk_nope_head_dim=128, n_group=8, topk_group=4, num_experts_per_tok=8,
    first_k_dense_replace=3, norm_topk_prob=True, max_position_embeddings=4096, rope_interleave=True,
)  # fmt: skip
def deepseek3_config(hf: dict[str, Any]) -> ModelConfig:
    refuse(hf, scoring_func="sigmoid", topk_method="noaux_tc")
    return with_experts(
        latent(hf, "DeepseekV3ForCausalLM"),
        hf,
        score="sigmoid",
        renormalize=bool(hf["norm_topk_prob"]),
        scale=float(hf["routed_scaling_factor"]),
        correction_bias=True,
        num_groups=hf["n_group"],
        top_groups=hf["topk_group"],
        group_score="top2",
    )


def latent(hf: dict[str, Any], architecture: str) -> ModelConfig:
    """Llama with latent attention in every layer."""
    # head_dim is qk_rope_head_dim in some files; the sizes of latent attention have names of their own.
    config = llama_config(hf | {"head_dim": hf["qk_rope_head_dim"], "num_key_value_heads": None}, architecture=architecture)
    size, bias = hf["qk_rope_head_dim"], bool(hf.get("attention_bias", False))
    turned = rope(hf, dim=size, interleaved=hf.get("rope_interleave", True))
    scale = (hf["qk_nope_head_dim"] + size) ** -0.5
    if turned.scaling == "yarn" and turned.mscale_all_dim:
        scale *= yarn_mscale(turned.factor, turned.mscale_all_dim) ** 2
    attention = MLAConfig(
        num_heads=config.layers[0].attention.num_heads,
        q_rank=hf["q_lora_rank"],
        kv_rank=hf["kv_lora_rank"],
        nope_size=hf["qk_nope_head_dim"],
        rope_size=size,
        v_size=hf["v_head_dim"],
        rope=turned,
        norm=NormConfig(eps=1e-6),
        scale=scale,
        down_bias=bias,
        out_bias=bias,
    )
    layers = tuple(msgspec.structs.replace(layer, attention=attention) for layer in config.layers)
    return msgspec.structs.replace(config, layers=layers, max_positions=positions(hf, turned))


def deepseek_names(config: ModelConfig) -> Names:
    mlp = "model.layers.{i}.mlp"
    return llama_names(config) | {
        "layers.{i}.mlp.router": f"{mlp}.gate",
        "layers.{i}.mlp.correction": f"{mlp}.gate.e_score_correction_bias",
        "layers.{i}.mlp.experts.up": (f"{mlp}.experts.{{e}}.gate_proj", f"{mlp}.experts.{{e}}.up_proj"),
        "layers.{i}.mlp.experts.down": f"{mlp}.experts.{{e}}.down_proj",
        "layers.{i}.mlp.shared.up": (f"{mlp}.shared_experts.gate_proj", f"{mlp}.shared_experts.up_proj"),
        "layers.{i}.mlp.shared.down": f"{mlp}.shared_experts.down_proj",
    }


def latent_names(config: ModelConfig) -> Names:
    attention = "model.layers.{i}.self_attn"
    whole = config.layers[0].attention.q_rank is None  # type: ignore[union-attr]
    kv_down = f"{attention}.kv_a_proj_with_mqa"
    return deepseek_names(config) | {
        "layers.{i}.attention.down": kv_down if whole else (f"{attention}.q_a_proj", kv_down),
        "layers.{i}.attention.q": f"{attention}.q_proj" if whole else f"{attention}.q_b_proj",
        "layers.{i}.attention.q_norm": f"{attention}.q_a_layernorm",
        "layers.{i}.attention.kv_norm": f"{attention}.kv_a_layernorm",
        "layers.{i}.attention.k_up": Custom((f"{attention}.kv_b_proj.weight",), _k_up),
        "layers.{i}.attention.v_up": Custom((f"{attention}.kv_b_proj.weight",), _v_up),
    }


def _k_up(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    return _up(tensors[0], config)[:, : config.layers[0].attention.nope_size]  # type: ignore[union-attr]


def _v_up(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    return _up(tensors[0], config)[:, config.layers[0].attention.nope_size :]  # type: ignore[union-attr]


def _up(fused: Tensor, config: ModelConfig) -> Tensor:
    """kv_b_proj as [heads, nope + v, rank]."""
    return fused.unflatten(0, (config.layers[0].attention.num_heads, -1))


_HEADS = "any; the latent cache is whole on each rank"
register(
    Architecture(
        "DeepseekForCausalLM",
        deepseek_config,
        deepseek_names,
        "DeepSeek MoE",
        "the weights re-laid as Qwen2-MoE of transformers",
        ("deepseek",),
        ignored=IGNORED,
    ),
    Architecture(
        "DeepseekV2ForCausalLM",
        deepseek2_config,
        latent_names,
        "DeepSeek V2, V2-Lite",
        "transformers",
        ("deepseek_v2",),
        ignored=IGNORED,
        tensor_parallel=_HEADS,
    ),
    Architecture(
        "DeepseekV3ForCausalLM",
        deepseek3_config,
        latent_names,
        "DeepSeek V3, R1",
        "transformers",
        ("deepseek_v3",),
        ignored=(*IGNORED, "model.layers.61.*"),  # the published checkpoints carry a layer that predicts a second token
        tensor_parallel=_HEADS,
    ),
)
