"""Variants of models with the block of GPT: learned positions or ALiBi, fused projections, tied heads, and one norm or two."""

from __future__ import annotations

from cases import VOCAB

from variants.settings import LINEAR, SMALL, TIED, UNTIED, Settings, Table, rope

_GPT: Settings = {
    "vocab_size": VOCAB, "n_positions": 256, "n_embd": 48, "n_layer": 2, "n_head": 6, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_NEOX: Settings = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"} | {"num_attention_heads": 3}
_BLOOM: Settings = {"vocab_size": VOCAB, "hidden_size": 48, "n_layer": 2, "seq_length": 256, "bos_token_id": 1, "eos_token_id": 2}
_MPT: Settings = {"vocab_size": VOCAB, "d_model": 48, "n_layers": 2, "max_seq_len": 256, "bos_token_id": 1, "eos_token_id": 2}
_OPT: Settings = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "ffn_dim": 80, "num_attention_heads": 6, "word_embed_proj_dim": 48,
    "max_position_embeddings": 256, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2,
}  # fmt: skip

GPT_LIKE: Table = {
    "GPT2LMHeadModel": (
        "GPT2",
        _GPT,
        {
            "untied, narrow MLP, relu": UNTIED | {"n_inner": 40, "activation_function": "relu"},
            "unscaled scores, one head, large epsilon": {"n_head": 1, "scale_attn_weights": False, "layer_norm_epsilon": 0.05},
        },
    ),
    "GPTBigCodeForCausalLM": (
        "GPTBigCode",
        _GPT,
        {
            "untied, narrow MLP, gelu": UNTIED | {"n_inner": 40, "activation_function": "gelu"},
            "unscaled scores, many heads, large epsilon": {
                "multi_query": False,
                "n_head": 4,
                "scale_attn_weights": False,
                "layer_norm_epsilon": 0.05,
            },
        },
    ),
    "GPTJForCausalLM": (
        "GPTJ",
        _GPT,
        {
            "whole heads rotated, narrow MLP": {"rotary_dim": 8, "n_inner": 40},
            "two features rotated, relu, large epsilon": {"rotary_dim": 2, "activation_function": "relu", "layer_norm_epsilon": 0.05},
        },
    ),
    "GPTNeoXForCausalLM": (
        "GPTNeoX",
        _NEOX,
        {
            "tied, whole heads rotated, relu": TIED | rope(LINEAR, 1.0) | {"hidden_act": "relu"},
            "sequential, biased, large epsilon, one layer": {
                "use_parallel_residual": False,
                "num_hidden_layers": 1,
                "layer_norm_eps": 0.05,
            },
        },
    ),
    "BloomForCausalLM": ("Bloom", _BLOOM, {"untied, three heads, large epsilon": UNTIED | {"n_head": 3, "layer_norm_epsilon": 0.05}}),
    "MptForCausalLM": (
        "Mpt",
        _MPT,
        {
            "untied, own scale": UNTIED | {"n_heads": 4, "attn_config": {"softmax_scale": 0.3}},
            "three heads, clipped at once, one layer": {"n_heads": 3, "n_layers": 1, "attn_config": {"clip_qkv": 0.2}},
        },
    ),
    "OPTForCausalLM": (
        "OPT",
        _OPT,
        {
            "untied, no biases, norms without weights, gelu": UNTIED
            | {"enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"}
        },
    ),
}
