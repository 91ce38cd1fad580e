"""Mamba 1 and 2, which have one name in TensorRT-LLM."""

from __future__ import annotations

from stoker.builder.checkpoint.tensorrt_llm.families import derived_keys as keys
from stoker.builder.checkpoint.tensorrt_llm.families import latent_and_state_names as names
from stoker.builder.checkpoint.tensorrt_llm.families.family import Family, Values, outer_modules

_OUTER = outer_modules("backbone.embeddings", "backbone.norm_f")
_KEYS = {
    "norm_epsilon": "layer_norm_epsilon", "num_attention_heads": "", "num_key_value_heads": "", "head_size": "", "intermediate_size": "",
    "rotary_base": "", "mlp_bias": "", "state_size": "state_size", "conv_kernel": "conv_kernel", "use_bias": "use_bias",
}  # fmt: skip
_VALUES: Values = {
    "layer_types": (["recurrent"], None), "rms_norm": (True, None), "residual_in_fp32": (), "pad_vocab_size_multiple": (),
    "rnn_hidden_size": (), "rnn_conv_dim_size": (), "position_embedding_type": (), "hidden_act": ("silu",),
}  # fmt: skip
_MAMBA2 = Family(
    "Mamba2ForCausalLM",
    names.MAMBA2,
    layers="backbone.layers.{}.",
    outer=_OUTER,
    parameters=names.MAMBA2_PARAMETERS,
    keys=_KEYS,
    values={
        **_VALUES, "mamba_version": ("Mamba2",), "rnn_head_size": (), "ngroups": (), "chunk_size": (), "ssm_rmsnorm": (True, None),
    },
    fixed={"use_conv_bias": True, "tie_word_embeddings": True},  # unless the head differs from the embedding
    derive=keys.mamba2_keys,
)  # fmt: skip
STATE_FAMILIES: dict[str, Family] = {
    "MambaForCausalLM": Family(
        "MambaForCausalLM",
        names.MAMBA,
        layers="backbone.layers.{}.",
        outer=_OUTER,
        parameters=names.MAMBA_PARAMETERS,
        keys={**_KEYS, "rnn_hidden_size": "intermediate_size"},
        values={**_VALUES, "mamba_version": ("Mamba1", None)},
        fixed={"use_conv_bias": True, "tie_word_embeddings": True},
        variant=(lambda data: data.get("mamba_version") == "Mamba2", _MAMBA2),
    )
}
