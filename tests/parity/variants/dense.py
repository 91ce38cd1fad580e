"""Variants of dense models with the block of Llama: heads, biases, tied heads, activations, rotary methods, windows and multipliers."""

from __future__ import annotations

from cases import YARN

from variants.settings import (
    BIASED,
    DEFAULT,
    DYNAMIC,
    FIRST_SLIDES,
    GELU,
    HEAD,
    LAST_SLIDES,
    LINEAR,
    LLAMA3,
    MHA,
    MQA,
    ONE_LAYER,
    SMALL,
    TIED,
    UNTIED,
    WIDE,
    Settings,
    Table,
    long_rope,
    rope,
)

_GLM: dict[str, Settings] = {
    "a quarter rotated, wide heads, no bias": {"head_dim": 16, "attention_bias": False} | rope(DEFAULT, 0.25),
    "one key-value head, tied, linear": MQA | TIED | rope(LINEAR, 0.5),
    "as many key-value heads, gelu, yarn of whole heads": MHA | GELU | rope(YARN, 1.0),
}
_WINDOW: Settings = {"sliding_window": 9}
_GEMMA3_ROPE = {"sliding_attention": DEFAULT, "full_attention": LINEAR | {"factor": 8.0}}

DENSE: Table = {
    "GlmForCausalLM": ("Glm", SMALL | HEAD, _GLM),
    "Glm4ForCausalLM": ("Glm4", SMALL | HEAD, _GLM),
    "CohereForCausalLM": (
        "Cohere",
        SMALL,
        {
            "untied, biased, one key-value head": UNTIED | MQA | {"attention_bias": True, "logit_scale": 1.5},
            "norms per head, yarn, large epsilon": MHA | rope(YARN) | {"use_qk_norm": True, "layer_norm_eps": 0.05},
        },
    ),
    "Cohere2ForCausalLM": (
        "Cohere2",
        SMALL | _WINDOW,
        {
            "layers listed, biased, wide heads": WIDE | {"layer_types": LAST_SLIDES, "attention_bias": True, "logit_scale": 1.5},
            "windows only, one key-value head, linear": MQA | rope(LINEAR) | {"layer_types": ["sliding_attention"] * 2},
            "untied, full attention only, large epsilon": UNTIED
            | {"layer_types": ["full_attention"] * 2, "layer_norm_eps": 0.05, "logit_scale": 0.7},
        },
    ),
    "GemmaForCausalLM": (
        "Gemma",
        SMALL | HEAD,
        {
            "one wide key-value head": MQA | {"head_dim": 16},
            "untied, biased, yarn": UNTIED | {"attention_bias": True} | rope(YARN),
            "as many key-value heads, relu, linear, one layer": MHA | ONE_LAYER | {"hidden_act": "relu"} | rope(LINEAR),
        },
    ),
    "Gemma2ForCausalLM": (
        "Gemma2",
        SMALL | HEAD | _WINDOW,
        {
            "no soft caps, wide heads": WIDE | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
            "low soft caps, layers listed, one key-value head": MQA
            | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "layer_types": LAST_SLIDES, "query_pre_attn_scalar": 5},
            "untied, biased, exact gelu, linear": UNTIED | {"attention_bias": True, "hidden_activation": "gelu"} | rope(LINEAR),
        },
    ),
    "Gemma3ForCausalLM": (
        "Gemma3Text",
        SMALL | HEAD | _WINDOW | rope(_GEMMA3_ROPE),
        {
            "soft cap, untied, biased, one key-value head": MQA
            | UNTIED
            | {"final_logit_softcapping": 5.0, "attention_bias": True, "layer_types": FIRST_SLIDES},
            "windows only, wide heads, relu": WIDE
            | {"layer_types": ["sliding_attention"] * 2, "hidden_activation": "relu", "query_pre_attn_scalar": 30},
        },
    ),
    "GraniteForCausalLM": (
        "Granite",
        SMALL,
        {
            "no multipliers, biased, one key-value head": MQA | BIASED,
            "tied, yarn, multipliers below one": TIED
            | rope(YARN)
            | {"embedding_multiplier": 0.7, "logits_scaling": 0.3, "residual_multiplier": 0.22, "attention_multiplier": 0.05},
            "gelu, linear, as many key-value heads": MHA
            | GELU
            | rope(LINEAR)
            | {"attention_multiplier": 0.5, "embedding_multiplier": 12.0},
        },
    ),
    "MistralForCausalLM": (
        "Mistral",
        SMALL | HEAD,
        {
            "no window, tied, wide heads": WIDE | TIED | {"sliding_window": None},
            "one key-value head, window of one block, yarn": MQA | rope(YARN) | {"sliding_window": 16},
            "as many key-value heads, gelu, window of one token": MHA | GELU | {"sliding_window": 1},
        },
    ),
    "Olmo2ForCausalLM": (
        "Olmo2",
        SMALL,
        {
            "tied, biased": TIED | {"attention_bias": True},
            "one key-value head, yarn, large epsilon": MQA | rope(YARN) | {"rms_norm_eps": 0.05},
            "as many key-value heads, gelu, linear": MHA | GELU | rope(LINEAR),
        },
    ),
    "Olmo3ForCausalLM": (
        "Olmo3",
        SMALL | _WINDOW,
        {
            "full attention only, tied, biased": TIED | {"layer_types": ["full_attention"] * 2, "attention_bias": True},
            "windows only, one key-value head": MQA | {"layer_types": ["sliding_attention"] * 2, "rms_norm_eps": 0.05},
        },
    ),
    "Qwen2ForCausalLM": (
        "Qwen2",
        SMALL,
        {
            "one key-value head, yarn": MQA | rope(YARN),
            "layers listed, gelu, dynamic": GELU
            | rope(DYNAMIC)
            | {"use_sliding_window": True, "sliding_window": 5, "layer_types": FIRST_SLIDES},
        },
    ),
    "Qwen3ForCausalLM": (
        "Qwen3",
        SMALL | HEAD,
        {
            "tied, biased, wide heads": TIED | WIDE | {"attention_bias": True},
            "windows in listed layers, one key-value head": MQA
            | {"use_sliding_window": True, "sliding_window": 9, "layer_types": FIRST_SLIDES},
            "as many key-value heads, yarn, large epsilon": MHA | rope(YARN) | {"rms_norm_eps": 0.05},
        },
    ),
    "ArceeForCausalLM": (
        "Arcee",
        SMALL,
        {
            "one wide key-value head, llama3": MQA | WIDE | rope(LLAMA3),
            "gelu, linear, only attention biased": GELU | rope(LINEAR) | {"attention_bias": True},
        },
    ),
    "ApertusForCausalLM": ("Apertus", SMALL, {"one key-value head, llama3, one layer": MQA | ONE_LAYER | rope(LLAMA3)}),
    "CwmForCausalLM": (
        "Cwm",
        SMALL | HEAD | _WINDOW,
        {
            "full attention only, tied, default rotary": TIED | {"layer_types": ["full_attention"] * 2} | rope(DEFAULT),
            "windows only, one key-value head, gelu": MQA | GELU | rope(LLAMA3) | {"layer_types": ["sliding_attention"] * 2},
        },
    ),
    "Ernie4_5ForCausalLM": (
        "Ernie4_5",
        SMALL | HEAD,
        {
            "one key-value head, yarn, large epsilon": MQA | rope(YARN) | {"rms_norm_eps": 0.05},
            "as many wide key-value heads, gelu, biased": MHA | WIDE | GELU | {"use_bias": True},
        },
    ),
    "Exaone4ForCausalLM": (
        "Exaone4",
        SMALL | _WINDOW,
        {"windows only, one key-value head, gelu": MQA | GELU | {"layer_types": ["sliding_attention"] * 2}},
    ),
    "HunYuanDenseV1ForCausalLM": ("HunYuanDenseV1", SMALL | HEAD, {"one key-value head, gelu, linear": MQA | GELU | rope(LINEAR)}),
    "InternLM3ForCausalLM": (
        "InternLM3",
        SMALL | HEAD | {"architecture": "InternLM3ForCausalLM"},
        {
            "biased, tied, wide heads": WIDE | TIED | BIASED,
            "one key-value head, dynamic": MQA | rope(DYNAMIC),
            "as many key-value heads, gelu, yarn, one layer": MHA | GELU | ONE_LAYER | rope(YARN),
        },
    ),
    "MinistralForCausalLM": (
        "Ministral",
        SMALL | HEAD,
        {"one key-value head, yarn, gelu": MQA | GELU | rope(YARN) | {"sliding_window": 9, "layer_types": LAST_SLIDES}},
    ),
    "Ministral3ForCausalLM": (
        "Ministral3",
        SMALL | HEAD,
        {"one key-value head, no scaled queries": MQA | rope(YARN | {"llama_4_scaling_beta": 0.0, "mscale": 0.7, "mscale_all_dim": 0.9})},
    ),
    "NemotronForCausalLM": (
        "Nemotron",
        SMALL | HEAD,
        {"one key-value head, gelu, whole heads rotated": MQA | GELU | rope(DEFAULT, 1.0) | {"norm_eps": 0.05}},
    ),
    "OlmoForCausalLM": (
        "Olmo",
        SMALL,
        {"one key-value head, clipped at once, gelu, linear": MQA | GELU | rope(LINEAR) | {"clip_qkv": 0.2}},
    ),
    "PhiForCausalLM": (
        "Phi",
        SMALL,
        {"one key-value head, norms, a quarter rotated, linear": MQA | rope(LINEAR, 0.25) | {"qk_layernorm": True, "layer_norm_eps": 0.05}},
    ),
    "Phi3ForCausalLM": (
        "Phi3",
        SMALL,
        {
            "three quarters rotated, tied, one key-value head": MQA | TIED | rope(DEFAULT, 0.75),
            "longrope beyond the trained length, gelu": GELU
            | {"original_max_position_embeddings": 16}
            | rope(long_rope(4, original_max_position_embeddings=16)),
        },
    ),
    "SeedOssForCausalLM": (
        "SeedOss",
        SMALL | HEAD,
        {"only the output biased, one key-value head, gelu": MQA | GELU | {"attention_bias": False, "attention_out_bias": True}},
    ),
    "SmolLM3ForCausalLM": (
        "SmolLM3",
        SMALL,
        {"no layer rotated, one key-value head, gelu": MQA | GELU | {"no_rope_layers": [0, 0], "use_sliding_window": False}},
    ),
    "Starcoder2ForCausalLM": (
        "Starcoder2",
        SMALL,
        {
            "no biases, untied, no window": UNTIED | {"use_bias": False, "sliding_window": None},
            "one key-value head, relu, yarn": MQA | rope(YARN) | {"hidden_act": "relu", "sliding_window": 5},
            "as many key-value heads, large epsilon, linear": MHA | rope(LINEAR) | {"norm_epsilon": 0.05},
        },
    ),
}
