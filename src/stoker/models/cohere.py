"""Command-R (Cohere 1 and 2): parallel blocks under one layer norm without bias, interleaved rotary, scaled logits."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import ModelConfig, NormConfig
from stoker.models.architecture import Architecture, Custom, Names, register
from stoker.models.llama import IGNORED, llama_config, llama_names
from stoker.models.read import defaults, head_size, revise, rope
from stoker.models.reshape import flat


@defaults(
    vocab_size=256000, hidden_size=8192, intermediate_size=22528, num_hidden_layers=40, num_attention_heads=64,
    max_position_embeddings=8192, layer_norm_eps=1e-5, logit_scale=0.0625, tie_word_embeddings=True,
)  # fmt: skip
def cohere_config(hf: dict[str, Any], *, architecture: str = "CohereForCausalLM", theta: float = 500000.0) -> ModelConfig:
    norm = NormConfig(kind="layer", eps=hf["layer_norm_eps"])
    turned = rope(hf, dim=head_size(hf), interleaved=True, theta=theta)
    qk_norm = norm if hf.get("use_qk_norm") else None
    config = llama_config(hf, architecture=architecture, rope=turned, qk_norm=qk_norm, qk_norm_heads=qk_norm is not None)
    return revise(config, layer={"layout": "parallel", "norm": norm}, norm=norm, logit_scale=float(hf["logit_scale"]))


@defaults(num_hidden_layers=40, sliding_window=4096, sliding_window_pattern=4)
def cohere2_config(hf: dict[str, Any]) -> ModelConfig:
    """Local layers turn their heads; the global ones have no positions at all."""
    config = cohere_config(hf | {"use_qk_norm": False}, architecture="Cohere2ForCausalLM", theta=10000.0)
    every = hf["sliding_window_pattern"]
    kinds = hf.get("layer_types") or ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(config.num_layers)]
    local = {"window": hf["sliding_window"]}
    return revise(config, attention=lambda i: local if kinds[i] == "sliding_attention" else {"rope": None})


def cohere_names(config: ModelConfig) -> Names:
    attention = "model.layers.{i}.self_attn"
    return llama_names(config) | {
        "layers.{i}.attention.q_norm": Custom((f"{attention}.q_norm",), flat),
        "layers.{i}.attention.k_norm": Custom((f"{attention}.k_norm",), flat),
    }


register(
    Architecture("CohereForCausalLM", cohere_config, cohere_names, "Command-R, R+", "transformers", ("cohere",), ignored=IGNORED),
    Architecture("Cohere2ForCausalLM", cohere2_config, llama_names, "Command-R7B, A", "transformers", ("cohere2",), ignored=IGNORED),
)
