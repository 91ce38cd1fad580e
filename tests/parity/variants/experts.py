"""Variants of models with experts: dense layers, shared experts, numbers of experts, routing, and the settings of their attention."""

from __future__ import annotations

from cases import MLA, YARN

from variants.settings import (
    DEFAULT,
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
    rope,
)

_MOE: Settings = SMALL | {"moe_intermediate_size": 24, "num_experts_per_tok": 3}
_LOCAL: Settings = SMALL | {"num_local_experts": 5, "num_experts_per_tok": 2}
_LATENT: Settings = MLA | {"num_hidden_layers": 2}

EXPERTS: Table = {
    "GptOssForCausalLM": (
        "GptOss",
        _LOCAL | HEAD | {"sliding_window": 9},
        {
            "all experts, layers listed, no biases of attention": {
                "num_experts_per_tok": 5,
                "layer_types": LAST_SLIDES,
                "attention_bias": False,
            },
            "one expert, full attention only, low limit, one key-value head": MQA
            | rope(DEFAULT)
            | {"num_experts_per_tok": 1, "layer_types": ["full_attention"] * 2, "swiglu_limit": 0.5},
            "windows only, tied, wide heads, yarn with whole numbers": WIDE
            | TIED
            | rope(YARN | {"truncate": True})
            | {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4},
        },
    ),
    "MixtralForCausalLM": (
        "Mixtral",
        _LOCAL,
        {
            "window, tied, wide heads, all experts": WIDE | TIED | {"sliding_window": 9, "num_experts_per_tok": 5},
            "one expert, one key-value head, yarn": MQA | HEAD | rope(YARN) | {"num_experts_per_tok": 1},
            "as many key-value heads, gelu, two experts": MHA | GELU | {"num_local_experts": 2},
        },
    ),
    "Qwen2MoeForCausalLM": (
        "Qwen2Moe",
        _MOE | {"num_experts": 6, "shared_expert_intermediate_size": 40},
        {
            "weights sum to 1, no biases, tied": TIED | {"norm_topk_prob": True, "qkv_bias": False},
            "experts in every second layer, window, one key-value head": MQA
            | {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
            "all experts, a wider shared one, gelu, yarn": GELU
            | rope(YARN)
            | {"num_experts_per_tok": 6, "shared_expert_intermediate_size": 88},
        },
    ),
    "Qwen3MoeForCausalLM": (
        "Qwen3Moe",
        _MOE | HEAD | {"num_experts": 6},
        {
            "weights do not sum to 1, a dense layer, biased, tied": TIED | {"mlp_only_layers": [0], "attention_bias": True},
            "experts in every second layer, window, wide heads": WIDE
            | {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 9, "norm_topk_prob": True},
            "one expert, one key-value head, gelu, yarn": MQA | GELU | rope(YARN) | {"num_experts_per_tok": 1},
        },
    ),
    "DeepseekV2ForCausalLM": (
        "DeepseekV2",
        _LATENT,
        {
            "experts everywhere, biased, one shared": {
                "first_k_dense_replace": 0,
                "n_shared_experts": 1,
                "attention_bias": True,
            },
            "tied, one expert in groups of one, no query rank, linear": TIED
            | rope(LINEAR)
            | {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "num_experts_per_tok": 1, "q_lora_rank": None},
        },
    ),
    "DeepseekV3ForCausalLM": (
        "DeepseekV3",
        _LATENT,
        {
            "biased, tied, experts everywhere, no query rank, weights do not sum to 1": TIED
            | {"attention_bias": True, "first_k_dense_replace": 0, "q_lora_rank": None, "norm_topk_prob": False}
            | {"n_group": 2, "topk_group": 1}
        },
    ),
    "Ernie4_5_MoeForCausalLM": (
        "Ernie4_5_Moe",
        SMALL | {"moe_intermediate_size": 24, "moe_num_experts": 6, "moe_k": 3, "moe_num_shared_experts": 1},
        {
            "experts everywhere, all of them, one key-value head": MQA | {"moe_layer_start_index": 0, "moe_k": 6},
            "untied, gelu, yarn, three shared experts": UNTIED | GELU | rope(YARN) | {"moe_num_shared_experts": 3},
        },
    ),
    "GraniteMoeForCausalLM": (
        "GraniteMoe",
        _LOCAL,
        {
            "all experts, one key-value head, small multipliers": MQA
            | {"num_experts_per_tok": 5, "embedding_multiplier": 0.7, "logits_scaling": 0.3, "residual_multiplier": 0.22},
            "one expert, gelu, linear, as many key-value heads": MHA | GELU | rope(LINEAR) | {"num_experts_per_tok": 1},
        },
    ),
    "GraniteMoeSharedForCausalLM": (
        "GraniteMoeShared",
        _LOCAL,
        {
            "one expert, a wide shared one, gelu, one key-value head": MQA
            | GELU
            | {"num_experts_per_tok": 1, "shared_intermediate_size": 120, "residual_multiplier": 0.22}
        },
    ),
    "MiniMaxM2ForCausalLM": (
        "MiniMaxM2",
        _LOCAL | HEAD,
        {
            "all experts, whole heads rotated, one key-value head": MQA | {"num_experts_per_tok": 5, "rms_norm_eps": 0.05},
            "one expert, gelu, yarn, one layer": GELU | ONE_LAYER | rope(YARN) | {"num_experts_per_tok": 1},
        },
    ),
    "OlmoeForCausalLM": (
        "Olmoe",
        SMALL | {"num_experts": 6, "num_experts_per_tok": 2},
        {
            "all experts, tied, one key-value head, large epsilon": MQA | TIED | {"num_experts_per_tok": 6, "rms_norm_eps": 0.05},
            "one expert whose weight is 1, gelu, yarn": GELU | rope(YARN) | {"num_experts_per_tok": 1, "norm_topk_prob": True},
        },
    ),
    "Glm4MoeForCausalLM": (
        "Glm4Moe",
        _MOE | HEAD | {"n_routed_experts": 6},
        {
            "experts everywhere, tied, whole heads rotated, gelu, three shared": TIED
            | GELU
            | rope(DEFAULT, 1.0)
            | {"first_k_dense_replace": 0, "n_shared_experts": 3, "use_qk_norm": True, "routed_scaling_factor": 0.4}
        },
    ),
    "HunYuanMoEV1ForCausalLM": (
        "HunYuanMoEV1",
        SMALL | HEAD | {"num_experts": 4, "moe_topk": 4},
        {"all experts, one key-value head, gelu, llama3": MQA | GELU | rope(LLAMA3) | {"rms_norm_eps": 0.05}},
    ),
    "Llama4ForCausalLM": (
        "Llama4Text",
        SMALL | HEAD | {"intermediate_size_mlp": 80, "num_local_experts": 5, "attention_chunk_size": 16, "floor_scale": 16},
        {
            "no experts, no chunks, one key-value head, linear": MQA
            | rope(LINEAR)
            | {"moe_layers": [], "layer_types": ["full_attention"] * 2, "no_rope_layers": [1, 0], "attn_scale": 0.7}
        },
    ),
}
