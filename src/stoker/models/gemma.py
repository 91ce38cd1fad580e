"""Gemma 1: Llama with scaled embeddings and norms of 1 + w. Gemma 2: soft caps, norms on both sides, local layers between
global ones. Gemma 3 (text): q/k norms instead of caps, and a rotary base of its own for local layers."""

from __future__ import annotations

from typing import Any

import msgspec

from stoker.core.model_config import ModelConfig, NormConfig
from stoker.models.architecture import Architecture, Custom, Names, register
from stoker.models.llama import llama_config, llama_names
from stoker.models.read import defaults, refuse, revise, rope
from stoker.models.reshape import one_plus


@defaults(
    vocab_size=256000, hidden_size=3072, intermediate_size=24576, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=16, head_dim=256, max_position_embeddings=8192, rms_norm_eps=1e-6, tie_word_embeddings=True,
)  # fmt: skip
def gemma_config(hf: dict[str, Any], *, architecture: str = "GemmaForCausalLM", **attention: Any) -> ModelConfig:
    refuse(hf, use_bidirectional_attention=False)
    # Early files say hidden_act=gelu, but the models were trained with the tanh form; hidden_activation tells the truth.
    hf = hf | {"hidden_act": hf.get("hidden_activation") or "gelu_pytorch_tanh"}
    norm = NormConfig(eps=hf["rms_norm_eps"], wide=True)
    config = llama_config(hf, architecture=architecture, **attention)
    return revise(config, layer={"norm": norm}, norm=norm, embed_scale=hf["hidden_size"] ** 0.5)


_SECOND: dict[str, Any] = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip


@defaults(**_SECOND, final_logit_softcapping=30.0, attn_logit_softcapping=50.0, sliding_window_pattern=2)
def gemma2_config(hf: dict[str, Any], *, architecture: str = "Gemma2ForCausalLM", **attention: Any) -> ModelConfig:
    scale = hf["query_pre_attn_scalar"] ** -0.5
    config = gemma_config(hf, architecture=architecture, scale=scale, softcap=hf["attn_logit_softcapping"], **attention)
    local = {"window": hf["sliding_window"]}
    kinds = layer_kinds(hf, config.num_layers)
    return revise(
        config,
        layer={"layout": "sandwich"},
        attention=lambda i: local if kinds[i] == "sliding_attention" else {},
        logit_softcap=hf["final_logit_softcapping"],
    )


def layer_kinds(hf: dict[str, Any], num_layers: int) -> list[str]:
    every = hf["sliding_window_pattern"]
    return hf.get("layer_types") or ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]


@defaults(
    **_SECOND, vocab_size=262208, max_position_embeddings=131072, final_logit_softcapping=None, attn_logit_softcapping=None,
    head_dim=256, rms_norm_eps=1e-6, sliding_window_pattern=6, rope_local_base_freq=10000.0,
)  # fmt: skip
def gemma3_config(hf: dict[str, Any], *, architecture: str = "Gemma3ForCausalLM") -> ModelConfig:
    norm = NormConfig(eps=hf["rms_norm_eps"], wide=True)
    far = rope(hf, dim=hf["head_dim"], theta=1e6, kind="full_attention")
    nested = (hf.get("rope_parameters") or {}).get("sliding_attention") or {}
    near = rope(nested, dim=hf["head_dim"], theta=hf["rope_local_base_freq"])
    if nested:
        near = msgspec.structs.replace(near, theta=float(nested.get("rope_theta") or hf["rope_local_base_freq"]))
    config = gemma2_config(hf, architecture=architecture, qk_norm=norm, rope=far)
    kinds = layer_kinds(hf, config.num_layers)
    return revise(config, attention=lambda i: {"rope": near} if kinds[i] == "sliding_attention" else {})


def gemma3_text_config(hf: dict[str, Any]) -> ModelConfig:
    """The language model of a checkpoint that sees, too."""
    text = dict(hf.get("text_config") or {})
    return gemma3_config({"tie_word_embeddings": hf.get("tie_word_embeddings", True)} | text, architecture="Gemma3ForConditionalGeneration")


def gemma_names(config: ModelConfig) -> Names:
    return _folded(llama_names(config))


def gemma2_names(config: ModelConfig) -> Names:
    layer = "model.layers.{i}"
    names = llama_names(config) | {
        "layers.{i}.attention_post_norm": f"{layer}.post_attention_layernorm",
        "layers.{i}.mlp_norm": f"{layer}.pre_feedforward_layernorm",
        "layers.{i}.mlp_post_norm": f"{layer}.post_feedforward_layernorm",
    }
    return _folded(names)


def _folded(names: Names) -> Names:
    """Every norm's weight becomes 1 + w."""
    return {
        key: Custom((source,), one_plus) if key.endswith("norm") and isinstance(source, str) else source for key, source in names.items()
    }


_LAYOUTS = ((r"^language_model\.model\.", "model."), (r"^model\.language_model\.", "model."), (r"^language_model\.lm_head", "lm_head"))
register(
    Architecture("GemmaForCausalLM", gemma_config, gemma_names, "Gemma 1", "transformers", ("gemma",), ignored=("*.rotary_emb.inv_freq",)),
    Architecture("Gemma2ForCausalLM", gemma2_config, gemma2_names, "Gemma 2", "transformers", ("gemma2",)),
    Architecture("Gemma3ForCausalLM", gemma3_config, gemma2_names, "Gemma 3 (1B)", "transformers", ("gemma3_text",)),
    Architecture(
        "Gemma3ForConditionalGeneration",
        gemma3_text_config,
        gemma2_names,
        "Gemma 3 (text of 4B, 12B, 27B)",
        "transformers",
        ("gemma3",),
        ignored=("*vision_tower.*", "*multi_modal_projector.*"),
        renames=_LAYOUTS,
    ),
)
