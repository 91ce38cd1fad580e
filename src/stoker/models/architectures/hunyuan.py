"""Hunyuan (dense) and Hunyuan-A13B: Llama with norms on queries and keys after the rotary embedding; A13B adds experts and a shared one."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import MLPConfig, ModelConfig, MoEConfig, NormConfig, RopeConfig
from stoker.models.architecture import Architecture, TensorNames
from stoker.models.architectures.llama import IGNORED, llama_config, llama_names
from stoker.models.config_fields import (
    read_activation,
    read_head_size,
    read_per_layer,
    read_rope,
    replace_fields,
    require_values,
    value_or,
    with_defaults,
)
from stoker.models.config_values import SIZE, each, either


@with_defaults(
    aliases={"attention_head_dim": "head_dim"}, vocab_size=290943, hidden_size=4096, intermediate_size=11008, num_attention_heads=32,
    rms_norm_eps=1e-5,
)  # fmt: skip
def hunyuan_config(hf: dict[str, Any], *, architecture: str = "HunYuanDenseV1ForCausalLM") -> ModelConfig:
    """The ModelConfig of a dense Hunyuan checkpoint, from `hf`, the data of its config.json."""
    require_values(
        hf, use_qk_norm=True, use_cla=False, use_mla=False, mlp_bias=False, norm_type="rms", use_rotary_pos_emb=True,
        position_embedding_xdrope=False,
    )  # fmt: skip
    if architecture == "HunYuanDenseV1ForCausalLM":
        require_values(hf, num_experts=1)
    return llama_config(
        hf,
        architecture=architecture,
        rope=_read_rope(hf, read_head_size(hf)),
        qk_norm=NormConfig(eps=hf["rms_norm_eps"]),
        qk_norm_after_rope=True,
    )


def _read_rope(hf: dict[str, Any], dim: int) -> RopeConfig:
    """The rotary settings. The files name a method `dynamic`, whose `alpha` multiplies the base whatever the length of a sequence is."""
    scaling = value_or(hf, "rope_scaling", value_or(hf, "rope_parameters", {}))
    alpha = scaling.get("alpha") if "dynamic" in (scaling.get("rope_type"), scaling.get("type")) else None
    if not alpha:
        return read_rope(hf, dim=dim)
    theta = value_or(scaling, "rope_theta", value_or(hf, "rope_theta", 10000.0))
    return RopeConfig(dim=dim, theta=float(theta * alpha ** (dim / (dim - 2))))


@with_defaults(
    aliases={"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"}, intermediate_size=11008, num_experts=1, moe_topk=1
)
def hunyuan_moe_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a Hunyuan-A13B checkpoint, from `hf`, the data of its config.json.

    Settings of experts are numbers, or lists with one number for each layer.
    """
    config = hunyuan_config(hf, architecture="HunYuanMoEV1ForCausalLM")
    layers, size, activation = config.num_layers, hf["intermediate_size"], read_activation(hf)
    require_values(
        hf, moe_layer_num_skipped=0, use_mixed_mlp_moe=True, group_limited_greedy=False, norm_topk_prob=True,
        num_shared_expert=_same_type(hf.get("num_shared_expert"), 1, layers),
        moe_intermediate_size=_same_type(hf.get("moe_intermediate_size"), size, layers),
    )  # fmt: skip

    num_experts, top_k = (read_per_layer(hf, key, layers) for key in ("num_experts", "moe_topk"))

    def experts(i: int) -> dict[str, Any]:
        """The MLP of layer number i."""
        moe = MoEConfig(
            num_experts=num_experts[i],
            top_k=top_k[i],
            expert=MLPConfig(size=size, activation=activation),
            shared=MLPConfig(size=size, activation=activation),
        )
        return {"mlp": moe}

    return replace_fields(config, layer=experts)


def _same_type(value: Any, expected: int, layers: int) -> int | list[int]:
    """`expected` as a number, or as a list with one number for each layer, as `value` is."""
    return [expected] * layers if isinstance(value, list) else expected


def hunyuan_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of dense Hunyuan that make each engine module, by engine name; see `TensorNames`."""
    attention = "model.layers.{i}.self_attn"
    return llama_names(config) | {
        "layers.{i}.attention.q_norm": f"{attention}.query_layernorm",
        "layers.{i}.attention.k_norm": f"{attention}.key_layernorm",
    }


def hunyuan_moe_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of Hunyuan-A13B that make each engine module, by engine name; see `TensorNames`."""
    moe = "model.layers.{i}.mlp"
    return hunyuan_names(config) | {
        "layers.{i}.mlp.router": f"{moe}.gate.wg",
        "layers.{i}.mlp.experts.up": (f"{moe}.experts.{{e}}.gate_proj", f"{moe}.experts.{{e}}.up_proj"),
        "layers.{i}.mlp.experts.down": f"{moe}.experts.{{e}}.down_proj",
        "layers.{i}.mlp.shared.up": (f"{moe}.shared_mlp.gate_proj", f"{moe}.shared_mlp.up_proj"),
        "layers.{i}.mlp.shared.down": f"{moe}.shared_mlp.down_proj",
    }


# Token ids, settings of images and classification, and settings of blocks that the switches above turn off.
_IGNORED_KEYS = (
    "eod_token_id", "im_*_id", "text_start_id", "text_end_id", "mask_init_id", "pad_id", "org_vocab_size", "add_classification_head",
    "class_num", "dense_list", "pool_type", "cla_share_factor", "*_lora_rank", "qk_*_head_dim", "v_head_dim", "n_group", "topk_group",
    "routed_scaling_factor", "moe_drop_tokens", "moe_random_routing_dropped_token", "anyres_*", "vit_*", "image_*", "video_*",
    "skip_cls_token", "max_image_size", "max_video_size", "min_image_size", "min_video_size", "unpad_*", "xdrope_section",
)  # fmt: skip
# An alpha replaces all other settings of the method `dynamic`.
_ALPHA_KEYS = tuple(f"rope_*.{key}" for key in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"))
ARCHITECTURES = (
    Architecture(
        name="HunYuanDenseV1ForCausalLM",
        read_config=hunyuan_config,
        tensor_names=hunyuan_names,
        family="Hunyuan 0.5B to 7B (dense)",
        oracle="transformers",
        model_types=("hunyuan_v1_dense",),
        ignored_tensors=IGNORED,
        ignored_keys=(*_IGNORED_KEYS, *_ALPHA_KEYS),
    ),
    Architecture(
        name="HunYuanMoEV1ForCausalLM",
        read_config=hunyuan_moe_config,
        tensor_names=hunyuan_moe_names,
        family="Hunyuan-A13B",
        oracle="transformers",
        model_types=("hunyuan_v1_moe",),
        ignored_tensors=IGNORED,
        kinds=dict.fromkeys(("num_experts", "moe_topk", "num_shared_expert", "moe_intermediate_size"), either(SIZE, each(SIZE))),
        ignored_keys=(*_IGNORED_KEYS, *_ALPHA_KEYS),
    ),
)
