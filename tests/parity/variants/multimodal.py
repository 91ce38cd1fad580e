"""Variants of the language models of multimodal checkpoints."""

from __future__ import annotations

from functools import partial

from cases import MOE_ONLY, YARN, gemma3_multimodal, gemma3n_multimodal, kimi_k25, llama4, mistral3, qwen_vl

from variants.settings import DEFAULT, GELU, LINEAR, LLAMA3, MHA, MQA, TIED, UNTIED, WIDE, Variants

_TWO_LAYERS = {"num_hidden_layers": 2}
_SECTIONS = {"mrope_section": [2, 1, 1]}

MULTIMODAL: Variants = {
    ("Gemma3ForConditionalGeneration", "untied, biased, one key-value head"): partial(
        gemma3_multimodal, **MQA, **UNTIED, **_TWO_LAYERS, attention_bias=True
    ),
    ("Gemma3ForConditionalGeneration", "soft cap, wide heads, full attention only"): partial(
        gemma3_multimodal, **_TWO_LAYERS, **WIDE, final_logit_softcapping=5.0, layer_types=["full_attention"] * 2
    ),
    ("Gemma3ForConditionalGeneration", "yarn of full attention, exact gelu, windows in listed layers"): partial(
        gemma3_multimodal,
        YARN,
        **_TWO_LAYERS,
        hidden_activation="gelu",
        layer_types=["full_attention", "sliding_attention"],
        query_pre_attn_scalar=30,
    ),
    ("Gemma3nForConditionalGeneration", "untied, biased, one key-value head, another stream"): partial(
        gemma3n_multimodal, **MQA, **UNTIED, attention_bias=True, altup_active_idx=1, altup_num_inputs=2
    ),
    ("Gemma3nForConditionalGeneration", "nothing shared, no scale, low soft cap"): partial(
        gemma3n_multimodal, num_kv_shared_layers=0, altup_correct_scale=False, final_logit_softcapping=3.0
    ),
    ("Gemma3nForConditionalGeneration", "wide heads, full attention only, one rank, exact gelu"): partial(
        gemma3n_multimodal, **WIDE, layer_types=["full_attention"] * 6, laurel_rank=1, hidden_activation="gelu"
    ),
    ("Kimi_K25ForConditionalGeneration", "tied, groups, experts everywhere"): partial(
        kimi_k25, **TIED, **_TWO_LAYERS, n_group=4, topk_group=2, first_k_dense_replace=0
    ),
    ("Kimi_K25ForConditionalGeneration", "biased, weights do not sum to 1, one shared expert, llama3"): partial(
        kimi_k25, **_TWO_LAYERS, attention_bias=True, norm_topk_prob=False, n_shared_experts=1, rope_parameters=LLAMA3
    ),
    ("Llama4ForConditionalGeneration", "no experts, no chunks, biased, one key-value head"): partial(
        llama4, **MQA, **_TWO_LAYERS, moe_layers=[], layer_types=["full_attention"] * 2, attention_bias=True
    ),
    ("Llama4ForConditionalGeneration", "tied, linear, no scaled queries, two experts, gelu"): partial(
        llama4, **TIED, **GELU, **_TWO_LAYERS, rope_parameters=LINEAR, attn_temperature_tuning=False, num_experts_per_tok=2
    ),
    ("Mistral3ForConditionalGeneration", "wide heads, as many key-value heads, gelu, linear"): partial(
        mistral3, "mistral", False, **MHA, **WIDE, **GELU, **_TWO_LAYERS, rope_parameters=LINEAR, sliding_window=None
    ),
    ("Qwen2_5_VLForConditionalGeneration", "tied, one key-value head, gelu"): partial(
        qwen_vl, "Qwen2_5_VL", **MQA, **TIED, **GELU, **_TWO_LAYERS, rope_parameters=DEFAULT | _SECTIONS
    ),
    ("Qwen2_5_VLForConditionalGeneration", "windows in listed layers, yarn"): partial(
        qwen_vl,
        "Qwen2_5_VL",
        **_TWO_LAYERS,
        use_sliding_window=True,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=YARN | _SECTIONS,
    ),
    ("Qwen3VLForConditionalGeneration", "tied, one key-value head, gelu"): partial(
        qwen_vl, "Qwen3VL", **MQA, **TIED, **GELU, **_TWO_LAYERS, head_dim=8, rope_parameters=DEFAULT | _SECTIONS
    ),
    ("Qwen3VLForConditionalGeneration", "as many key-value heads, large epsilon, yarn"): partial(
        qwen_vl, "Qwen3VL", **MHA, **_TWO_LAYERS, head_dim=8, rms_norm_eps=0.05, rope_parameters=YARN | _SECTIONS
    ),
    ("Qwen3VLMoeForConditionalGeneration", "one expert in every second layer, one key-value head, gelu"): partial(
        qwen_vl,
        "Qwen3VLMoe",
        **MOE_ONLY | {"num_experts_per_tok": 1},
        **MQA,
        **GELU,
        **_TWO_LAYERS,
        num_experts=4,
        head_dim=8,
        decoder_sparse_step=2,
    ),
}
