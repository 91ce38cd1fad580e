"""EXAONE 3, 3.5 and 4.

EXAONE 3 is Llama with other names. EXAONE 4 has norms after each block, norms per head, and sliding windows; its layers with full attention
have no positional encoding.
"""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import ModelConfig, NormConfig
from stoker.models.architecture import Architecture, TensorNames
from stoker.models.architectures.llama import llama_config
from stoker.models.architectures.olmo2 import olmo2_names
from stoker.models.config_fields import read_window_layers, replace_fields, require_values, value_or, with_defaults


@with_defaults(
    aliases={"num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps", "activation_function": "hidden_act"},
    vocab_size=102400, max_position_embeddings=2048, rms_norm_eps=1e-5, tie_word_embeddings=True,
)  # fmt: skip
def exaone_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of an EXAONE 3 or 3.5 checkpoint, from `hf`, the data of its config.json."""
    require_values(hf, attention_bias=False, mlp_bias=False)
    width = value_or(hf, "intermediate_size", 4 * value_or(hf, "hidden_size", 4096))
    return llama_config(hf | {"intermediate_size": width}, architecture="ExaoneForCausalLM")


def exaone_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of EXAONE 3 that make each engine module, by engine name; see `TensorNames`."""
    layer = "transformer.h.{i}"
    attention = f"{layer}.attn.attention"
    return {
        "embed": "transformer.wte",
        "norm": "transformer.ln_f",
        "head": "lm_head",
        "layers.{i}.attention_norm": f"{layer}.ln_1",
        "layers.{i}.mlp_norm": f"{layer}.ln_2",
        "layers.{i}.attention.qkv": (f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
        "layers.{i}.attention.out": f"{attention}.out_proj",
        "layers.{i}.mlp.up": (f"{layer}.mlp.c_fc_0", f"{layer}.mlp.c_fc_1"),
        "layers.{i}.mlp.down": f"{layer}.mlp.c_proj",
    }


@with_defaults(
    vocab_size=102400, intermediate_size=16384, num_key_value_heads=32, max_position_embeddings=2048, rms_norm_eps=1e-5,
)  # fmt: skip
def exaone4_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of an EXAONE 4 checkpoint, from `hf`, the data of its config.json."""
    require_values(hf, attention_bias=False, mlp_bias=False)
    config = llama_config(hf, architecture="Exaone4ForCausalLM", qk_norm=NormConfig(eps=hf["rms_norm_eps"]))
    config = replace_fields(config, layer={"layout": "post"})
    window = {"sliding_window": 4096, "sliding_window_pattern": 4} | hf
    if window["sliding_window"] is None:
        return config
    layer_types = read_window_layers(window, config.num_layers)
    local = {"window": window["sliding_window"]}
    return replace_fields(config, attention=lambda i: local if layer_types[i] == "sliding_attention" else {"rope": None})


ARCHITECTURES = (
    Architecture(
        name="ExaoneForCausalLM",
        read_config=exaone_config,
        tensor_names=exaone_names,
        family="EXAONE 3, 3.5",
        oracle="the same weights as Llama of transformers",
        model_types=("exaone",),
        ignored_tensors=("*.rotary.inv_freq", "*.rotary_emb.inv_freq"),
    ),
    Architecture(
        name="Exaone4ForCausalLM",
        read_config=exaone4_config,
        tensor_names=olmo2_names,
        family="EXAONE 4",
        oracle="transformers",
        model_types=("exaone4",),
        ignored_tensors=("*.rotary_emb.inv_freq",),
        ignored_keys=("sliding_window_pattern", "layer_types"),  # each is read where another key does not replace it
    ),
)
