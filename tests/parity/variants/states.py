"""Variants of models with recurrent states: which layers have them, their sizes, convolutions, bounds and norms."""

from __future__ import annotations

from cases import FALCON_H1, GRANITE_HYBRID, JAMBA, MAMBA, MAMBA2, NEMOTRON_H, QWEN3_5, QWEN3_NEXT, QWEN3_NEXT_MOE, YARN

from variants.settings import GELU, MQA, TIED, Table, rope

_FULL_FIRST = ["full_attention", "linear_attention"]

STATES: Table = {
    "Mamba2ForCausalLM": (
        "Mamba2",
        MAMBA2,
        {"two groups, gelu, short kernel, one layer": {"n_groups": 2, "hidden_act": "gelu", "conv_kernel": 2, "num_hidden_layers": 1}},
    ),
    "MambaForCausalLM": (
        "Mamba",
        MAMBA,
        {"wide, short kernel, one wide step, one layer": {"expand": 3, "conv_kernel": 2, "time_step_rank": 1, "num_hidden_layers": 1}},
    ),
    "FalconMambaForCausalLM": (
        "FalconMamba",
        MAMBA,
        {"narrow, gelu, long kernel, large epsilon": {"expand": 1, "hidden_act": "gelu", "conv_kernel": 7, "mixer_rms_eps": 0.3}},
    ),
    "JambaForCausalLM": (
        "Jamba",
        JAMBA | {"num_hidden_layers": 2},
        {
            "one expert per token, one key-value head, tied, short kernel": MQA
            | TIED
            | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts_per_tok": 1, "mamba_d_conv": 2, "mamba_expand": 1}
        },
    ),
    "FalconH1ForCausalLM": (
        "FalconH1",
        {key: value for key, value in FALCON_H1.items() if "multiplier" not in key},
        {
            "no multipliers, one key-value head, gelu, one layer, as many groups as heads": MQA
            | GELU
            | {"num_hidden_layers": 1, "mamba_n_groups": 8, "mamba_d_conv": 2}
        },
    ),
    "GraniteMoeHybridForCausalLM": (
        "GraniteMoeHybrid",
        GRANITE_HYBRID | {"num_hidden_layers": 2, "layer_types": _FULL_FIRST},
        {
            "attention first, one expert, rotary yarn, one key-value head": MQA
            | rope(YARN)
            | {"position_embedding_type": "rope", "num_experts_per_tok": 1, "mamba_n_groups": 4, "attention_bias": True}
        },
    ),
    "NemotronHForCausalLM": (
        "NemotronH",
        NEMOTRON_H,
        {
            "attention only, all experts, silu": {
                "layers_block_type": ["full_attention", "moe", "full_attention"],
                "num_experts_per_tok": 6,
                "num_key_value_heads": 1,
                "mlp_hidden_act": "silu",
            }
        },
    ),
    "Qwen3NextForCausalLM": (
        "Qwen3Next",
        QWEN3_NEXT | {"num_hidden_layers": 2, "layer_types": _FULL_FIRST},
        {
            "all experts, weights do not sum to 1, one key-value head, yarn": MQA
            | rope(YARN, 0.5)
            | {"num_experts_per_tok": 6, "norm_topk_prob": False, "linear_conv_kernel_dim": 6}
        },
    ),
    "Qwen3_5ForCausalLM": (
        "Qwen3_5Text",
        QWEN3_5 | {"num_hidden_layers": 2},
        {
            "attention only, one key-value head, gelu, yarn": MQA
            | GELU
            | rope(YARN | {"mrope_section": [2, 1, 1]}, 0.5)
            | {"layer_types": ["full_attention"] * 2}
        },
    ),
    "Qwen3_5MoeForCausalLM": (
        "Qwen3_5MoeText",
        QWEN3_NEXT_MOE | {"num_hidden_layers": 2, "layer_types": _FULL_FIRST},
        {
            "one expert, tied, one key-value head, long kernel": MQA | TIED | {"num_experts_per_tok": 1, "linear_conv_kernel_dim": 6},
            "no attention, a narrow shared expert, as many key heads": {
                "layer_types": ["linear_attention"] * 2,
                "linear_num_key_heads": 4,
                "shared_expert_intermediate_size": 8,
            },
        },
    ),
}
