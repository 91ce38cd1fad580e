"""Families with the layers of Llama: gated MLPs, and norms before the blocks.

Where a Hugging Face architecture with separate q, k and v computes the same (InternLM 2, EXAONE, GLM), the checkpoint is read as one of it.
"""

from __future__ import annotations

from dataclasses import replace

from stoker.builder.checkpoint.tensorrt_llm.families import derived_keys as keys
from stoker.builder.checkpoint.tensorrt_llm.families import latent_and_state_names as latent
from stoker.builder.checkpoint.tensorrt_llm.families import module_names as names
from stoker.builder.checkpoint.tensorrt_llm.families.family import GELU, ROPE, Family, Values, outer_modules

_LLAMA_FAMILY = Family(
    "LlamaForCausalLM", names.LLAMA, derive=lambda data: {"attention_bias": bool(data.get("attn_bias") or data.get("bias"))}
)
_GLM_FAMILY = Family(
    "GlmForCausalLM",
    names.GLM,
    keys={"rotary_pct": ""},
    values={
        "position_embedding_type": ("rope_gptj",), "chatglm_version": ("chatglm2", "chatglm3", "glm4"), "add_bias_linear": (False, None),
        "add_qkv_bias": (), "apply_query_key_layer_scaling": (False, None), "apply_residual_connection_post_layernorm": (False, None),
        "rmsnorm": (True, 1.0, None), "rotary_pct": (),
    },
    derive=keys.glm_keys,
)  # fmt: skip
_QWEN_FAMILY = Family(
    "QWenLMHeadModel",
    names.QWEN,
    layers="transformer.h.{}.",
    outer=outer_modules("transformer.wte", "transformer.ln_f"),
    keys={"norm_epsilon": "layer_norm_epsilon", "rotary_base": "rotary_emb_base", "head_size": "kv_channels", "num_key_value_heads": ""},
    values={"use_logn_attn": ()},
    fixed={"use_dynamic_ntk": False, "no_bias": True},
    hidden_act="",
    derive=lambda data: {"use_logn_attn": bool(data.get("use_logn_attn")), "seq_length": data.get("seq_length", 8192)},
)
_GEMMA_VALUES: Values = {"hidden_act": (*GELU, None), "inter_layernorms": (), "query_pre_attn_scalar": ()}
_SOFTCAPS: Values = {"final_logit_softcapping": (), "attn_logit_softcapping": ()}
_MULTIPLIERS: Values = dict.fromkeys(("embedding_multiplier", "attention_multiplier", "residual_multiplier", "output_multiplier_scale"), ())
_LONG_ROPE: Values = {
    "position_embedding_type": ("long_rope", *ROPE), "rotary_pct": (), "longrope_scaling_short_factors": (),
    "longrope_scaling_long_factors": (), "original_max_position_embeddings": (),
}  # fmt: skip
_LATENT_KEYS = {
    key: key
    for key in (
        "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "first_k_dense_replace", "moe_layer_freq",
    )
} | {"num_key_value_heads": "", "head_size": "", "moe_inter_size": "moe_intermediate_size"}  # fmt: skip
_LATENT_VALUES: Values = {"topk_method": (), "fp8_format": (False, None)}
_DEEPSEEK2 = Family(
    "DeepseekV2ForCausalLM",
    latent.LATENT,
    parameters=latent.LATENT_PARAMETERS,
    keys=_LATENT_KEYS,
    values={**_LATENT_VALUES, "topk_method": ("greedy", "group_limited_greedy", None), "coring_func": ("softmax", None)},
    derive=keys.deepseek2_keys,
    num_experts_key="n_routed_experts",
    normalizations=(0, 1, 3, 4),
)
_DEEPSEEK2_LITE = replace(
    _DEEPSEEK2,
    modules=latent.LATENT_WITHOUT_QUERY_RANK,
    parameters=latent.LATENT_PARAMETERS_WITHOUT_QUERY_RANK,
    fixed={"q_lora_rank": None},
)
_BAICHUAN_FAMILY = Family(
    "BaichuanForCausalLM",
    names.BAICHUAN,
    keys={"max_position_embeddings": "", "num_key_value_heads": "", "head_size": ""},
    values={"position_embedding_type": ("alibi", *ROPE), "model_version": ()},
    derive=keys.baichuan_keys,
)

LLAMA_FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": _LLAMA_FAMILY,
    "LLaMAForCausalLM": _LLAMA_FAMILY,
    "InternLMForCausalLM": _LLAMA_FAMILY,
    "InternLM2ForCausalLM": _LLAMA_FAMILY,
    "SkyworkForCausalLM": _LLAMA_FAMILY,
    "ExaoneForCausalLM": _LLAMA_FAMILY,
    "MistralForCausalLM": Family("MistralForCausalLM", names.LLAMA),
    "MixtralForCausalLM": Family("MixtralForCausalLM", names.MIXTRAL, num_experts_key="num_local_experts", normalizations=(1,)),
    "GraniteForCausalLM": Family(
        "GraniteForCausalLM",
        names.LLAMA,
        values=_MULTIPLIERS,
        derive=keys.granite_keys,
    ),
    "GraniteMoeForCausalLM": Family(
        "GraniteMoeForCausalLM",
        names.GRANITE_MOE,
        values=_MULTIPLIERS,
        derive=keys.granite_keys,
        num_experts_key="num_local_experts",
        normalizations=(1,),
    ),
    "QWenForCausalLM": _QWEN_FAMILY,
    "QWenLMHeadModel": _QWEN_FAMILY,
    "Qwen2ForCausalLM": Family("Qwen2ForCausalLM", names.LLAMA),
    "Qwen2MoeForCausalLM": Family("Qwen2MoeForCausalLM", names.QWEN_MOE, num_experts_key="num_experts"),
    "Qwen3ForCausalLM": Family("Qwen3ForCausalLM", names.LLAMA),
    "Qwen3MoeForCausalLM": Family("Qwen3MoeForCausalLM", names.QWEN_MOE, num_experts_key="num_experts"),
    "DeepseekForCausalLM": Family(
        "DeepseekForCausalLM",
        names.DEEPSEEK,
        fixed={"first_k_dense_replace": 1, "moe_layer_freq": 1},  # TensorRT-LLM has an MLP in the first layer only
        num_experts_key="n_routed_experts",
    ),
    "DeepseekV2ForCausalLM": replace(_DEEPSEEK2, variant=(lambda data: data.get("q_lora_rank") is None, _DEEPSEEK2_LITE)),
    "DeepseekV3ForCausalLM": replace(
        _DEEPSEEK2,
        architecture="DeepseekV3ForCausalLM",
        values={**_LATENT_VALUES, "topk_method": ("noaux_tc", None), "coring_func": ("sigmoid", None)},
        derive=keys.deepseek3_keys,
        normalizations=(3,),
    ),
    "BaichuanForCausalLM": _BAICHUAN_FAMILY,
    "BaiChuanForCausalLM": replace(_BAICHUAN_FAMILY, architecture="BaiChuanForCausalLM"),
    "GemmaForCausalLM": Family(
        "GemmaForCausalLM", names.LLAMA, values=_GEMMA_VALUES, hidden_act="gelu_pytorch_tanh", norm_offset=1.0
    ),
    "Gemma2ForCausalLM": Family(
        "Gemma2ForCausalLM",
        names.GEMMA2,
        keys={key: key for key in ("query_pre_attn_scalar", *_SOFTCAPS)},
        values={**_GEMMA_VALUES, **_SOFTCAPS},
        fixed={"hidden_activation": "gelu_pytorch_tanh"},
        hidden_act="",
        norm_offset=1.0,
    ),
    "Gemma3ForCausalLM": Family(
        "Gemma3ForCausalLM",
        names.GEMMA2,
        keys={
            "query_pre_attn_scalar": "query_pre_attn_scalar", "final_logit_softcapping": "final_logit_softcapping",
            "sliding_window": "sliding_window", "sliding_window_pattern": "sliding_window_pattern",
        },
        values={**_GEMMA_VALUES, **_SOFTCAPS, "sliding_window": (), "sliding_window_pattern": (), "rope_local_base_freq": ()},
        fixed={"hidden_activation": "gelu_pytorch_tanh"},
        hidden_act="",
        derive=keys.gemma3_keys,
        norm_offset=1.0,
    ),
    "CohereForCausalLM": Family(
        "CohereForCausalLM",
        names.COHERE,
        keys={"norm_epsilon": "layer_norm_eps", "output_multiplier_scale": "logit_scale"},
        values={"position_embedding_type": ("rope_gptj",), "output_multiplier_scale": ()},
        derive=lambda data: {"use_qk_norm": bool(data.get("qk_layernorm")), "attention_bias": bool(data.get("attn_bias"))},
    ),
    "Phi3ForCausalLM": Family("Phi3ForCausalLM", names.PHI3, values=_LONG_ROPE, derive=keys.phi3_keys),
    "PhiMoEForCausalLM": Family(
        "PhimoeForCausalLM",
        names.MIXTRAL,
        values={
            **_LONG_ROPE, "rotary_pct": (1.0, None), "attention_bias": (), "longrope_short_mscale": (), "longrope_long_mscale": (),
        },
        derive=keys.phimoe_keys,
        num_experts_key="num_local_experts",
        normalizations=(2,),
    ),
    "ChatGLMForCausalLM": _GLM_FAMILY,
    "ChatGLMModel": _GLM_FAMILY,
    "ChatGLMForConditionalGeneration": _GLM_FAMILY,
}  # fmt: skip
