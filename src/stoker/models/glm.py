"""ChatGLM 1 and GLM: prefix language models whose tokens have two positions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from stoker.core.model_config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, NormConfig, PrefixConfig, RopeConfig
from stoker.models.architecture import Architecture, Custom, Names, register
from stoker.models.read import defaults, refuse
from stoker.models.reshape import split_groups


def is_first(hf: dict[str, Any]) -> bool:
    """Whether a config.json of model_type chatglm is of the first generation."""
    return "inner_hidden_size" in hf or "position_encoding_2d" in hf


@defaults(
    vocab_size=150528, hidden_size=4096, num_layers=28, num_attention_heads=32, layernorm_epsilon=1e-5, bos_token_id=150004,
    mask_token_id=150000, gmask_token_id=150001, max_sequence_length=2048, inner_hidden_size=16384, position_encoding_2d=True,
)  # fmt: skip
def chatglm1_config(hf: dict[str, Any]) -> ModelConfig:
    """Post-norm with a skip of √(2 layers): the normed stream is what is added to."""
    refuse(hf, position_encoding_2d=True)
    rope = RopeConfig(dim=hf["hidden_size"] // hf["num_attention_heads"], two_axes=True)
    layer = _layer(hf, hf["inner_hidden_size"], rope=rope)
    prefix = PrefixConfig(start_id=hf["bos_token_id"], mask_ids=(hf["gmask_token_id"], hf["mask_token_id"]), ranked=True)
    return ModelConfig(
        architecture="ChatGLM1Model",
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        max_positions=hf["max_sequence_length"],
        layers=(LayerConfig(**layer, layout="add_norm", skip_scale=math.sqrt(2 * hf["num_layers"])),) * hf["num_layers"],
        norm=layer["norm"],
        prefix=prefix,
    )


@defaults(
    vocab_size=30592, hidden_size=1024, num_layers=24, num_attention_heads=16, max_sequence_length=512, block_position_encoding=True,
    attention_scale=1.0, layernorm_epsilon=1e-5, sop_token_id=50257, mask_token_id=50260, gmask_token_id=50263, smask_token_id=50264,
)  # fmt: skip
def glm_config(hf: dict[str, Any]) -> ModelConfig:
    """The token ids are those of glm_10b's vocabulary unless config.json gives others."""
    refuse(hf, block_position_encoding=True, relative_encoding=False, attention_scale=1.0)
    rows = hf["max_sequence_length"] + 1
    layer = _layer(hf, 4 * hf["hidden_size"])
    masks = (hf["mask_token_id"], hf["gmask_token_id"], hf["smask_token_id"])
    return ModelConfig(
        architecture="GLMModel",
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        max_positions=hf["max_sequence_length"],
        layers=(LayerConfig(**layer),) * hf["num_layers"],
        norm=layer["norm"],
        tie_head=True,
        learned_positions=rows,
        block_positions=rows,
        prefix=PrefixConfig(start_id=hf["sop_token_id"], mask_ids=masks),
    )


def _layer(hf: dict[str, Any], width: int, **attention: Any) -> dict[str, Any]:
    heads = hf["num_attention_heads"]
    size = hf["hidden_size"] // heads
    return {
        "attention": AttentionConfig(num_heads=heads, num_kv_heads=heads, head_size=size, qkv_bias=True, out_bias=True, **attention),
        "mlp": MLPConfig(size=width, activation="gelu_tanh", gated=False, up_bias=True, down_bias=True),
        "norm": NormConfig(kind="layer", eps=hf["layernorm_epsilon"], bias=True),
    }


def glm_names(config: ModelConfig) -> Names:
    layer = "transformer.layers.{i}"
    return {
        "embed": "word_embeddings",
        "positions": "transformer.position_embeddings",
        "block_positions": "transformer.block_position_embeddings",
        "norm": "transformer.final_layernorm",
        "layers.{i}.attention_norm": f"{layer}.input_layernorm",
        "layers.{i}.mlp_norm": f"{layer}.post_attention_layernorm",
        "layers.{i}.attention.qkv": f"{layer}.attention.query_key_value",
        "layers.{i}.attention.out": f"{layer}.attention.dense",
        "layers.{i}.mlp.up": f"{layer}.mlp.dense_h_to_4h",
        "layers.{i}.mlp.down": f"{layer}.mlp.dense_4h_to_h",
    }


def chatglm1_names(config: ModelConfig) -> Names:
    return glm_names(config) | {
        "embed": "transformer.word_embeddings",
        "head": "lm_head",
        "layers.{i}.attention.qkv": Custom(("transformer.layers.{i}.attention.query_key_value",), _paired_halves),
    }


def _paired_halves(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """Head by head → q, k, v; and q's and k's quarters (a, b, c, d) → (a, c, b, d).

    ChatGLM 1 pairs a with b for positions and c with d for block positions; here features (i, i + size / 2) are pairs.
    """
    q, k, v = split_groups(tensors[0], config)
    q, k = (torch.cat([x.chunk(4, dim=1)[part] for part in (0, 2, 1, 3)], dim=1) for x in (q, k))
    return torch.cat([x.flatten(0, 1) for x in (q, k, v)])


register(
    Architecture(
        "ChatGLM1Model",
        chatglm1_config,
        chatglm1_names,
        "ChatGLM 1 (config.json says ChatGLMModel)",
        "a float64 forward",
        ignored=("*.rotary_emb.inv_freq",),
        versions={"chatglm_model_version": lambda hf: ("chatglm_6b", "chatglm")},
    ),
    Architecture(
        "GLMModel",
        glm_config,
        glm_names,
        "GLM (glm_10b)",
        "a float64 forward",
        aliases=("GLMForConditionalGeneration",),
        renames=((r"^glm\.", ""),),
        versions={"chatglm_model_version": lambda hf: ("glm_10b", "glm")},
    ),
)
