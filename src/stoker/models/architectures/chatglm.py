"""ChatGLM 2, 3 and GLM-4: Llama's block with grouped queries, and interleaved rotary embeddings on half of each head.

`ChatGLMModel` reads the publisher's checkpoints, `GlmForCausalLM` and `Glm4ForCausalLM` those in the layout of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stoker.core.model_config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, NormConfig, RopeConfig
from stoker.models.architecture import Architecture, TensorNames, Transformed
from stoker.models.architectures.glm import is_chatglm1
from stoker.models.architectures.llama import IGNORED, llama_config, llama_names
from stoker.models.config_fields import read_head_size, read_rope, replace_fields, require_values, with_defaults
from stoker.models.tensor_transforms import group_qkv, ungroup_qkv


def is_chatglm2(hf: dict[str, Any]) -> bool:
    """Whether the model is ChatGLM 2 rather than ChatGLM 3 or GLM-4: only the version option or `_name_or_path` contains this."""
    return "chatglm2" in (str(hf.get("chatglm_model_version", "")) or str(hf.get("_name_or_path", "")))


@with_defaults(
    num_layers=28, padded_vocab_size=65024, hidden_size=4096, ffn_hidden_size=13696, kv_channels=128, num_attention_heads=32,
    seq_length=2048, layernorm_epsilon=1e-5, rmsnorm=True, apply_residual_connection_post_layernorm=False, post_layer_norm=True,
    add_bias_linear=False, add_qkv_bias=False, multi_query_attention=False, multi_query_group_num=1, rope_ratio=1,
)  # fmt: skip
def chatglm_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a ChatGLM 2, 3 or GLM-4 checkpoint, from `hf`, the data of its config.json."""
    require_values(hf, original_rope=True)
    heads, size, bias = hf["num_attention_heads"], hf["kv_channels"], bool(hf["add_bias_linear"])
    norm = NormConfig(kind="rms" if hf["rmsnorm"] else "layer", eps=hf["layernorm_epsilon"], bias=not hf["rmsnorm"])
    attention = AttentionConfig(
        num_heads=heads,
        num_kv_heads=hf["multi_query_group_num"] if hf["multi_query_attention"] else heads,
        head_size=size,
        qkv_bias=bias or bool(hf["add_qkv_bias"]),
        out_bias=bias,
        rope=half_rotary(hf, size // 2),
    )
    layer = LayerConfig(
        attention=attention,
        mlp=MLPConfig(size=hf["ffn_hidden_size"], up_bias=bias, down_bias=bias),
        norm=norm,
        layout="add_norm" if hf["apply_residual_connection_post_layernorm"] else "pre",
    )
    return ModelConfig(
        architecture="ChatGLMModel",
        vocab_size=hf["padded_vocab_size"],
        hidden_size=hf["hidden_size"],
        max_positions=hf["seq_length"],
        layers=(layer,) * hf["num_layers"],
        norm=norm if hf["post_layer_norm"] else None,
        tie_head=bool(hf.get("tie_word_embeddings", False)),
    )


def half_rotary(hf: dict[str, Any], dim: int) -> RopeConfig:
    """Rotary settings for the first `dim` features. ChatGLM 2 divides positions by rope_ratio; its successors multiply the base by it."""
    ratio = float(hf["rope_ratio"])
    if ratio != 1 and is_chatglm2(hf):
        return RopeConfig(dim=dim, interleaved=True, scaling="linear", factor=ratio, original_max_positions=hf["seq_length"])
    return RopeConfig(dim=dim, interleaved=True, theta=10000.0 * ratio)


def chatglm_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of ChatGLM 2, 3 or GLM-4 that make each engine module, by engine name; see `TensorNames`."""
    layer = "transformer.encoder.layers.{i}"
    attention = config.layers[0].attention
    fused = f"{layer}.self_attention.query_key_value"
    by_head = isinstance(attention, AttentionConfig) and attention.num_kv_heads == attention.num_heads
    return {
        "embed": "transformer.embedding.word_embeddings",
        "norm": "transformer.encoder.final_layernorm",
        "head": "transformer.output_layer",
        "layers.{i}.attention_norm": f"{layer}.input_layernorm",
        "layers.{i}.mlp_norm": f"{layer}.post_attention_layernorm",
        "layers.{i}.attention.qkv": Transformed((fused,), ungroup_qkv, group_qkv, moves="rows") if by_head else fused,
        "layers.{i}.attention.out": f"{layer}.self_attention.dense",
        "layers.{i}.mlp.up": f"{layer}.mlp.dense_h_to_4h",
        "layers.{i}.mlp.down": f"{layer}.mlp.dense_4h_to_h",
    }


def model_versions(hf: dict[str, Any]) -> tuple[str, ...]:
    """The values of chatglm_model_version that agree with a config.json."""
    if hf.get("padded_vocab_size", 65024) > 100000:
        return ("glm4", "glm_4_9b", "glm_4_9b_chat")
    is_long = hf.get("rope_ratio", 1) != 1
    names = ("chatglm3_6b_32k", "chatglm2_6b_32k") if is_long else ("chatglm3_6b", "chatglm3_6b_base", "chatglm2_6b")
    family = next((name for name in ("chatglm2", "chatglm3") if name in str(hf.get("_name_or_path", ""))), "")
    return tuple(name for name in (*names, "chatglm3", "chatglm2") if name.startswith(family))


@with_defaults(
    vocab_size=151552, intermediate_size=13696, num_hidden_layers=40, num_key_value_heads=2, head_dim=128,
    max_position_embeddings=131072, rms_norm_eps=1.5625e-07, attention_bias=True,
)  # fmt: skip
def glm_config(hf: dict[str, Any], *, architecture: str = "GlmForCausalLM") -> ModelConfig:
    """The ModelConfig of a GLM-4 in transformers' layout checkpoint, from `hf`, the data of its config.json."""
    rope = read_rope(hf, dim=read_head_size(hf), interleaved=True, partial=0.5)
    return llama_config(hf, architecture=architecture, rope=rope, qkv_bias=bool(hf["attention_bias"]), out_bias=False)


def glm4_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a GLM-4-0414 checkpoint, from `hf`, the data of its config.json."""
    return replace_fields(glm_config(hf, architecture="Glm4ForCausalLM"), layer={"layout": "sandwich"})


def glm_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of GLM-4 in transformers' layout that make each engine module, by engine name; see `TensorNames`."""
    return llama_names(config) | {"layers.{i}.mlp.up": "model.layers.{i}.mlp.gate_up_proj"}


def glm4_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of GLM-4-0414 that make each engine module, by engine name; see `TensorNames`."""
    return glm_names(config) | {
        "layers.{i}.attention_post_norm": "model.layers.{i}.post_self_attn_layernorm",
        "layers.{i}.mlp_post_norm": "model.layers.{i}.post_mlp_layernorm",
    }


_GLM4: dict[str, Callable[[dict[str, Any]], tuple[str, ...]]] = {"chatglm_model_version": lambda hf: ("glm4",)}
ARCHITECTURES = (
    Architecture(
        name="ChatGLMModel",
        read_config=chatglm_config,
        tensor_names=chatglm_names,
        family="ChatGLM 2, 3, GLM-4 (as published)",
        oracle="the same weights as Glm of transformers",
        model_types=("chatglm",),
        aliases=("ChatGLMForConditionalGeneration",),
        variant=lambda hf: "ChatGLM1Model" if is_chatglm1(hf) else None,
        ignored_tensors=("transformer.rotary_pos_emb.inv_freq",),
        version_options={"chatglm_model_version": model_versions},
        # multi_query_group_num is read with multi_query_attention
        ignored_keys=("fp32_residual_connection", "prefix_projection", "num_hidden_layers", "vocab_size", "multi_query_group_num"),
    ),
    Architecture(
        name="GlmForCausalLM",
        read_config=glm_config,
        tensor_names=glm_names,
        family="GLM-4",
        oracle="transformers",
        model_types=("glm",),
        ignored_tensors=IGNORED,
        version_options=_GLM4,
    ),
    Architecture(
        name="Glm4ForCausalLM",
        read_config=glm4_config,
        tensor_names=glm4_names,
        family="GLM-4-0414",
        oracle="transformers",
        model_types=("glm4",),
        ignored_tensors=IGNORED,
        version_options=_GLM4,
    ),
)
