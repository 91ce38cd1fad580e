"""The modules of layers: the names of TensorRT-LLM, the Hugging Face names of their parts, and how ranks divide them.

`latent_and_state_names` has those of latent attention and of states.
"""

from __future__ import annotations

from collections.abc import Mapping

from stoker.builder.checkpoint.tensorrt_llm.tensors import Layout, Module

Modules = Mapping[str, Module]


def _attention(q: str, k: str, v: str, out: str) -> Modules:
    """Attention with separate q, k and v."""
    return {"attention.qkv": Module((q, k, v), "rows"), "attention.dense": Module((out,), "columns")}


def _mlp(up: str, down: str) -> Modules:
    """An MLP without a gate."""
    return {
        "mlp.fc": Module((up,), "rows"),
        "mlp.proj": Module((down,), "columns"),
    }


def plain_layer(qkv: str, out: str, up: str, down: str, norm: str, mlp_norm: str, *, layout: Layout) -> Modules:
    """A layer with a fused qkv in the given layout, and an MLP without a gate."""
    return {
        "attention.qkv": Module((qkv,), "rows", layout=layout),
        "attention.dense": Module((out,), "columns"),
        **_mlp(up, down),
        "input_layernorm": Module((norm,), "same"),
        "post_layernorm": Module((mlp_norm,), "same"),
    }


# `fc` is the gate projection and `gate` the up projection: TensorRT-LLM names the activated half of a gated MLP after that of a plain one.
LLAMA: Modules = {
    **_attention("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    "attention.q_layernorm": Module(("self_attn.q_norm",), "same"),
    "attention.k_layernorm": Module(("self_attn.k_norm",), "same"),
    "mlp.fc": Module(("mlp.gate_proj",), "rows"),
    "mlp.gate": Module(("mlp.up_proj",), "rows"),
    "mlp.proj": Module(("mlp.down_proj",), "columns"),
    "input_layernorm": Module(("input_layernorm",), "same"),
    "post_layernorm": Module(("post_attention_layernorm",), "same"),
}
# In a fused projection, the up projection precedes the gate projection.
MIXTRAL: Modules = {
    **{name: module for name, module in LLAMA.items() if name != "mlp.gate"},
    "mlp.router": Module(("block_sparse_moe.gate",), "same"),
    "mlp.fc": Module(("block_sparse_moe.experts.{}.w3", "block_sparse_moe.experts.{}.w1"), "rows", of_experts=True),
    "mlp.proj": Module(("block_sparse_moe.experts.{}.w2",), "columns", of_experts=True),
}
GRANITE_MOE: Modules = {
    **MIXTRAL,
    "mlp.router": Module(("block_sparse_moe.router.layer",), "same"),
    "mlp.fc": Module(("block_sparse_moe.input_linear.{}",), "rows", of_experts=True, layout="halves", is_stacked=True),
    "mlp.proj": Module(("block_sparse_moe.output_linear.{}",), "columns", of_experts=True, is_stacked=True),
}
QWEN_MOE: Modules = {
    **MIXTRAL,
    "mlp.router": Module(("mlp.gate",), "same"),
    "mlp.fc": Module(("mlp.experts.{}.up_proj", "mlp.experts.{}.gate_proj"), "rows", of_experts=True),
    "mlp.proj": Module(("mlp.experts.{}.down_proj",), "columns", of_experts=True),
    "mlp.shared_expert.fc": Module(("mlp.shared_expert.up_proj", "mlp.shared_expert.gate_proj"), "rows"),
    "mlp.shared_expert.proj": Module(("mlp.shared_expert.down_proj",), "columns"),
    "mlp.shared_expert_gate": Module(("mlp.shared_expert_gate",), "same"),
}
DEEPSEEK: Modules = {
    **{name: module for name, module in QWEN_MOE.items() if "shared" not in name},
    "mlp.shared_expert.fc": Module(("mlp.shared_experts.up_proj", "mlp.shared_experts.gate_proj"), "rows"),
    "mlp.shared_expert.proj": Module(("mlp.shared_experts.down_proj",), "columns"),
}
_GATE_UP = Module(("mlp.gate_up_proj",), "rows", layout="halves")
PHI3: Modules = {
    **{name: module for name, module in LLAMA.items() if "layernorm" not in name or "attention" not in name},
    "attention.qkv": Module(("self_attn.qkv_proj",), "rows", layout="heads"),
    "mlp.fc": _GATE_UP,
}
GLM: Modules = {**LLAMA, "mlp.fc": _GATE_UP}
BAICHUAN: Modules = {**LLAMA, "attention.qkv": Module(("self_attn.W_pack",), "rows", layout="heads")}
GEMMA2: Modules = {
    **LLAMA,
    "pre_feedforward_layernorm": Module(("pre_feedforward_layernorm",), "same"),
    "post_feedforward_layernorm": Module(("post_feedforward_layernorm",), "same"),
}
# The norms of q and k have one row per head.
COHERE: Modules = {
    **{name: module for name, module in LLAMA.items() if name != "post_layernorm"},
    "attention.q_layernorm": Module(("self_attn.q_norm",), "rows"),
    "attention.k_layernorm": Module(("self_attn.k_norm",), "rows"),
}
NEMOTRON: Modules = {
    **{name: module for name, module in LLAMA.items() if name != "mlp.gate"},
    "mlp.fc": Module(("mlp.up_proj",), "rows"),
}
STARCODER2: Modules = {
    **NEMOTRON,
    **_mlp("mlp.c_fc", "mlp.c_proj"),
}
PHI: Modules = {
    **_attention("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.dense"),
    **_mlp("mlp.fc1", "mlp.fc2"),
    "input_layernorm": Module(("input_layernorm",), "same"),
}
OPT: Modules = {
    **_attention("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj"),
    **_mlp("fc1", "fc2"),
    "input_layernorm": Module(("self_attn_layer_norm",), "same"),
    "post_layernorm": Module(("final_layer_norm",), "same"),
}
GPTJ: Modules = {
    **_attention("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.out_proj"),
    **_mlp("mlp.fc_in", "mlp.fc_out"),
    "input_layernorm": Module(("ln_1",), "same"),
}
QWEN: Modules = {
    "attention.qkv": Module(("attn.c_attn",), "rows", layout="heads"),
    "attention.dense": Module(("attn.c_proj",), "columns"),
    "mlp.fc": Module(("mlp.w2",), "rows"),
    "mlp.gate": Module(("mlp.w1",), "rows"),
    "mlp.proj": Module(("mlp.c_proj",), "columns"),
    "input_layernorm": Module(("ln_1",), "same"),
    "post_layernorm": Module(("ln_2",), "same"),
}
GPT2_NAMES = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "ln_1", "ln_2")
BLOOM: Modules = plain_layer(
    "self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", "input_layernorm",
    "post_attention_layernorm", layout="groups",
)  # fmt: skip
NEOX: Modules = {
    **plain_layer(
        "attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", "input_layernorm",
        "post_attention_layernorm", layout="groups",
    ),
    "post_attention_layernorm": Module(("post_attention_layernorm",), "same"),
}  # fmt: skip
FALCON_NEW: Modules = {
    **{name: module for name, module in BLOOM.items() if name != "post_layernorm"},
    "input_layernorm": Module(("ln_attn",), "same"),
    "mlp_layernorm": Module(("ln_mlp",), "same"),
}
MPT: Modules = plain_layer("attn.Wqkv", "attn.out_proj", "ffn.up_proj", "ffn.down_proj", "norm_1", "norm_2", layout="heads")
