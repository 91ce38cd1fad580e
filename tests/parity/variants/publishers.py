"""Variants of checkpoints in layouts that only their publishers' code reads, with the references of `cases`."""

from __future__ import annotations

from functools import partial

from cases import (
    YARN,
    baichuan_7b,
    baichuan_13b,
    chatglm1,
    chatglm2,
    deepseek_moe,
    exaone3,
    glm_10b,
    internlm,
    internlm2,
    minicpm,
    phi3_yarn,
    qwen,
    santacoder,
)

from variants.settings import GELU, LINEAR, MHA, MQA, ONE_LAYER, TIED, UNTIED, Variants, long_rope

_LARGE_EPSILON = {"rms_norm_eps": 0.05}
_TWO_LAYERS = {"num_hidden_layers": 2}

PUBLISHERS: Variants = {
    ("InternLMForCausalLM", "no biases, tied, another base"): partial(internlm, False, {"base": 500000, "type": "origin"}, **TIED),
    ("InternLMForCausalLM", "gelu, one layer, large epsilon"): partial(internlm, **GELU, **ONE_LAYER, **_LARGE_EPSILON),
    ("InternLMForCausalLM", "one key-value head"): partial(internlm, **MQA, **_TWO_LAYERS),
    ("InternLM2ForCausalLM", "biased, tied, linear"): partial(internlm2, "linear", True, **TIED),
    ("InternLM2ForCausalLM", "one group, gelu"): partial(internlm2, **MQA, **GELU, **_TWO_LAYERS),
    ("InternLM2ForCausalLM", "as many groups as heads, one layer, large epsilon"): partial(internlm2, **MHA, **ONE_LAYER, **_LARGE_EPSILON),
    ("BaiChuanForCausalLM", "7b, gelu, one layer, large epsilon"): partial(baichuan_7b, False, **GELU, **ONE_LAYER, **_LARGE_EPSILON),
    ("BaiChuanForCausalLM", "13b, four heads, large epsilon"): partial(
        baichuan_13b, False, **_TWO_LAYERS, **_LARGE_EPSILON, num_attention_heads=4, num_key_value_heads=4
    ),
    ("BaichuanForCausalLM", "7b, gelu, one layer, large epsilon"): partial(baichuan_7b, True, **GELU, **ONE_LAYER, **_LARGE_EPSILON),
    ("BaichuanForCausalLM", "13b, two heads, one layer"): partial(
        baichuan_13b, True, **ONE_LAYER, num_attention_heads=2, num_key_value_heads=2
    ),
    ("ChatGLMModel", "as many key-value heads, fused head by head, no biases"): partial(chatglm2, 8.0, linear=False, grouped=False),
    ("ChatGLM1Model", "twelve heads, one layer"): partial(chatglm1, num_attention_heads=12, num_layers=1),
    ("ChatGLM1Model", "one head, narrow MLP"): partial(chatglm1, num_attention_heads=1, inner_hidden_size=32),
    ("ChatGLM1Model", "the other mask, large epsilon"): partial(chatglm1, mask_token_id=98, gmask_token_id=97, layernorm_epsilon=0.05),
    ("GLMModel", "twelve heads, one layer, large epsilon"): partial(
        glm_10b, "", num_attention_heads=12, num_layers=1, layernorm_epsilon=0.05
    ),
    ("GLMModel", "one head, the mask of sentences"): partial(glm_10b, "", num_attention_heads=1, gmask_token_id=96, smask_token_id=98),
    ("QWenLMHeadModel", "past the trained length, NTK scaling alone"): partial(qwen, 20, use_logn_attn=False),
    ("QWenLMHeadModel", "past the trained length, log-n attention alone, one layer"): partial(qwen, 20, use_dynamic_ntk=False, **ONE_LAYER),
    ("ExaoneForCausalLM", "one key-value head, linear, gelu"): partial(exaone3, False, LINEAR, **MQA, **GELU),
    ("ExaoneForCausalLM", "as many key-value heads, yarn, one layer, large epsilon"): partial(
        exaone3, True, YARN, **MHA, **ONE_LAYER, **_LARGE_EPSILON
    ),
    ("MiniCPMForCausalLM", "biased, one key-value head, one layer, large multipliers"): partial(
        minicpm, 12, 2.0, 96, **MQA, **ONE_LAYER, attention_bias=True
    ),
    ("MiniCPMForCausalLM", "as many key-value heads, gelu, linear"): partial(minicpm, 1, 1.0, 48, **MHA, **GELU, rope_parameters=LINEAR),
    ("Phi3ForCausalLM", "longrope under the name of yarn"): partial(
        phi3_yarn, original_max_position_embeddings=16, rope_parameters=long_rope(4, original_max_position_embeddings=16)
    ),
    ("GPT2LMHeadCustomModel", "untied, narrow MLP, relu"): partial(santacoder, **UNTIED, n_inner=40, activation_function="relu"),
    ("GPT2LMHeadCustomModel", "one head, one layer, large epsilon"): partial(santacoder, n_head=1, n_layer=1, layer_norm_epsilon=0.05),
    ("GPT2LMHeadCustomModel", "unscaled scores, twelve heads"): partial(santacoder, n_head=12, scale_attn_weights=False),
    ("DeepseekForCausalLM", "weights sum to 1, tied, two dense layers"): partial(deepseek_moe, 2, norm_topk_prob=True, **TIED),
    ("DeepseekForCausalLM", "no shared expert, one key-value head, gelu"): partial(deepseek_moe, 0, None, **MQA, **GELU, **_TWO_LAYERS),
    ("DeepseekForCausalLM", "three shared experts, all routed, linear"): partial(
        deepseek_moe, 1, 3, **MHA, **_TWO_LAYERS, num_experts_per_tok=8, rope_parameters=LINEAR
    ),
}
