"""ChatGLM 1 and GLM: prefix language models in which each token has two positions.

The prompt up to the start token attends in both directions. The start token and all later tokens have the position of the prompt's mask
token, and their block positions count 1, 2, …
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from stoker.core.model_config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, NormConfig, PrefixConfig, RopeConfig
from stoker.models.architecture import Architecture, TensorNames, Transformed
from stoker.models.config_fields import require_values, with_defaults
from stoker.models.tensor_transforms import group_qkv, split_qkv_groups


def is_chatglm1(hf: dict[str, Any]) -> bool:
    """Whether a config.json of model_type chatglm describes ChatGLM 1 rather than a later generation."""
    return "inner_hidden_size" in hf or "position_encoding_2d" in hf


@with_defaults(
    vocab_size=150528, hidden_size=4096, num_layers=28, num_attention_heads=32, layernorm_epsilon=1e-5, bos_token_id=150004,
    mask_token_id=150000, gmask_token_id=150001, max_sequence_length=2048, inner_hidden_size=16384, position_encoding_2d=True,
)  # fmt: skip
def chatglm1_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of ChatGLM 1. Its residual stream is the normed input of each block, multiplied by √(2 × num_layers)."""
    require_values(hf, position_encoding_2d=True)
    rope = RopeConfig(dim=hf["hidden_size"] // hf["num_attention_heads"], two_axes=True)
    layer = _layer_fields(hf, hf["inner_hidden_size"], rope=rope)
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


@with_defaults(
    vocab_size=30592, hidden_size=1024, num_layers=24, num_attention_heads=16, max_sequence_length=512, block_position_encoding=True,
    attention_scale=1.0, layernorm_epsilon=1e-5, sop_token_id=50257, mask_token_id=50260, gmask_token_id=50263, smask_token_id=50264,
)  # fmt: skip
def glm_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of GLM. The default token ids are those of the vocabulary of glm-10b."""
    require_values(hf, block_position_encoding=True, relative_encoding=False, attention_scale=1.0)
    rows = hf["max_sequence_length"] + 1
    layer = _layer_fields(hf, 4 * hf["hidden_size"])
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


def _layer_fields(hf: dict[str, Any], width: int, **attention: Any) -> dict[str, Any]:
    """Fields of LayerConfig that both models share. `width` is the size of the MLP; `attention` are further fields of AttentionConfig."""
    heads = hf["num_attention_heads"]
    size = hf["hidden_size"] // heads
    return {
        "attention": AttentionConfig(num_heads=heads, num_kv_heads=heads, head_size=size, qkv_bias=True, out_bias=True, **attention),
        "mlp": MLPConfig(size=width, activation="gelu_tanh", gated=False, up_bias=True, down_bias=True),
        "norm": NormConfig(kind="layer", eps=hf["layernorm_epsilon"], bias=True),
    }


def glm_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of GLM that make each engine module, by engine name; see `TensorNames`."""
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


def chatglm1_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of ChatGLM 1 that make each engine module, by engine name; see `TensorNames`."""
    return glm_names(config) | {
        "embed": "transformer.word_embeddings",
        "head": "lm_head",
        "layers.{i}.attention.qkv": Transformed(
            ("transformer.layers.{i}.attention.query_key_value",), _paired_halves, _quarters, moves="rows"
        ),
    }


def _paired_halves(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """The QKV weight with all q rows, all k rows, all v rows, and the quarters (a, b, c, d) of each q and k head as (a, c, b, d).

    In the checkpoint, q, k and v are fused head by head. ChatGLM 1 rotates a with b by the position, and c with d by the block position.
    The engine rotates features i and i + size / 2.
    """
    q, k, v = split_qkv_groups(tensors[0], config)
    q, k = (torch.cat([x.chunk(4, dim=1)[part] for part in (0, 2, 1, 3)], dim=1) for x in (q, k))
    return torch.cat([x.flatten(0, 1) for x in (q, k, v)])


def _quarters(tensors: list[Tensor], config: ModelConfig) -> tuple[Tensor, ...]:
    """The inverse of `_paired_halves`, which is its own inverse within each head."""
    return group_qkv([_paired_halves(list(group_qkv(tensors, config)), config)], config)


ARCHITECTURES = (
    Architecture(
        name="ChatGLM1Model",
        read_config=chatglm1_config,
        tensor_names=chatglm1_names,
        family="ChatGLM 1 (ChatGLMModel in config.json)",
        oracle="a float64 forward pass",
        ignored_tensors=("*.rotary_emb.inv_freq",),
        version_options={"chatglm_model_version": lambda hf: ("chatglm_6b", "chatglm")},
    ),
    Architecture(
        name="GLMModel",
        read_config=glm_config,
        tensor_names=glm_names,
        family="GLM (glm_10b)",
        oracle="a float64 forward pass",
        aliases=("GLMForConditionalGeneration",),
        tensor_renames=((r"^glm\.", ""),),
        version_options={"chatglm_model_version": lambda hf: ("glm_10b", "glm")},
        ignored_keys=("pool_token", "spell_func", "spell_length"),
    ),
)
