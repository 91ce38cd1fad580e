"""The language models of Qwen2.5-VL and Qwen3-VL. The three position ids of a text token are equal, so mrope is the rotary embedding."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stoker.core.model_config import ModelConfig, NormConfig
from stoker.models.architecture import Architecture, TensorNames, Transformed
from stoker.models.architectures.llama import IGNORED, llama_config, llama_names
from stoker.models.architectures.qwen2 import WINDOW_KEYS, with_experts, with_sliding_window
from stoker.models.config_fields import read_head_size, read_rope, require_values, value_or, with_defaults
from stoker.models.tensor_transforms import unchanged


@with_defaults(
    vocab_size=152064, hidden_size=8192, intermediate_size=29568, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
    max_position_embeddings=32768, rms_norm_eps=1e-5, max_window_layers=80, sliding_window=4096,
)  # fmt: skip
def _qwen25_text_config(text: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of the language model of Qwen2.5-VL, from the data of its text_config."""
    rope = read_rope(text, dim=read_head_size(text), theta=1e6)
    config = llama_config(text, architecture="Qwen2_5_VLForConditionalGeneration", qkv_bias=True, out_bias=False, rope=rope)
    return with_sliding_window(config, text)


@with_defaults(
    vocab_size=151936, intermediate_size=22016, num_key_value_heads=32, head_dim=128, max_position_embeddings=128000,
)  # fmt: skip
def _qwen3_text_config(text: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of the language model of Qwen3-VL, from the data of its text_config."""
    norm = NormConfig(eps=text.get("rms_norm_eps", 1e-6))
    rope = read_rope(text, dim=read_head_size(text), theta=500000.0)
    return llama_config(text, architecture="Qwen3VLForConditionalGeneration", qk_norm=norm, rope=rope)


@with_defaults(
    aliases={"num_local_experts": "num_experts"}, vocab_size=151936, hidden_size=2048, intermediate_size=5632, num_hidden_layers=24,
    num_attention_heads=16, num_key_value_heads=16, max_position_embeddings=128000, moe_intermediate_size=1408, num_experts_per_tok=4,
    num_experts=60,
)  # fmt: skip
def _qwen3_moe_text_config(text: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of the language model of Qwen3-VL with experts, from the data of its text_config."""
    require_values(text, norm_topk_prob=True, mlp_bias=False)
    norm = NormConfig(eps=text.get("rms_norm_eps", 1e-6))
    rope = read_rope(text, dim=read_head_size(text), theta=500000.0)
    config = llama_config(text, architecture="Qwen3VLMoeForConditionalGeneration", qk_norm=norm, rope=rope)
    return with_experts(config, text | {"norm_topk_prob": True}, num_experts=text["num_experts"])


def qwen25_vl_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a Qwen2.5-VL checkpoint, from `hf`, the data of its config.json."""
    return _qwen25_text_config(text_data(hf))


def qwen3_vl_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a Qwen3-VL checkpoint, from `hf`, the data of its config.json."""
    return _qwen3_text_config(text_data(hf))


def qwen3_vl_moe_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a Qwen3-VL checkpoint with experts, from `hf`, the data of its config.json."""
    return _qwen3_moe_text_config(text_data(hf) | {"tie_word_embeddings": bool(hf.get("tie_word_embeddings"))})


def qwen3_vl_moe_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of Qwen3-VL with experts that make each engine module, by engine name; see `TensorNames`."""
    experts = ("model.layers.{i}.mlp.experts.gate_up_proj", "model.layers.{i}.mlp.experts.down_proj")
    return llama_names(config) | {
        "layers.{i}.mlp.router": "model.layers.{i}.mlp.gate",
        "layers.{i}.mlp.experts.up.weight": Transformed(experts, _expert_up, unchanged, ("layers.{i}.mlp.experts.down.weight",)),
        "layers.{i}.mlp.experts.down.weight": Transformed(experts, _expert_down, partners=("layers.{i}.mlp.experts.up.weight",)),
    }


def _expert_up(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """Gate and up weights [experts, out, in]. The published files have [experts, in, out], and transformers 5 saves [experts, out, in]."""
    return tensors[0] if tensors[1].shape[1] == config.hidden_size else tensors[0].transpose(1, 2)


def _expert_down(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """Down weights [experts, out, in], from either layout of `_expert_up`."""
    return tensors[1] if tensors[1].shape[1] == config.hidden_size else tensors[1].transpose(1, 2)


def text_data(hf: dict[str, Any]) -> dict[str, Any]:
    """text_config, or a file without it, with the rotary type `mrope` replaced by the default. A tied head may be set at either level."""
    text: dict[str, Any] = value_or(hf, "text_config", hf)
    for key in ("rope_scaling", "rope_parameters"):
        scaling = text.get(key)
        if scaling is not None and "mrope" in (scaling.get("rope_type"), scaling.get("type")):
            text = text | {key: {name: value for name, value in scaling.items() if name not in ("rope_type", "type")}}
    return text | {"tie_word_embeddings": bool(hf.get("tie_word_embeddings")) or bool(text.get("tie_word_embeddings"))}


VISION_TENSORS = (*IGNORED, "*visual.*")
# Settings of images and videos. The sections of mrope only matter for the positions of images.
VISION_KEYS = (
    "vision_config*", "vision_start_token_id", "vision_end_token_id", "vision_token_id", "image_token_id", "video_token_id",
    "mrope_section", "mrope_interleaved",
)  # fmt: skip
TEXT_RENAMES = ((r"^model\.language_model\.", "model."),)
ARCHITECTURES = (
    Architecture(
        name="Qwen2_5_VLForConditionalGeneration",
        read_config=qwen25_vl_config,
        tensor_names=llama_names,
        family="Qwen2.5-VL (text)",
        oracle="transformers",
        model_types=("qwen2_5_vl",),
        ignored_tensors=VISION_TENSORS,
        tensor_renames=TEXT_RENAMES,
        ignored_keys=(*VISION_KEYS, *WINDOW_KEYS),
    ),
    Architecture(
        name="Qwen3VLForConditionalGeneration",
        read_config=qwen3_vl_config,
        tensor_names=llama_names,
        family="Qwen3-VL (text, dense)",
        oracle="transformers",
        model_types=("qwen3_vl",),
        ignored_tensors=VISION_TENSORS,
        tensor_renames=TEXT_RENAMES,
        ignored_keys=VISION_KEYS,
    ),
    Architecture(
        name="Qwen3VLMoeForConditionalGeneration",
        read_config=qwen3_vl_moe_config,
        tensor_names=qwen3_vl_moe_names,
        family="Qwen3-VL (text, experts)",
        oracle="transformers",
        model_types=("qwen3_vl_moe",),
        ignored_tensors=VISION_TENSORS,
        tensor_renames=TEXT_RENAMES,
        ignored_keys=VISION_KEYS,
    ),
)
