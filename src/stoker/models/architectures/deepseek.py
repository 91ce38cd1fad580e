"""DeepSeek MoE, V2, and V3/R1.

DeepSeek MoE is Llama with routed and shared experts. V2 and V3 add multi-head latent attention and group-limited routing. The dense
DeepSeek LLM is a LlamaForCausalLM.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from stoker.core.model_config import MLAConfig, MLPConfig, ModelConfig, MoEConfig, NormConfig
from stoker.layers.rope import yarn_mscale
from stoker.models.architecture import Architecture, TensorNames, Transformed
from stoker.models.architectures.gemma import LANGUAGE_MODEL_PREFIXES
from stoker.models.architectures.llama import IGNORED, llama_config, llama_names
from stoker.models.config_fields import (
    read_activation,
    read_max_positions,
    read_rope,
    replace_fields,
    require_values,
    value_or,
    with_defaults,
)


def with_experts(config: ModelConfig, hf: dict[str, Any], **moe: Any) -> ModelConfig:
    """A copy of `config` with experts in every moe_layer_freq-th layer from first_k_dense_replace on.

    `moe` are further fields of MoEConfig.
    """
    size, act = hf["moe_intermediate_size"], read_activation(hf)
    shared = hf.get("n_shared_experts")
    mlp = MoEConfig(
        num_experts=hf["n_routed_experts"],
        top_k=hf["num_experts_per_tok"],
        expert=MLPConfig(size=size, activation=act),
        shared=MLPConfig(size=size * shared, activation=act) if shared else None,
        **moe,
    )
    first, step = hf.get("first_k_dense_replace", 0), hf.get("moe_layer_freq", 1)
    return replace_fields(config, layer=lambda i: {"mlp": mlp} if i >= first and i % step == 0 else {})


@with_defaults(
    vocab_size=102400, moe_intermediate_size=1407, n_routed_experts=None, norm_topk_prob=False,
    scoring_func="softmax",
)  # fmt: skip
def deepseek_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a DeepSeek MoE checkpoint, from `hf`, the data of its config.json."""
    config = llama_config(hf, architecture="DeepseekForCausalLM")
    if hf["n_routed_experts"] is None:
        return config
    return with_experts(config, hf, score=hf["scoring_func"], renormalize=bool(hf["norm_topk_prob"]))


@with_defaults(
    vocab_size=102400, moe_intermediate_size=1407, n_shared_experts=2, n_routed_experts=64,
    routed_scaling_factor=1.0, kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64, v_head_dim=128, qk_nope_head_dim=128,
    topk_method="greedy", norm_topk_prob=False,
)  # fmt: skip
def deepseek2_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a DeepSeek V2 checkpoint, from `hf`, the data of its config.json."""
    require_values(hf, rope_interleave=True)
    limited = hf["topk_method"] == "group_limited_greedy"
    require_values(hf, scoring_func="softmax", topk_method="group_limited_greedy" if limited else "greedy")
    config = latent_attention_config(hf, "DeepseekV2ForCausalLM")
    renormalize = bool(hf["norm_topk_prob"])  # V2 either renormalizes the weights or scales them
    groups = {"num_groups": hf["n_group"], "top_groups": hf["topk_group"]} if limited else {}
    return with_experts(config, hf, renormalize=renormalize, scale=1.0 if renormalize else float(hf["routed_scaling_factor"]), **groups)


@with_defaults(
    vocab_size=129280, hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048, num_hidden_layers=61,
    num_attention_heads=128, n_shared_experts=1, n_routed_experts=256, routed_scaling_factor=2.5, kv_lora_rank=512, q_lora_rank=1536,
    qk_rope_head_dim=64, v_head_dim=128, qk_nope_head_dim=128, n_group=8, topk_group=4, num_experts_per_tok=8,
    first_k_dense_replace=3, norm_topk_prob=True, max_position_embeddings=4096, rope_interleave=True,
)  # fmt: skip
def deepseek3_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a DeepSeek V3 or R1 checkpoint, from `hf`, the data of its config.json."""
    return with_corrected_experts(latent_attention_config(hf, "DeepseekV3ForCausalLM"), hf)


def kimi_k25_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of the language model of Kimi K2.5: DeepSeek V3 in the text_config of a multimodal checkpoint."""
    text = value_or(hf, "text_config", {})
    config = deepseek3_config(text)
    tied = bool(value_or(hf, "tie_word_embeddings", value_or(text, "tie_word_embeddings", True)))
    return msgspec.structs.replace(config, architecture="Kimi_K25ForConditionalGeneration", tie_head=tied)


def with_corrected_experts(config: ModelConfig, hf: dict[str, Any]) -> ModelConfig:
    """`with_experts` and the routing of DeepSeek V3: sigmoid scores with a correction bias, and groups by their two best experts.

    Raises CheckpointError for another routing.
    """
    require_values(hf, scoring_func="sigmoid", topk_method="noaux_tc")
    return with_experts(config, hf, **corrected_routing(hf))


def corrected_routing(hf: dict[str, Any]) -> dict[str, Any]:
    """The fields of MoEConfig of the routing of DeepSeek V3: how experts are scored and chosen."""
    return {
        "score": "sigmoid",
        "renormalize": bool(hf["norm_topk_prob"]),
        "scale": float(hf["routed_scaling_factor"]),
        "correction_bias": True,
        "num_groups": hf["n_group"],
        "top_groups": hf["topk_group"],
        "group_score": "top2",
    }


def latent_attention_config(hf: dict[str, Any], architecture: str) -> ModelConfig:
    """The ModelConfig of Llama with multi-head latent attention in every layer, and dense MLPs."""
    # Some files set head_dim to qk_rope_head_dim, and others leave it out. Latent attention uses the keys below instead.
    config = llama_config(hf | {"head_dim": hf["qk_rope_head_dim"], "num_key_value_heads": None}, architecture=architecture)
    size, bias = hf["qk_rope_head_dim"], bool(hf.get("attention_bias", False))
    rope = read_rope(hf, dim=size, interleaved=bool(hf.get("rope_interleave", True)))
    scale = (hf["qk_nope_head_dim"] + size) ** -0.5
    if rope.scaling == "yarn" and rope.mscale_all_dim:
        scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
    attention = MLAConfig(
        num_heads=config.layers[0].attention.num_heads,  # type: ignore[union-attr]
        q_rank=hf["q_lora_rank"],
        kv_rank=hf["kv_lora_rank"],
        nope_size=hf["qk_nope_head_dim"],
        rope_size=size,
        v_size=hf["v_head_dim"],
        rope=rope,
        norm=NormConfig(eps=1e-6),
        scale=scale,
        down_bias=bias,
        out_bias=bias,
    )
    layers = tuple(msgspec.structs.replace(layer, attention=attention) for layer in config.layers)
    return msgspec.structs.replace(config, layers=layers, max_positions=read_max_positions(hf, rope))


def deepseek_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of DeepSeek MoE that make each engine module, by engine name; see `TensorNames`."""
    mlp = "model.layers.{i}.mlp"
    return llama_names(config) | {
        "layers.{i}.mlp.router": f"{mlp}.gate",
        "layers.{i}.mlp.correction": f"{mlp}.gate.e_score_correction_bias",
        "layers.{i}.mlp.experts.up": (f"{mlp}.experts.{{e}}.gate_proj", f"{mlp}.experts.{{e}}.up_proj"),
        "layers.{i}.mlp.experts.down": f"{mlp}.experts.{{e}}.down_proj",
        "layers.{i}.mlp.shared.up": (f"{mlp}.shared_experts.gate_proj", f"{mlp}.shared_experts.up_proj"),
        "layers.{i}.mlp.shared.down": f"{mlp}.shared_experts.down_proj",
    }


def latent_attention_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of DeepSeek V2, V3 or R1 that make each engine module, by engine name; see `TensorNames`."""
    attention = "model.layers.{i}.self_attn"
    no_query_rank = config.layers[0].attention.q_rank is None  # type: ignore[union-attr]
    kv_down = f"{attention}.kv_a_proj_with_mqa"
    return deepseek_names(config) | {
        "layers.{i}.attention.down": kv_down if no_query_rank else (f"{attention}.q_a_proj", kv_down),
        "layers.{i}.attention.q": f"{attention}.q_proj" if no_query_rank else f"{attention}.q_b_proj",
        "layers.{i}.attention.q_norm": f"{attention}.q_a_layernorm",
        "layers.{i}.attention.kv_norm": f"{attention}.kv_a_layernorm",
        "layers.{i}.attention.k_up": Transformed(
            (f"{attention}.kv_b_proj.weight",), _k_up, _keys_and_values, ("layers.{i}.attention.v_up",)
        ),
        "layers.{i}.attention.v_up": Transformed((f"{attention}.kv_b_proj.weight",), _v_up, partners=("layers.{i}.attention.k_up",)),
    }


def _k_up(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """The rows of kv_b_proj that compute keys: [heads, nope_size, kv_rank]."""
    return _by_head(tensors[0], config)[:, : config.layers[0].attention.nope_size]  # type: ignore[union-attr]


def _v_up(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """The rows of kv_b_proj that compute values: [heads, v_size, kv_rank]."""
    return _by_head(tensors[0], config)[:, config.layers[0].attention.nope_size :]  # type: ignore[union-attr]


def _keys_and_values(tensors: list[Tensor], config: ModelConfig) -> tuple[Tensor, ...]:
    """kv_b_proj from `_k_up` and `_v_up`."""
    return (torch.cat(tensors, dim=1).flatten(0, 1),)


def _by_head(fused: Tensor, config: ModelConfig) -> Tensor:
    """kv_b_proj [heads × (nope_size + v_size), kv_rank] → [heads, nope_size + v_size, kv_rank]."""
    rows: Tensor = fused.unflatten(0, (config.layers[0].attention.num_heads, -1))  # type: ignore[union-attr]
    return rows


# kv_a_proj_with_mqa has the latent vector and the rotary key
SOURCE_PARTS = {"layers.{i}.attention.down": (1, 2)}
_TENSOR_PARALLEL = "any; each rank holds the whole latent cache"
ARCHITECTURES = (
    Architecture(
        name="DeepseekForCausalLM",
        read_config=deepseek_config,
        tensor_names=deepseek_names,
        family="DeepSeek MoE",
        oracle="the same weights as Qwen2-MoE of transformers",
        model_types=("deepseek",),
        ignored_tensors=IGNORED,
    ),
    Architecture(
        name="DeepseekV2ForCausalLM",
        read_config=deepseek2_config,
        tensor_names=latent_attention_names,
        source_parts=SOURCE_PARTS,
        family="DeepSeek V2, V2-Lite",
        oracle="transformers",
        model_types=("deepseek_v2",),
        ignored_tensors=IGNORED,
        tensor_parallel=_TENSOR_PARALLEL,
        ignored_keys=("n_group", "topk_group", "qk_head_dim"),
    ),
    Architecture(
        name="DeepseekV3ForCausalLM",
        read_config=deepseek3_config,
        tensor_names=latent_attention_names,
        source_parts=SOURCE_PARTS,
        family="DeepSeek V3, R1, Kimi K2",
        oracle="transformers",
        model_types=("deepseek_v3", "kimi_k2"),
        ignored_tensors=(*IGNORED, "model.layers.61.*"),  # the multi-token prediction layer of the published checkpoints
        tensor_parallel=_TENSOR_PARALLEL,
        ignored_keys=("num_nextn_predict_layers", "qk_head_dim"),
    ),
    Architecture(
        name="Kimi_K25ForConditionalGeneration",
        read_config=kimi_k25_config,
        tensor_names=latent_attention_names,
        source_parts=SOURCE_PARTS,
        family="Kimi K2.5 (text)",
        oracle="transformers",
        model_types=("kimi_k25",),
        aliases=("KimiK25ForConditionalGeneration",),
        ignored_tensors=(*IGNORED, "*vision_tower.*", "*mm_projector.*", "model.layers.61.*"),
        tensor_renames=(*LANGUAGE_MODEL_PREFIXES, (r"^model\.blocks\.", "model.layers.")),  # transformers 5 writes blocks
        tensor_parallel=_TENSOR_PARALLEL,
        ignored_keys=(
            "num_nextn_predict_layers", "qk_head_dim", "vision_config*", "projection_hidden_size", "projection_layer_norm_eps",
            "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "media_placeholder_token_id",
            "use_unified_vision_chunk", "video_placeholder",
        ),
    ),
)  # fmt: skip
