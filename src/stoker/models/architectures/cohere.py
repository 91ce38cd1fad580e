"""Command-R (Cohere 1 and 2): attention and MLP in parallel after one layer norm without bias, interleaved rotary, scaled logits."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import ModelConfig, NormConfig
from stoker.models.architecture import Architecture, TensorNames, Transformed
from stoker.models.architectures.llama import IGNORED, llama_config, llama_names
from stoker.models.config_fields import read_head_size, read_rope, read_window_layers, replace_fields, require_values, with_defaults
from stoker.models.tensor_transforms import flatten, unflatten_heads


@with_defaults(
    vocab_size=256000, hidden_size=8192, intermediate_size=22528, num_hidden_layers=40, num_attention_heads=64,
    max_position_embeddings=8192, layer_norm_eps=1e-5, logit_scale=0.0625, tie_word_embeddings=True,
)  # fmt: skip
def cohere_config(hf: dict[str, Any], *, architecture: str = "CohereForCausalLM", theta: float = 500000.0) -> ModelConfig:
    """The ModelConfig of a Command-R checkpoint, from `hf`, the data of its config.json."""
    norm = NormConfig(kind="layer", eps=hf["layer_norm_eps"])
    rope = read_rope(hf, dim=read_head_size(hf), interleaved=True, theta=theta)
    qk_norm = norm if hf.get("use_qk_norm") else None
    config = llama_config(hf, architecture=architecture, rope=rope, qk_norm=qk_norm, qk_norm_heads=qk_norm is not None)
    return replace_fields(config, layer={"layout": "parallel", "norm": norm}, norm=norm, logit_scale=float(hf["logit_scale"]))


@with_defaults(num_hidden_layers=40, sliding_window=4096, sliding_window_pattern=4)
def cohere2_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of Command-R7B: sliding-window layers have rotary embeddings, full-attention layers no positional encoding."""
    require_values(
        hf, order_of_interleaved_layers="local_attn_first", position_embedding_type="rope_gptj", rotary_pct=1.0, layer_switch=4,
        use_embedding_sharing=True, use_gated_activation=True, use_parallel_block=True,
    )  # fmt: skip
    config = cohere_config(hf | {"use_qk_norm": False}, architecture="Cohere2ForCausalLM", theta=10000.0)
    layer_types = read_window_layers(hf, config.num_layers)
    local = {"window": hf["sliding_window"]}
    return replace_fields(config, attention=lambda i: local if layer_types[i] == "sliding_attention" else {"rope": None})


def cohere_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of Command-R that make each engine module, by engine name; see `TensorNames`."""
    attention = "model.layers.{i}.self_attn"
    return llama_names(config) | {
        "layers.{i}.attention.q_norm": Transformed((f"{attention}.q_norm",), flatten, unflatten_heads),
        "layers.{i}.attention.k_norm": Transformed((f"{attention}.k_norm",), flatten, unflatten_heads),
    }


ARCHITECTURES = (
    Architecture(
        name="CohereForCausalLM",
        read_config=cohere_config,
        tensor_names=cohere_names,
        family="Command-R, R+",
        oracle="transformers",
        model_types=("cohere",),
        ignored_tensors=IGNORED,
    ),
    Architecture(
        name="Cohere2ForCausalLM",
        read_config=cohere2_config,
        tensor_names=llama_names,
        family="Command-R7B, A",
        oracle="transformers",
        model_types=("cohere2",),
        ignored_tensors=IGNORED,
        ignored_keys=("use_parallel_embedding",),
    ),
)
