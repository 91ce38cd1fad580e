"""The architectures of TensorRT-LLM whose checkpoints can be read: the Hugging Face architecture, the names of modules, and keys.

Where a Hugging Face architecture with separate q, k and v computes the same (InternLM 2, EXAONE, GLM), the checkpoint is read as one of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker.builder.checkpoint.tensorrt_llm.tensors import Layout, Module

Modules = Mapping[str, Module]
Data = dict[str, Any]  # of the config.json of TensorRT-LLM
Values = Mapping[str, tuple[Any, ...]]  # key → its supported values; none: any, because it is read or has no effect


def _nothing(data: Data) -> dict[str, Any]:
    """No further keys."""
    return {}


OUTER_MODULES = {"transformer.vocab_embedding": "model.embed_tokens", "transformer.ln_f": "model.norm", "lm_head": "lm_head"}


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture of TensorRT-LLM. `keys`, `values`, `fixed` and `derive` differ from or add to those of Llama."""

    architecture: str  # of Hugging Face
    modules: Modules  # of a layer
    layers: str = "model.layers.{}."  # prefix of the names of a layer
    outer: Mapping[str, str] = field(default_factory=lambda: OUTER_MODULES)
    keys: Mapping[str, str] = field(default_factory=dict)  # key → Hugging Face key; "" if it has none
    values: Values = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)  # Hugging Face keys
    derive: Callable[[Data], dict[str, Any]] = _nothing  # Hugging Face keys that are computed from others
    hidden_act: str = "silu"  # the Hugging Face key; "" for none, or one in `keys`
    norm_offset: float = 0.0  # by which stored weights of norms are larger than those of Hugging Face
    position_rows: int = 0  # rows of zeros that precede the learned positions

    num_experts_key: str = ""  # the Hugging Face key of the number of experts; "" for a family without

    @property
    def modules_without_experts(self) -> Modules:
        """The modules of a layer that has an MLP instead of experts."""
        return _LLAMA if self.num_experts_key else self.modules


def _outer(embedding: str, norm: str, head: str = "lm_head", **others: str) -> dict[str, str]:
    """The Hugging Face names of the modules outside of layers. `others` are modules of `transformer`."""
    found = {"transformer.vocab_embedding": embedding, "transformer.ln_f": norm, "lm_head": head}
    return found | {f"transformer.{name}": other for name, other in others.items()}


def _attention(q: str, k: str, v: str, out: str) -> Modules:
    """Attention with separate q, k and v."""
    return {"attention.qkv": Module((q, k, v), "rows"), "attention.dense": Module((out,), "columns")}


def _mlp(up: str, down: str, *, transposed: bool = False) -> Modules:
    """An MLP without a gate. `transposed`: whether Hugging Face stores its weights as [in, out]."""
    return {
        "mlp.fc": Module((up,), "rows", transposed=transposed),
        "mlp.proj": Module((down,), "columns", transposed=transposed),
    }


def _plain(qkv: str, out: str, up: str, down: str, norm: str, mlp_norm: str, *, layout: Layout, transposed: bool = False) -> Modules:
    """A layer with a fused qkv in the given layout, and an MLP without a gate."""
    return {
        "attention.qkv": Module((qkv,), "rows", layout=layout, transposed=transposed),
        "attention.dense": Module((out,), "columns", transposed=transposed),
        **_mlp(up, down, transposed=transposed),
        "input_layernorm": Module((norm,), "same"),
        "post_layernorm": Module((mlp_norm,), "same"),
    }


# `fc` is the gate projection and `gate` the up projection: TensorRT-LLM names the activated half of a gated MLP after that of a plain one.
_LLAMA: Modules = {
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
_MIXTRAL: Modules = {
    **{name: module for name, module in _LLAMA.items() if name != "mlp.gate"},
    "mlp.router": Module(("block_sparse_moe.gate",), "same"),
    "mlp.fc": Module(("block_sparse_moe.experts.{}.w3", "block_sparse_moe.experts.{}.w1"), "rows", of_experts=True),
    "mlp.proj": Module(("block_sparse_moe.experts.{}.w2",), "columns", of_experts=True),
}
_QWEN_MOE: Modules = {
    **_MIXTRAL,
    "mlp.router": Module(("mlp.gate",), "same"),
    "mlp.fc": Module(("mlp.experts.{}.up_proj", "mlp.experts.{}.gate_proj"), "rows", of_experts=True),
    "mlp.proj": Module(("mlp.experts.{}.down_proj",), "columns", of_experts=True),
    "mlp.shared_expert.fc": Module(("mlp.shared_expert.up_proj", "mlp.shared_expert.gate_proj"), "rows"),
    "mlp.shared_expert.proj": Module(("mlp.shared_expert.down_proj",), "columns"),
    "mlp.shared_expert_gate": Module(("mlp.shared_expert_gate",), "same"),
}
_DEEPSEEK: Modules = {
    **{name: module for name, module in _QWEN_MOE.items() if "shared" not in name},
    "mlp.shared_expert.fc": Module(("mlp.shared_experts.up_proj", "mlp.shared_experts.gate_proj"), "rows"),
    "mlp.shared_expert.proj": Module(("mlp.shared_experts.down_proj",), "columns"),
}
_GATE_UP = Module(("mlp.gate_up_proj",), "rows", layout="halves")
_PHI3: Modules = {
    **{name: module for name, module in _LLAMA.items() if "layernorm" not in name or "attention" not in name},
    "attention.qkv": Module(("self_attn.qkv_proj",), "rows", layout="heads"),
    "mlp.fc": _GATE_UP,
}
_GLM: Modules = {**_LLAMA, "mlp.fc": _GATE_UP}
_BAICHUAN: Modules = {**_LLAMA, "attention.qkv": Module(("self_attn.W_pack",), "rows", layout="heads")}
_GEMMA2: Modules = {
    **_LLAMA,
    "pre_feedforward_layernorm": Module(("pre_feedforward_layernorm",), "same"),
    "post_feedforward_layernorm": Module(("post_feedforward_layernorm",), "same"),
}
# The norms of q and k have one row per head.
_COHERE: Modules = {
    **{name: module for name, module in _LLAMA.items() if name != "post_layernorm"},
    "attention.q_layernorm": Module(("self_attn.q_norm",), "rows"),
    "attention.k_layernorm": Module(("self_attn.k_norm",), "rows"),
}
_NEMOTRON: Modules = {
    **{name: module for name, module in _LLAMA.items() if name != "mlp.gate"},
    "mlp.fc": Module(("mlp.up_proj",), "rows"),
}
_STARCODER2: Modules = {
    **_NEMOTRON,
    **_mlp("mlp.c_fc", "mlp.c_proj"),
}
_PHI: Modules = {
    **_attention("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.dense"),
    **_mlp("mlp.fc1", "mlp.fc2"),
    "input_layernorm": Module(("input_layernorm",), "same"),
}
_OPT: Modules = {
    **_attention("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj"),
    **_mlp("fc1", "fc2"),
    "input_layernorm": Module(("self_attn_layer_norm",), "same"),
    "post_layernorm": Module(("final_layer_norm",), "same"),
}
_GPTJ: Modules = {
    **_attention("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.out_proj"),
    **_mlp("mlp.fc_in", "mlp.fc_out"),
    "input_layernorm": Module(("ln_1",), "same"),
}
_QWEN: Modules = {
    "attention.qkv": Module(("attn.c_attn",), "rows", layout="heads"),
    "attention.dense": Module(("attn.c_proj",), "columns"),
    "mlp.fc": Module(("mlp.w2",), "rows"),
    "mlp.gate": Module(("mlp.w1",), "rows"),
    "mlp.proj": Module(("mlp.c_proj",), "columns"),
    "input_layernorm": Module(("ln_1",), "same"),
    "post_layernorm": Module(("ln_2",), "same"),
}
_GPT2_NAMES = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "ln_1", "ln_2")
_BLOOM: Modules = _plain(
    "self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", "input_layernorm",
    "post_attention_layernorm", layout="groups",
)  # fmt: skip
_NEOX: Modules = {
    **_plain(
        "attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", "input_layernorm",
        "post_attention_layernorm", layout="groups",
    ),
    "post_attention_layernorm": Module(("post_attention_layernorm",), "same"),
}  # fmt: skip
_FALCON_NEW: Modules = {
    **{name: module for name, module in _BLOOM.items() if name != "post_layernorm"},
    "input_layernorm": Module(("ln_attn",), "same"),
    "mlp_layernorm": Module(("ln_mlp",), "same"),
}
_MPT: Modules = _plain("attn.Wqkv", "attn.out_proj", "ffn.up_proj", "ffn.down_proj", "norm_1", "norm_2", layout="heads")

# TensorRT-LLM writes "gelu" for each kind of GELU, and computes the approximation with tanh. The engine computes what the model does.
_GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")
_ROPE = ("rope_gpt_neox", None)
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
    return {**_GPT_VALUES, "position_embedding_type": ("learned_absolute", None), "hidden_act": _GELU, "gpt_variant": (variant, None)}


def _neox_config(data: Data) -> dict[str, Any]:
    """The rotary keys of GPT-NeoX, in the names of either converter."""
    return {
        "rotary_emb_base": data.get("rotary_emb_base", data.get("rotary_base", 10000)),
        "rotary_pct": data.get("rotary_pct", 1.0),
    }


def _falcon_config(data: Data) -> dict[str, Any]:
    """The block of Falcon: positions, biases, and which of its three forms of attention."""
    heads, kv_heads = data.get("num_attention_heads"), data.get("num_key_value_heads")
    return {
        "alibi": data.get("position_embedding_type") == "alibi_with_scale",
        "bias": bool(data.get("bias")),
        "parallel_attn": bool(data.get("parallel_attention")),
        "new_decoder_architecture": bool(data.get("new_decoder_architecture")),
        "multi_query": kv_heads == 1 and heads != 1,
    }


def _mpt_config(data: Data) -> dict[str, Any]:
    """The sizes and the attn_config of MPT."""
    inner, hidden = data.get("intermediate_size"), data.get("hidden_size")
    ratio = inner // hidden if isinstance(inner, int) and isinstance(hidden, int) and hidden > 0 and inner % hidden == 0 else 4
    attention = {"alibi": True, "clip_qkv": data.get("clip_qkv"), "alibi_bias_max": data.get("alibi_bias_max", 8)}
    return {"expansion_ratio": ratio, "attn_config": attention, "max_seq_len": data.get("max_position_embeddings") or 2048}


def _phi_config(data: Data) -> dict[str, Any]:
    """Phi, of which the first converter wrote the Hugging Face keys."""
    return {"partial_rotary_factor": data.get("rotary_pct", data.get("partial_rotary_factor", 1.0))}


def _phi3_config(data: Data) -> dict[str, Any]:
    """The rotary keys of Phi-3, with the divisors of longrope."""
    found: dict[str, Any] = {"partial_rotary_factor": data.get("rotary_pct") or 1.0}
    if data.get("position_embedding_type") == "long_rope":
        factors = {kind: data.get(f"longrope_scaling_{kind}_factors") for kind in ("short", "long")}
        found["rope_scaling"] = {"type": "longrope"} | {f"{kind}_factor": values for kind, values in factors.items()}
        found["original_max_position_embeddings"] = data.get("original_max_position_embeddings")
    return found


def _granite_config(data: Data) -> dict[str, Any]:
    """Granite: TensorRT-LLM multiplies the scale of attention by the root of the head size, and divides logits by a factor."""
    heads, hidden = data.get("num_attention_heads") or 1, data.get("hidden_size") or 1
    size = data.get("head_size") or hidden // heads
    attention, logits = data.get("attention_multiplier") or 1.0, data.get("output_multiplier_scale") or 1.0
    return {
        "attention_multiplier": attention / size**0.5 if attention != 1.0 else 1.0,
        "logits_scaling": 1 / logits,
        "embedding_multiplier": data.get("embedding_multiplier") or 1.0,
        "residual_multiplier": data.get("residual_multiplier") or 1.0,
        "attention_bias": bool(data.get("attn_bias")),
    }


def _glm_config(data: Data) -> dict[str, Any]:
    return {"partial_rotary_factor": data.get("rotary_pct") or 0.5, "attention_bias": bool(data.get("add_qkv_bias", True))}


def _baichuan_config(data: Data) -> dict[str, Any]:
    """Baichuan 2 has a key that Baichuan 1 has not, and 13B models have their length under another one."""
    found: dict[str, Any] = {"z_loss_weight": 0} if str(data.get("model_version")).startswith("v2") else {}
    is_alibi = data.get("position_embedding_type") == "alibi"
    return found | {"model_max_length" if is_alibi else "max_position_embeddings": data.get("max_position_embeddings")}


def _gemma3_config(data: Data) -> dict[str, Any]:
    return {"rope_theta": data.get("rotary_base") or 1e6, "rope_local_base_freq": data.get("rope_local_base_freq") or 10000.0}


_LLAMA_FAMILY = Family("LlamaForCausalLM", _LLAMA, derive=lambda data: {"attention_bias": bool(data.get("attn_bias") or data.get("bias"))})
_GPT2 = Family(
    "GPT2LMHeadModel",
    _plain(*_GPT2_NAMES, layout="heads", transposed=True),
    layers="transformer.h.{}.",
    outer=_outer("transformer.wte", "transformer.ln_f", position_embedding="transformer.wpe"),
    keys={**_GPT_KEYS, "hidden_act": "activation_function"},
    values=_learned("gpt2"),
    hidden_act="",
)
_STARCODER = Family(
    "GPTBigCodeForCausalLM",
    _plain(*_GPT2_NAMES, layout="heads"),
    layers="transformer.h.{}.",
    outer=_outer("transformer.wte", "transformer.ln_f", position_embedding="transformer.wpe"),
    keys=_GPT_KEYS,
    values={**_learned("starcoder"), "num_key_value_heads": (1,), "gpt_variant": ("starcoder", "santacoder", None)},
    fixed={"multi_query": True, "activation_function": "gelu_pytorch_tanh"},
    hidden_act="",
)
_FALCON_KEYS = {
    "norm_epsilon": "layer_norm_epsilon",
    "intermediate_size": "ffn_hidden_size",
    "num_key_value_heads": "num_kv_heads",
    "head_size": "",
}
_FALCON_VALUES: Values = {
    "position_embedding_type": ("alibi_with_scale", *_ROPE), "hidden_act": _GELU, "parallel_attention": (), "bias": (),
    "new_decoder_architecture": (),
}  # fmt: skip
_FALCON_OUTER = _outer("transformer.word_embeddings", "transformer.ln_f", ln_embed="transformer.word_embeddings_layernorm")
_GLM_FAMILY = Family(
    "GlmForCausalLM",
    _GLM,
    keys={"rotary_pct": ""},
    values={
        "position_embedding_type": ("rope_gptj",), "chatglm_version": ("chatglm2", "chatglm3", "glm4"), "add_bias_linear": (False, None),
        "add_qkv_bias": (), "apply_query_key_layer_scaling": (False, None), "apply_residual_connection_post_layernorm": (False, None),
        "rmsnorm": (True, 1.0, None), "rotary_pct": (),
    },
    derive=_glm_config,
)  # fmt: skip
_QWEN_FAMILY = Family(
    "QWenLMHeadModel",
    _QWEN,
    layers="transformer.h.{}.",
    outer=_outer("transformer.wte", "transformer.ln_f"),
    keys={"norm_epsilon": "layer_norm_epsilon", "rotary_base": "rotary_emb_base", "head_size": "kv_channels", "num_key_value_heads": ""},
    values={"use_logn_attn": ()},
    fixed={"use_dynamic_ntk": False, "no_bias": True},
    hidden_act="",
    derive=lambda data: {"use_logn_attn": bool(data.get("use_logn_attn")), "seq_length": data.get("seq_length", 8192)},
)
_BAICHUAN_KEYS = {"max_position_embeddings": "", "num_key_value_heads": "", "head_size": ""}
_BAICHUAN_VALUES: Values = {"position_embedding_type": ("alibi", *_ROPE), "model_version": ()}
_GEMMA_VALUES: Values = {"hidden_act": (*_GELU, None), "inter_layernorms": (), "query_pre_attn_scalar": ()}
_SOFTCAPS: Values = {"final_logit_softcapping": (), "attn_logit_softcapping": ()}

# The name that TensorRT-LLM writes → the family. `family_of` chooses between variants.
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": _LLAMA_FAMILY,
    "LLaMAForCausalLM": _LLAMA_FAMILY,
    "InternLMForCausalLM": _LLAMA_FAMILY,
    "InternLM2ForCausalLM": _LLAMA_FAMILY,
    "SkyworkForCausalLM": _LLAMA_FAMILY,
    "ExaoneForCausalLM": _LLAMA_FAMILY,
    "MistralForCausalLM": Family("MistralForCausalLM", _LLAMA),
    "MixtralForCausalLM": Family("MixtralForCausalLM", _MIXTRAL, num_experts_key="num_local_experts"),
    "GraniteForCausalLM": Family(
        "GraniteForCausalLM",
        _LLAMA,
        values=dict.fromkeys(("embedding_multiplier", "attention_multiplier", "residual_multiplier", "output_multiplier_scale"), ()),
        derive=_granite_config,
    ),
    "QWenForCausalLM": _QWEN_FAMILY,
    "QWenLMHeadModel": _QWEN_FAMILY,
    "Qwen2ForCausalLM": Family("Qwen2ForCausalLM", _LLAMA),
    "Qwen2MoeForCausalLM": Family("Qwen2MoeForCausalLM", _QWEN_MOE, num_experts_key="num_experts"),
    "Qwen3ForCausalLM": Family("Qwen3ForCausalLM", _LLAMA),
    "Qwen3MoeForCausalLM": Family("Qwen3MoeForCausalLM", _QWEN_MOE, num_experts_key="num_experts"),
    "DeepseekForCausalLM": Family(
        "DeepseekForCausalLM",
        _DEEPSEEK,
        fixed={"first_k_dense_replace": 1, "moe_layer_freq": 1},  # TensorRT-LLM has an MLP in the first layer only
        num_experts_key="n_routed_experts",
    ),
    "BaichuanForCausalLM": Family(
        "BaichuanForCausalLM", _BAICHUAN, keys=_BAICHUAN_KEYS, values=_BAICHUAN_VALUES, derive=_baichuan_config
    ),
    "BaiChuanForCausalLM": Family(
        "BaiChuanForCausalLM", _BAICHUAN, keys=_BAICHUAN_KEYS, values=_BAICHUAN_VALUES, derive=_baichuan_config
    ),
    "GemmaForCausalLM": Family(
        "GemmaForCausalLM", _LLAMA, values=_GEMMA_VALUES, hidden_act="gelu_pytorch_tanh", norm_offset=1.0
    ),
    "Gemma2ForCausalLM": Family(
        "Gemma2ForCausalLM",
        _GEMMA2,
        keys={key: key for key in ("query_pre_attn_scalar", *_SOFTCAPS)},
        values={**_GEMMA_VALUES, **_SOFTCAPS},
        fixed={"hidden_activation": "gelu_pytorch_tanh"},
        hidden_act="",
        norm_offset=1.0,
    ),
    "Gemma3ForCausalLM": Family(
        "Gemma3ForCausalLM",
        _GEMMA2,
        keys={
            "query_pre_attn_scalar": "query_pre_attn_scalar", "final_logit_softcapping": "final_logit_softcapping",
            "sliding_window": "sliding_window", "sliding_window_pattern": "sliding_window_pattern",
        },
        values={**_GEMMA_VALUES, **_SOFTCAPS, "sliding_window": (), "sliding_window_pattern": (), "rope_local_base_freq": ()},
        fixed={"hidden_activation": "gelu_pytorch_tanh"},
        hidden_act="",
        derive=_gemma3_config,
        norm_offset=1.0,
    ),
    "CohereForCausalLM": Family(
        "CohereForCausalLM",
        _COHERE,
        keys={"norm_epsilon": "layer_norm_eps", "output_multiplier_scale": "logit_scale"},
        values={"position_embedding_type": ("rope_gptj",), "output_multiplier_scale": ()},
        derive=lambda data: {"use_qk_norm": bool(data.get("qk_layernorm")), "attention_bias": bool(data.get("attn_bias"))},
    ),
    "NemotronForCausalLM": Family(
        "NemotronForCausalLM",
        _NEMOTRON,
        keys={"norm_epsilon": "norm_eps", "rotary_pct": "partial_rotary_factor"},
        values={**_GPT_VALUES, "hidden_act": ("squared-relu",), "rotary_pct": (), "bias": ()},
        hidden_act="relu2",
        derive=lambda data: dict.fromkeys(("attention_bias", "mlp_bias"), bool(data.get("bias"))),
        norm_offset=1.0,
    ),
    "Starcoder2ForCausalLM": Family(
        "Starcoder2ForCausalLM",
        _STARCODER2,
        keys={"norm_epsilon": "norm_epsilon", "head_size": ""},
        values={**_GPT_VALUES, "hidden_act": _GELU, "bias": ()},
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
        _GPTJ,
        layers="transformer.h.{}.",
        outer=_outer("transformer.wte", "transformer.ln_f"),
        keys={**_GPT_KEYS, "rotary_dim": "rotary_dim"},
        values={"position_embedding_type": ("rope_gptj",), "hidden_act": _GELU, "rotary_dim": ()},
        fixed={"activation_function": "gelu_new"},
        hidden_act="",
    ),
    "GPTNeoXForCausalLM": Family(
        "GPTNeoXForCausalLM",
        _NEOX,
        layers="gpt_neox.layers.{}.",
        outer=_outer("gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out"),
        keys={"norm_epsilon": "layer_norm_eps", "rotary_base": "", "num_key_value_heads": "", "head_size": "", "hidden_act": "hidden_act"},
        values={
            "position_embedding_type": ("learned_absolute", *_ROPE), "hidden_act": (*_GELU, "relu"), "rotary_pct": (),
            "rotary_emb_base": (),
        },
        fixed={"use_parallel_residual": True},
        hidden_act="",
        derive=_neox_config,
    ),
    "FalconForCausalLM": Family(
        "FalconForCausalLM",
        _BLOOM,
        layers="transformer.h.{}.",
        outer=_FALCON_OUTER,
        keys=_FALCON_KEYS,
        values=_FALCON_VALUES,
        fixed={"activation": "gelu"},
        hidden_act="",
        derive=_falcon_config,
    ),
    "MptForCausalLM": Family(
        "MptForCausalLM",
        _MPT,
        layers="transformer.blocks.{}.",
        outer=_outer("transformer.wte", "transformer.norm_f"),
        keys={
            "hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads", "intermediate_size": "",
            "max_position_embeddings": "", "num_key_value_heads": "", "head_size": "", "norm_epsilon": "layer_norm_epsilon",
        },
        values={"position_embedding_type": ("alibi",), "hidden_act": _GELU, "bias": (False, None), "clip_qkv": (), "alibi_bias_max": ()},
        hidden_act="",
        derive=_mpt_config,
    ),
    "BloomForCausalLM": Family(
        "BloomForCausalLM",
        _BLOOM,
        layers="transformer.h.{}.",
        outer=_FALCON_OUTER,
        keys={
            "num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "norm_epsilon": "layer_norm_epsilon",
            "num_key_value_heads": "", "head_size": "", "intermediate_size": "", "max_position_embeddings": "seq_length",
        },
        values={"position_embedding_type": ("alibi",), "hidden_act": _GELU},
        hidden_act="",
    ),
    "OPTForCausalLM": Family(
        "OPTForCausalLM",
        _OPT,
        layers="model.decoder.layers.{}.",
        outer=_outer("model.decoder.embed_tokens", "model.decoder.final_layer_norm", position_embedding="model.decoder.embed_positions"),
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
        _PHI,
        outer=_outer("model.embed_tokens", "model.final_layernorm"),
        keys={"norm_epsilon": "layer_norm_eps", "hidden_act": "hidden_act", "rope_theta": "rope_theta"},
        values={"hidden_act": _GELU, "rotary_pct": (), "partial_rotary_factor": (), "rope_theta": ()},
        hidden_act="",
        derive=_phi_config,
    ),
    "Phi3ForCausalLM": Family(
        "Phi3ForCausalLM",
        _PHI3,
        values={
            "position_embedding_type": ("long_rope", *_ROPE), "rotary_pct": (), "longrope_scaling_short_factors": (),
            "longrope_scaling_long_factors": (), "original_max_position_embeddings": (),
        },
        derive=_phi3_config,
    ),
    "ChatGLMForCausalLM": _GLM_FAMILY,
    "ChatGLMModel": _GLM_FAMILY,
    "ChatGLMForConditionalGeneration": _GLM_FAMILY,
}  # fmt: skip
FAMILIES |= {"MPTForCausalLM": FAMILIES["MptForCausalLM"], "RWForCausalLM": FAMILIES["FalconForCausalLM"]}
_NEW_FALCON = Family(
    "FalconForCausalLM",
    _FALCON_NEW,
    layers="transformer.h.{}.",
    outer=_FALCON_OUTER,
    keys=_FALCON_KEYS,
    values=_FALCON_VALUES,
    fixed={"activation": "gelu"},
    hidden_act="",
    derive=_falcon_config,
)


def family_of(data: Data) -> Family | None:
    """The family of a checkpoint; None if its architecture is not supported."""
    found = FAMILIES.get(data["architecture"])
    return _NEW_FALCON if found is FAMILIES["FalconForCausalLM"] and data.get("new_decoder_architecture") else found
