"""Families with the layers of GPT: MLPs without a gate, layer norms, and biases. The fused q, k and v of many are read as they are."""

from __future__ import annotations

from dataclasses import replace

from stoker.builder.checkpoint.tensorrt_llm.families import derived_keys as keys
from stoker.builder.checkpoint.tensorrt_llm.families import module_names as names
from stoker.builder.checkpoint.tensorrt_llm.families.family import GELU, ROPE, Family, Values, outer_modules
from stoker.builder.checkpoint.tensorrt_llm.families.module_names import plain_layer

_GPT_KEYS = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions", "norm_epsilon": "layer_norm_epsilon", "num_key_value_heads": "", "head_size": "",
    "rotary_base": "",
}  # fmt: skip
_GPT_VALUES: Values = {
    "gpt_variant": (), "q_scaling": (1, 1.0, None), "apply_query_key_layer_scaling": (False, None), "embedding_scale": (None,),
    "inner_layernorm": (False, None), "norm_before_bmm1": (False, None),
}  # fmt: skip


def _learned(variant: str) -> Values:
    """The values of a GPT with learned positions."""
    return {**_GPT_VALUES, "position_embedding_type": ("learned_absolute", None), "hidden_act": GELU, "gpt_variant": (variant, None)}


# Computes the same as GPTBigCode with as many key-value heads as heads, whose weights are [out, in].
_GPT2 = Family(
    "GPTBigCodeForCausalLM",
    plain_layer(*names.GPT2_NAMES, layout="groups"),
    layers="transformer.h.{}.",
    outer=outer_modules("transformer.wte", "transformer.ln_f", position_embedding="transformer.wpe"),
    keys={**_GPT_KEYS, "hidden_act": "activation_function"},
    values=_learned("gpt2"),
    fixed={"multi_query": False},
    hidden_act="",
)
_STARCODER = replace(
    _GPT2,
    modules=plain_layer(*names.GPT2_NAMES, layout="heads"),
    keys=_GPT_KEYS,
    values={**_learned("starcoder"), "num_key_value_heads": (1,), "gpt_variant": ("starcoder", "santacoder", None)},
    fixed={"multi_query": True, "activation_function": "gelu_pytorch_tanh"},
)
_FALCON_OUTER = outer_modules("transformer.word_embeddings", "transformer.ln_f", ln_embed="transformer.word_embeddings_layernorm")
_NEW_FALCON = Family(
    "FalconForCausalLM",
    names.FALCON_NEW,
    layers="transformer.h.{}.",
    outer=_FALCON_OUTER,
    keys={
        "norm_epsilon": "layer_norm_epsilon",
        "intermediate_size": "ffn_hidden_size",
        "num_key_value_heads": "num_kv_heads",
        "head_size": "",
    },
    values={
        "position_embedding_type": ("alibi_with_scale", *ROPE),
        "hidden_act": GELU,
        "parallel_attention": (),
        "bias": (),
        "new_decoder_architecture": (),
    },
    fixed={"activation": "gelu"},
    hidden_act="",
    derive=keys.falcon_keys,
)
_OLD_FALCON = replace(_NEW_FALCON, modules=names.BLOOM, variant=(lambda data: bool(data.get("new_decoder_architecture")), _NEW_FALCON))

GPT_FAMILIES: dict[str, Family] = {
    "NemotronForCausalLM": Family(
        "NemotronForCausalLM",
        names.NEMOTRON,
        keys={"norm_epsilon": "norm_eps", "rotary_pct": "partial_rotary_factor"},
        values={**_GPT_VALUES, "hidden_act": ("squared-relu",), "rotary_pct": (), "bias": ()},
        hidden_act="relu2",
        derive=lambda data: dict.fromkeys(("attention_bias", "mlp_bias"), bool(data.get("bias"))),
        norm_offset=1.0,
    ),
    "Starcoder2ForCausalLM": Family(
        "Starcoder2ForCausalLM",
        names.STARCODER2,
        keys={"norm_epsilon": "norm_epsilon", "head_size": ""},
        values={**_GPT_VALUES, "hidden_act": GELU, "bias": ()},
        fixed={"sliding_window": None},
        hidden_act="gelu_pytorch_tanh",
        derive=lambda data: {"use_bias": bool(data.get("bias", True))},
    ),
    "GPTForCausalLM": _GPT2,
    "GPT2LMHeadModel": _GPT2,
    "GPT2LMHeadCustomModel": _STARCODER,
    "GPTBigCodeForCausalLM": _STARCODER,
    "GPTJForCausalLM": Family(
        "GPTJForCausalLM",
        names.GPTJ,
        layers="transformer.h.{}.",
        outer=outer_modules("transformer.wte", "transformer.ln_f"),
        keys={**_GPT_KEYS, "rotary_dim": "rotary_dim"},
        values={"position_embedding_type": ("rope_gptj",), "hidden_act": GELU, "rotary_dim": ()},
        fixed={"activation_function": "gelu_new"},
        hidden_act="",
    ),
    "GPTNeoXForCausalLM": Family(
        "GPTNeoXForCausalLM",
        names.NEOX,
        layers="gpt_neox.layers.{}.",
        outer=outer_modules("gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out"),
        keys={"norm_epsilon": "layer_norm_eps", "rotary_base": "", "num_key_value_heads": "", "head_size": "", "hidden_act": "hidden_act"},
        values={
            "position_embedding_type": ("learned_absolute", *ROPE), "hidden_act": (*GELU, "relu"), "rotary_pct": (),
            "rotary_emb_base": (),
        },
        fixed={"use_parallel_residual": True},
        hidden_act="",
        derive=keys.neox_keys,
    ),
    "FalconForCausalLM": _OLD_FALCON,
    "RWForCausalLM": _OLD_FALCON,
    "MptForCausalLM": Family(
        "MptForCausalLM",
        names.MPT,
        layers="transformer.blocks.{}.",
        outer=outer_modules("transformer.wte", "transformer.norm_f"),
        keys={
            "hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads", "intermediate_size": "",
            "max_position_embeddings": "", "num_key_value_heads": "", "head_size": "", "norm_epsilon": "layer_norm_epsilon",
        },
        values={"position_embedding_type": ("alibi",), "hidden_act": GELU, "bias": (False, None), "clip_qkv": (), "alibi_bias_max": ()},
        hidden_act="",
        derive=keys.mpt_keys,
    ),
    "BloomForCausalLM": Family(
        "BloomForCausalLM",
        names.BLOOM,
        layers="transformer.h.{}.",
        outer=_FALCON_OUTER,
        keys={
            "num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "norm_epsilon": "layer_norm_epsilon",
            "num_key_value_heads": "", "head_size": "", "intermediate_size": "", "max_position_embeddings": "seq_length",
        },
        values={"position_embedding_type": ("alibi",), "hidden_act": GELU},
        hidden_act="",
    ),
    "OPTForCausalLM": Family(
        "OPTForCausalLM",
        names.OPT,
        layers="model.decoder.layers.{}.",
        outer=outer_modules(
            "model.decoder.embed_tokens", "model.decoder.final_layer_norm", position_embedding="model.decoder.embed_positions"
        ),
        keys={
            "intermediate_size": "ffn_dim", "norm_epsilon": "", "num_key_value_heads": "", "head_size": "",
            "hidden_act": "activation_function",
        },
        values={
            "position_embedding_type": ("learned_absolute", None), "hidden_act": ("relu", "gelu"), "do_layer_norm_before": (True,),
        },
        fixed={"do_layer_norm_before": True},
        hidden_act="",
        derive=lambda data: {"word_embed_proj_dim": data.get("hidden_size")},
        position_rows=2,
    ),
    "PhiForCausalLM": Family(
        "PhiForCausalLM",
        names.PHI,
        outer=outer_modules("model.embed_tokens", "model.final_layernorm"),
        keys={"norm_epsilon": "layer_norm_eps", "hidden_act": "hidden_act", "rope_theta": "rope_theta"},
        values={"hidden_act": GELU, "rotary_pct": (), "partial_rotary_factor": (), "rope_theta": ()},
        hidden_act="",
        derive=keys.phi_keys,
    ),
}  # fmt: skip
GPT_FAMILIES["MPTForCausalLM"] = GPT_FAMILIES["MptForCausalLM"]
