"""Every architecture of TensorRT-LLM: the logits of an engine from a checkpoint of two ranks, and those of the model of transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import (
    _BLOOM,
    _DEEP_YARN,
    _FALCON,
    _GEMMA3_ROPE,
    _HEAD,
    _LLAMA3,
    _LONG,
    _LONG_MSCALE,
    _MPT,
    _MULTIPLIERS,
    _OPT,
    GPT,
    GROUPED,
    MAMBA,
    MAMBA2,
    MLA,
    POSITIONS,
    baichuan_7b,
    baichuan_13b,
    deepseek_moe,
    native,
    qwen,
)
from harness import Harness, prefill_logits
from oracles import Reference
from tensorrt_llm_blocks import granite_experts, latent, mamba, mamba2, phi_experts
from tensorrt_llm_writer import Config, Conversion, grouped, separate, stacked, write_tensorrt_llm

from stoker.base.config import Limits
from stoker.builder.build import build
from stoker.builder.checkpoint.tensorrt_llm.families.table import FAMILIES
from stoker.builder.config import BuildConfig

LIMITS = Limits(max_input_len=64, max_output_len=64, max_num_tokens=256, max_batch_size=4, tokens_per_block=16)
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")
GPT_SIZES = ("n_embd", "n_layer", "n_head", "vocab_size", "n_positions")
OUTER = {"transformer.vocab_embedding": "model.embed_tokens", "transformer.ln_f": "model.norm", "lm_head": "lm_head"}


def none(w: Any, prefix: str, suffix: str, hf: Config) -> None:
    """No q, k and v."""


QKV = separate("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
NORMS = {"input_layernorm": "input_layernorm", "post_layernorm": "post_attention_layernorm"}
LLAMA_MODULES = {
    "attention.dense": "self_attn.o_proj", "attention.q_layernorm": "self_attn.q_norm", "attention.k_layernorm": "self_attn.k_norm",
    "mlp.fc": "mlp.gate_proj", "mlp.gate": "mlp.up_proj", "mlp.proj": "mlp.down_proj", **NORMS,
}  # fmt: skip
GPT_MODULES = {
    "attention.dense": "attn.c_proj", "mlp.fc": "mlp.c_fc", "mlp.proj": "mlp.c_proj", "input_layernorm": "ln_1", "post_layernorm": "ln_2",
}  # fmt: skip
FUSED_MODULES = {
    "attention.dense": "self_attention.dense", "mlp.fc": "mlp.dense_h_to_4h", "mlp.proj": "mlp.dense_4h_to_h", **NORMS,
}  # fmt: skip


def rope_theta(hf: Config) -> float:
    return hf["rope_parameters"]["rope_theta"]


def llama_config(hf: Config) -> Config:
    rope = hf["rope_parameters"]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"} if rope["rope_type"] != "default" else None
    return {
        "num_key_value_heads": hf.get("num_key_value_heads"), "intermediate_size": hf["intermediate_size"], "head_size": hf["_head"],
        "norm_epsilon": hf["rms_norm_eps"], "hidden_act": "silu", "rotary_base": rope["rope_theta"], "rotary_scaling": scaling,
        "position_embedding_type": "rope_gpt_neox", "attn_bias": bool(hf.get("attention_bias")), "mlp_bias": False,
    }  # fmt: skip


def granite_config(hf: Config) -> Config:
    return llama_config(hf) | {
        "attention_multiplier": hf["attention_multiplier"] * hf["_head"] ** 0.5, "embedding_multiplier": hf["embedding_multiplier"],
        "residual_multiplier": hf["residual_multiplier"], "output_multiplier_scale": 1 / hf["logits_scaling"],
    }  # fmt: skip


def gemma_config(hf: Config, **more: str) -> Config:
    rope = hf["rope_parameters"]
    base = rope.get("full_attention", rope)
    renamed = {key: hf[other] for key, other in more.items()}
    return {
        "num_key_value_heads": hf["num_key_value_heads"], "intermediate_size": hf["intermediate_size"], "head_size": hf["head_dim"],
        "norm_epsilon": hf["rms_norm_eps"], "hidden_act": "gelu_pytorch_tanh", "share_embedding_table": True, "attn_bias": False,
        "mlp_bias": False, "inter_layernorms": bool(more), "rotary_base": base["rope_theta"], "position_embedding_type": "rope_gpt_neox",
    } | renamed  # fmt: skip


def gemma3_config(hf: Config) -> Config:
    found = gemma_config(hf, query_pre_attn_scalar="query_pre_attn_scalar", final_logit_softcapping="final_logit_softcapping")
    local = hf["rope_parameters"]["sliding_attention"]["rope_theta"]
    return found | {"sliding_window": hf["sliding_window"], "sliding_window_pattern": 2, "rope_local_base_freq": local}


def gpt_config(hf: Config, variant: str, act: str) -> Config:
    return {
        "num_key_value_heads": hf["_kv_heads"], "intermediate_size": 4 * hf["n_embd"], "norm_epsilon": hf["layer_norm_epsilon"],
        "hidden_act": act, "position_embedding_type": "learned_absolute", "gpt_variant": variant, "bias": True, "q_scaling": 1,
        "apply_query_key_layer_scaling": False, "embedding_scale": None, "rotary_pct": 1.0, "rotary_base": 10000.0,
        "moe": {"num_experts": 0, "top_k": 0, "normalization_mode": 1}, "qk_layernorm": False, "inner_layernorm": False,
        "norm_before_bmm1": False, "rotary_scaling": None,
    }  # fmt: skip


def rope_gpt_config(hf: Config, eps: str, act: str, bias: bool, pct: float = 1.0) -> Config:
    return {
        "num_key_value_heads": hf["num_key_value_heads"], "intermediate_size": hf["intermediate_size"], "head_size": hf["_head"],
        "norm_epsilon": hf[eps], "hidden_act": act, "position_embedding_type": "rope_gpt_neox", "bias": bias, "rotary_pct": pct,
        "rotary_base": rope_theta(hf),
    }  # fmt: skip


def falcon_config(hf: Config) -> Config:
    return {
        "num_key_value_heads": hf["_kv_heads"], "norm_epsilon": hf["layer_norm_epsilon"], "hidden_act": "gelu", "bias": hf["bias"],
        "position_embedding_type": "alibi_with_scale" if hf["alibi"] else "rope_gpt_neox", "parallel_attention": hf["parallel_attn"],
        "new_decoder_architecture": hf["new_decoder_architecture"], "intermediate_size": hf["ffn_hidden_size"],
    }  # fmt: skip


def falcon_kv_heads(hf: Config) -> int:
    return hf["num_kv_heads"] if hf["new_decoder_architecture"] else 1 if hf["multi_query"] else hf["num_attention_heads"]


def phi3_config(hf: Config) -> Config:
    rope = hf["rope_parameters"]
    found = llama_config(hf) | {"rotary_scaling": None, "rotary_pct": rope.get("partial_rotary_factor", 1.0), "hidden_act": "swiglu"}
    if rope["rope_type"] == "longrope":
        found |= {f"longrope_scaling_{kind}_factors": rope[f"{kind}_factor"] for kind in ("short", "long")}
        found |= {"position_embedding_type": "long_rope", "original_max_position_embeddings": POSITIONS}
    return found


def glm_config(hf: Config) -> Config:
    return {
        "num_key_value_heads": hf["num_key_value_heads"], "intermediate_size": hf["intermediate_size"], "norm_epsilon": hf["rms_norm_eps"],
        "hidden_act": "swiglu", "position_embedding_type": "rope_gptj", "chatglm_version": "chatglm3", "add_bias_linear": False,
        "add_qkv_bias": True, "rmsnorm": True, "rotary_pct": 0.5, "rotary_base": rope_theta(hf), "rotary_scaling": None,
        "apply_query_key_layer_scaling": False, "apply_residual_connection_post_layernorm": False,
    }  # fmt: skip


LATENT_MODULES = {name: other for name, other in LLAMA_MODULES.items() if name != "attention.q_layernorm"}
STATE_OUTER = {
    "transformer.vocab_embedding": "backbone.embeddings", "transformer.ln_f": "backbone.norm_f", "lm_head": "lm_head",
}  # fmt: skip
STATE_SIZES = ("hidden_size", "num_hidden_layers", "", "vocab_size", "")
GEMMA2_MODULES = LLAMA_MODULES | {name: name for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm")}
GPT2_OUTER = {
    "transformer.vocab_embedding": "transformer.wte", "transformer.position_embedding": "transformer.wpe",
    "transformer.ln_f": "transformer.ln_f", "lm_head": "lm_head",
}  # fmt: skip
FALCON_OUTER = {
    "transformer.vocab_embedding": "transformer.word_embeddings", "transformer.ln_embed": "transformer.word_embeddings_layernorm",
    "transformer.ln_f": "transformer.ln_f", "lm_head": "lm_head",
}  # fmt: skip
LAYERS, HEADS = "model.layers.{i}.", "transformer.h.{i}."
SMALL = {"num_attention_heads": 4, "num_key_value_heads": 4}
FOUR_HEADS = {"hidden_size": 48, "num_attention_heads": 4}


def llama(architecture: str = "LlamaForCausalLM", **changes: Any) -> Conversion:
    found = {"modules": LLAMA_MODULES, "outer": OUTER, "sizes": SIZES, "config": llama_config, "qkv": QKV, "prefix": LAYERS}
    return Conversion(architecture, **found | changes)


def baichuan(version: str, **changes: Any) -> Conversion:
    def config(hf: Config) -> Config:
        return {
            "norm_epsilon": hf.get("rms_norm_eps", 1e-6), "hidden_act": "silu", "model_version": version,
            "intermediate_size": hf["intermediate_size"], "position_embedding_type": "alibi" if "13b" in version else "rope_gpt_neox",
        }  # fmt: skip

    return llama("BaichuanForCausalLM", qkv=stacked("self_attn.W_pack"), config=config, kv_heads=lambda hf: None, **changes)


def qwen_config(hf: Config) -> Config:
    return {
        "intermediate_size": hf["intermediate_size"], "norm_epsilon": hf["layer_norm_epsilon"], "hidden_act": "silu", "qwen_type": "qwen",
        "position_embedding_type": "rope_gpt_neox", "rotary_base": 10000.0, "seq_length": hf["seq_length"], "attn_bias": True,
        "use_logn_attn": hf["use_logn_attn"],
    }  # fmt: skip


def falcon(new: bool) -> Conversion:
    norms = {"input_layernorm": "ln_attn", "mlp_layernorm": "ln_mlp"} if new else {}
    return Conversion(
        "FalconForCausalLM", HEADS, grouped("self_attention.query_key_value"), FUSED_MODULES | norms, FALCON_OUTER, SIZES, falcon_config,
        kv_heads=falcon_kv_heads, is_embedding_split=new,
    )  # fmt: skip


def moe_config(hf: Config, mode: int, **more: Any) -> Config:
    moe = {"num_experts": hf["num_local_experts"], "top_k": hf["num_experts_per_tok"], "normalization_mode": mode}
    return {"hidden_act": "swiglu", "moe": moe | more}


def deepseek2_config(hf: Config, mode: int) -> Config:
    """DeepSeekV2Config.from_hugging_face. `mode`: how the weights of experts are normalized."""
    rope = {key: value for key, value in hf["rope_parameters"].items() if key not in ("rope_theta", "rope_type")}
    method = "noaux_tc" if hf["model_type"] == "deepseek_v3" else hf.get("topk_method", "greedy")
    keys = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "first_k_dense_replace")
    return {key: hf[key] for key in keys} | {
        "num_key_value_heads": 1, "head_size": hf["kv_lora_rank"] + hf["qk_rope_head_dim"], "intermediate_size": hf["intermediate_size"],
        "position_embedding_type": "rope_gpt_neox", "hidden_act": "swiglu", "norm_epsilon": hf["rms_norm_eps"],
        "rotary_base": rope_theta(hf), "rotary_scaling": (rope | {"type": "yarn"}) if rope else None, "moe_layer_freq": 1,
        "moe_inter_size": hf["moe_intermediate_size"], "topk_method": method, "fp8_format": False, "mlp_bias": False, "attn_bias": False,
        "coring_func": "sigmoid" if method == "noaux_tc" else "softmax",
        "moe": {
            "num_experts": hf["n_routed_experts"], "top_k": hf["num_experts_per_tok"], "normalization_mode": mode, "tp_mode": 0,
            "shared_expert_intermediate_size": hf["n_shared_experts"] * hf["moe_intermediate_size"], "sparse_mixer_epsilon": 0.01,
            "device_limited_n_group": hf.get("n_group"), "device_limited_topk_group": hf.get("topk_group"),
            "device_limited_routed_scaling_factor": hf["routed_scaling_factor"],
        },
    }  # fmt: skip


def mamba_config(hf: Config, version: str) -> Config:
    inner = hf["expand"] * hf["hidden_size"]
    found = {
        "layer_types": ["recurrent"], "rms_norm": True, "residual_in_fp32": True, "pad_vocab_size_multiple": 1, "hidden_act": "silu",
        "num_attention_heads": 1, "rnn_hidden_size": inner, "rnn_conv_dim_size": inner, "state_size": hf["state_size"],
        "conv_kernel": hf["conv_kernel"], "use_bias": hf["use_bias"], "mamba_version": version, "norm_epsilon": hf["layer_norm_epsilon"],
    }  # fmt: skip
    if version == "Mamba1":
        return found
    return found | {
        "rnn_conv_dim_size": inner + 2 * hf["n_groups"] * hf["state_size"], "rnn_head_size": hf["head_dim"], "ngroups": hf["n_groups"],
        "chunk_size": hf["chunk_size"], "ssm_rmsnorm": True,
    }  # fmt: skip


# (the name of the family in TensorRT-LLM, what is special) → the model, and how it is converted.
CASES: dict[tuple[str, str], tuple[Callable[[], Reference], Conversion]] = {
    ("LlamaForCausalLM", "llama3"): (partial(native, "Llama", **GROUPED, rope_parameters=_LLAMA3), llama()),
    ("LlamaForCausalLM", "biased"): (partial(native, "Llama", **GROUPED, attention_bias=True), llama("InternLMForCausalLM")),
    ("MistralForCausalLM", ""): (partial(native, "Mistral", **GROUPED, sliding_window=None, **_HEAD), llama("MistralForCausalLM")),
    ("GraniteForCausalLM", ""): (
        partial(native, "Granite", **GROUPED, **_MULTIPLIERS), llama("GraniteForCausalLM", config=granite_config),
    ),
    ("Qwen2ForCausalLM", "tied"): (
        partial(native, "Qwen2", **GROUPED, tie_word_embeddings=True),
        llama("Qwen2ForCausalLM", config=lambda hf: llama_config(hf) | {"tie_word_embeddings": True, "attn_bias": True}),
    ),
    ("Qwen3ForCausalLM", ""): (partial(native, "Qwen3", **GROUPED, **_HEAD), llama("Qwen3ForCausalLM")),
    ("GemmaForCausalLM", ""): (
        partial(native, "Gemma", **GROUPED, **_HEAD), llama("GemmaForCausalLM", config=gemma_config, norm_offset=1.0),
    ),
    ("Gemma2ForCausalLM", ""): (
        partial(native, "Gemma2", **GROUPED, **_HEAD, query_pre_attn_scalar=10),
        llama(
            "Gemma2ForCausalLM", modules=GEMMA2_MODULES, norm_offset=1.0, is_embedding_split=True,
            config=partial(
                gemma_config, query_pre_attn_scalar="query_pre_attn_scalar", final_logit_softcapping="final_logit_softcapping",
                attn_logit_softcapping="attn_logit_softcapping",
            ),
        ),
    ),
    ("Gemma3ForCausalLM", ""): (
        partial(
            native, "Gemma3Text", **GROUPED, **_HEAD, sliding_window=9, sliding_window_pattern=2, query_pre_attn_scalar=10,
            rope_parameters=_GEMMA3_ROPE | {"full_attention": {"rope_type": "default", "rope_theta": 1e6}},
        ),
        llama("Gemma3ForCausalLM", modules=GEMMA2_MODULES, norm_offset=1.0, config=gemma3_config),
    ),
    ("CohereForCausalLM", ""): (
        partial(native, "Cohere", **GROUPED, logit_scale=0.3, tie_word_embeddings=True, use_qk_norm=True),
        llama(
            "CohereForCausalLM",
            config=lambda hf: {
                "num_key_value_heads": 2, "intermediate_size": hf["intermediate_size"], "norm_epsilon": hf["layer_norm_eps"],
                "hidden_act": "silu",
                "position_embedding_type": "rope_gptj", "output_multiplier_scale": 0.3, "qk_layernorm": True, "attn_bias": False,
                "tie_word_embeddings": True, "rotary_base": rope_theta(hf), "head_size": hf["_head"],
            },
        ),
    ),
    ("NemotronForCausalLM", "a half rotated"): (
        partial(native, "Nemotron", **GROUPED, **_HEAD, partial_rotary_factor=0.5),
        llama(
            "NemotronForCausalLM", norm_offset=1.0, modules=LLAMA_MODULES | {"mlp.fc": "mlp.up_proj", "mlp.gate": "-"},
            config=lambda hf: rope_gpt_config(hf, "norm_eps", "squared-relu", False, 0.5) | {"gpt_variant": "nemotron"},
        ),
    ),
    ("Starcoder2ForCausalLM", ""): (
        partial(native, "Starcoder2", **GROUPED, sliding_window=None),
        llama(
            "Starcoder2ForCausalLM", modules=LLAMA_MODULES | {"mlp.fc": "mlp.c_fc", "mlp.proj": "mlp.c_proj"},
            config=lambda hf: rope_gpt_config(hf, "norm_epsilon", "gelu", True) | {"gpt_variant": "starcoder2"},
        ),
    ),
    ("GPT2LMHeadModel", ""): (
        partial(native, "GPT2", **GPT),
        Conversion(
            "GPT2LMHeadModel", HEADS, stacked("attn.c_attn", transposed=True), GPT_MODULES, GPT2_OUTER, GPT_SIZES,
            partial(gpt_config, variant="gpt2", act="gelu_new"), transposed=True, is_embedding_split=True,
        ),
    ),
    ("GPTBigCodeForCausalLM", "starcoder"): (
        partial(native, "GPTBigCode", **GPT),
        Conversion(
            "GPTBigCodeForCausalLM", HEADS, stacked("attn.c_attn"), GPT_MODULES, GPT2_OUTER, GPT_SIZES,
            partial(gpt_config, variant="starcoder", act="gelu_pytorch_tanh"), kv_heads=lambda hf: 1,
        ),
    ),
    ("GPTJForCausalLM", ""): (
        partial(native, "GPTJ", **GPT, rotary_dim=4),
        Conversion(
            "GPTJForCausalLM", HEADS, separate("attn.q_proj", "attn.k_proj", "attn.v_proj"),
            {"attention.dense": "attn.out_proj", "mlp.fc": "mlp.fc_in", "mlp.proj": "mlp.fc_out", "input_layernorm": "ln_1"},
            {name: other for name, other in GPT2_OUTER.items() if "position" not in name}, GPT_SIZES,
            lambda hf: {
                "norm_epsilon": 1e-5, "position_embedding_type": "rope_gptj", "hidden_act": "gelu", "rotary_dim": 4,
                "num_key_value_heads": hf["_heads"], "intermediate_size": 4 * hf["n_embd"],
            },
        ),
    ),
    ("GPTNeoXForCausalLM", ""): (
        partial(native, "GPTNeoX", **{k: v for k, v in GROUPED.items() if k != "num_key_value_heads"} | FOUR_HEADS, rotary_pct=0.5),
        Conversion(
            "GPTNeoXForCausalLM", "gpt_neox.layers.{i}.", grouped("attention.query_key_value"),
            FUSED_MODULES | {"attention.dense": "attention.dense", "post_attention_layernorm": "post_attention_layernorm"}
            | {"post_layernorm": "-"},
            {"transformer.vocab_embedding": "gpt_neox.embed_in", "transformer.ln_f": "gpt_neox.final_layer_norm", "lm_head": "embed_out"},
            SIZES,
            lambda hf: {
                "position_embedding_type": "learned_absolute", "rotary_emb_base": rope_theta(hf),
                "rotary_pct": hf["rope_parameters"]["partial_rotary_factor"], "hidden_act": "gelu",
                "intermediate_size": hf["intermediate_size"],
            },
        ),
    ),
    ("FalconForCausalLM", "7b"): (partial(native, "Falcon", **_FALCON), falcon(new=False)),
    ("FalconForCausalLM", "40b, 180b"): (
        partial(native, "Falcon", **_FALCON, new_decoder_architecture=True, num_kv_heads=2), falcon(new=True),
    ),
    ("FalconForCausalLM", "rw"): (
        partial(
            native, "Falcon", attention="sdpa",
            **_FALCON | {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True, "num_attention_heads": 4},
        ),
        falcon(new=False),
    ),
    ("MptForCausalLM", "clipped"): (
        partial(native, "Mpt", **_MPT, n_heads=8, attn_config={"clip_qkv": 1.0}),
        Conversion(
            "MptForCausalLM", "transformer.blocks.{i}.", stacked("attn.Wqkv"),
            {"attention.dense": "attn.out_proj", "mlp.fc": "ffn.up_proj", "mlp.proj": "ffn.down_proj", "input_layernorm": "norm_1"}
            | {"post_layernorm": "norm_2"},
            {"transformer.vocab_embedding": "transformer.wte", "transformer.ln_f": "transformer.norm_f", "lm_head": "lm_head"},
            ("d_model", "n_layers", "n_heads", "vocab_size", ""),
            lambda hf: {
                "num_key_value_heads": 8, "intermediate_size": 4 * hf["d_model"], "position_embedding_type": "alibi", "hidden_act": "gelu",
                "bias": False, "clip_qkv": 1.0, "alibi_bias_max": 8, "logits_dtype": "float32",
            },
        ),
    ),
    ("BloomForCausalLM", ""): (
        partial(native, "Bloom", **_BLOOM, n_head=8),
        Conversion(
            "BloomForCausalLM", HEADS, grouped("self_attention.query_key_value"), FUSED_MODULES, FALCON_OUTER,
            ("hidden_size", "n_layer", "n_head", "vocab_size", ""),
            lambda hf: {
                "norm_epsilon": hf["layer_norm_epsilon"], "position_embedding_type": "alibi", "hidden_act": "gelu",
            },
        ),
    ),
    ("OPTForCausalLM", ""): (
        partial(native, "OPT", **_OPT | {"ffn_dim": 192}),
        Conversion(
            "OPTForCausalLM", "model.decoder.layers.{i}.", separate("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            {"attention.dense": "self_attn.out_proj", "mlp.fc": "fc1", "mlp.proj": "fc2", "input_layernorm": "self_attn_layer_norm"}
            | {"post_layernorm": "final_layer_norm"},
            {"transformer.vocab_embedding": "model.decoder.embed_tokens"}
            | {"transformer.embedding.position_embedding": "model.decoder.embed_positions"}
            | {"transformer.ln_f": "model.decoder.final_layer_norm", "lm_head": "lm_head"},
            SIZES,
            lambda hf: {"position_embedding_type": "learned_absolute", "hidden_act": "relu", "do_layer_norm_before": True},
            skipped_positions=2,
        ),
    ),
    ("PhiForCausalLM", ""): (
        partial(native, "Phi", **GROUPED),
        Conversion(
            "PhiForCausalLM", LAYERS, QKV,
            {"attention.dense": "self_attn.dense", "mlp.fc": "mlp.fc1", "mlp.proj": "mlp.fc2", "input_layernorm": "input_layernorm"},
            OUTER | {"transformer.ln_f": "model.final_layernorm"}, SIZES,
            lambda hf: {
                "num_key_value_heads": 2, "intermediate_size": hf["intermediate_size"], "hidden_act": "gelu_new",
                "position_embedding_type": "rope_gpt_neox",
                "rotary_base": rope_theta(hf), "rotary_scaling": None, "rotary_pct": hf["rope_parameters"]["partial_rotary_factor"],
            },
        ),
    ),
    ("Phi3ForCausalLM", "longrope"): (
        partial(native, "Phi3", **GROUPED, original_max_position_embeddings=POSITIONS, rope_parameters=_LONG),
        llama(
            "Phi3ForCausalLM", qkv=stacked("self_attn.qkv_proj"), config=phi3_config,
            modules={"attention.dense": "self_attn.o_proj", "mlp.fc": "mlp.gate_up_proj", "mlp.proj": "mlp.down_proj", **NORMS},
        ),
    ),
    ("ChatGLMForCausalLM", "chatglm3"): (
        partial(
            native, "Glm", **GROUPED, **_HEAD, attention_bias=True, rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
        ),
        llama(
            "ChatGLMForCausalLM", config=glm_config,
            modules={"attention.dense": "self_attn.o_proj", "mlp.fc": "mlp.gate_up_proj", "mlp.proj": "mlp.down_proj", **NORMS},
        ),
    ),
    ("BaichuanForCausalLM", "v1 7b"): (partial(baichuan_7b, False, **SMALL), baichuan("v1_7b")),
    ("BaichuanForCausalLM", "v2 7b"): (
        partial(baichuan_7b, True, **SMALL), baichuan("v2_7b", head=torch.nn.functional.normalize),
    ),
    ("BaichuanForCausalLM", "v1 13b"): (
        partial(baichuan_13b, False, **SMALL),
        baichuan("v1_13b", sizes=(*SIZES[:4], "model_max_length")),
    ),
    ("DeepseekForCausalLM", ""): (
        deepseek_moe,
        llama(
            "DeepseekForCausalLM",
            config=lambda hf: {
                "num_key_value_heads": 2, "intermediate_size": hf["intermediate_size"],
                "norm_epsilon": hf.get("rms_norm_eps", 1e-6), "hidden_act": "swiglu",
                "position_embedding_type": "rope_gpt_neox", "rotary_base": 10000.0, "rotary_scaling": None,
                "moe_intermediate_size": hf["moe_intermediate_size"],
                "moe": {
                    "num_experts": 8, "top_k": 3, "normalization_mode": 0,
                    "shared_expert_intermediate_size": 2 * hf["moe_intermediate_size"],
                },
            },
        ),
    ),
    ("DeepseekV2ForCausalLM", "groups of experts"): (
        partial(native, "DeepseekV2", **MLA, topk_method="group_limited_greedy", n_group=4, topk_group=2, rope_parameters=_DEEP_YARN),
        llama("DeepseekV2ForCausalLM", block=latent, qkv=none, config=partial(deepseek2_config, mode=3)),
    ),
    ("DeepseekV2ForCausalLM", "lite"): (
        partial(native, "DeepseekV2", **MLA | {"q_lora_rank": None, "routed_scaling_factor": 1.0}),
        llama("DeepseekV2ForCausalLM", block=latent, qkv=none, config=partial(deepseek2_config, mode=0)),
    ),
    ("DeepseekV3ForCausalLM", "yarn"): (
        partial(native, "DeepseekV3", **MLA, n_group=4, topk_group=2, rope_parameters=_DEEP_YARN),
        llama("DeepseekV3ForCausalLM", block=latent, qkv=none, config=partial(deepseek2_config, mode=3)),
    ),
    ("GraniteMoeForCausalLM", ""): (
        partial(native, "GraniteMoe", **GROUPED, num_local_experts=5, **_MULTIPLIERS),
        llama("GraniteMoeForCausalLM", block=granite_experts, config=lambda hf: granite_config(hf) | moe_config(hf, 1)),
    ),
    ("PhiMoEForCausalLM", "longrope"): (
        partial(
            native, "Phimoe", **GROUPED, num_local_experts=6, rope_parameters=_LONG_MSCALE, attention_bias=True, lm_head_bias=True,
            router_jitter_noise=0.2,
        ),
        llama(
            "PhiMoEForCausalLM", block=phi_experts,
            config=lambda hf: phi3_config(hf) | moe_config(hf, 2, sparse_mixer_epsilon=0.2) | {
                "attention_bias": True, "longrope_short_mscale": 1.3, "longrope_long_mscale": 1.2, "tie_word_embeddings": False,
            },
        ),
    ),
    ("MambaForCausalLM", "1"): (
        partial(native, "Mamba", **MAMBA, use_bias=True),
        Conversion(
            "MambaForCausalLM", "backbone.layers.{i}.", none, {"input_layernorm": "norm"}, STATE_OUTER, STATE_SIZES,
            partial(mamba_config, version="Mamba1"), block=mamba, stem="backbone", tp=1,
        ),
    ),
    ("MambaForCausalLM", "2"): (
        partial(native, "Mamba2", **MAMBA2),
        Conversion(
            "MambaForCausalLM", "backbone.layers.{i}.", none, {"input_layernorm": "norm"}, STATE_OUTER, STATE_SIZES,
            partial(mamba_config, version="Mamba2"), block=mamba2, stem="backbone",
        ),
    ),
    ("QWenForCausalLM", "log-n attention"): (
        partial(qwen, 20, **SMALL, use_dynamic_ntk=False),
        llama(
            "QWenForCausalLM", prefix=HEADS, qkv=stacked("attn.c_attn"), config=qwen_config, sizes=(*SIZES[:4], "max_position_embeddings"),
            modules={
                "attention.dense": "attn.c_proj", "mlp.fc": "mlp.w2", "mlp.gate": "mlp.w1", "mlp.proj": "mlp.c_proj",
                "input_layernorm": "ln_1", "post_layernorm": "ln_2",
            },
            outer={"transformer.vocab_embedding": "transformer.wte", "transformer.ln_f": "transformer.ln_f", "lm_head": "lm_head"},
            kv_heads=lambda hf: None,
        ),
    ),
}  # fmt: skip


def test_every_family_is_proven() -> None:
    """`tests/builder` has those with experts."""
    proven = {FAMILIES[conversion.architecture].architecture for _, conversion in CASES.values()}
    others = {family.architecture for family in FAMILIES.values()} - proven
    assert others == {"MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "BaiChuanForCausalLM"}


@pytest.mark.parametrize("name", CASES, ids=lambda name: "_".join(name).replace(" ", "_"))
def test_logits_equal_those_of_the_model(name: tuple[str, str], tmp_path: Path, tokenizer: Path) -> None:
    make, conversion = CASES[name]
    reference = make()
    reference.save(tmp_path / "hf")
    source = write_tensorrt_llm(tmp_path / "trt", tmp_path / "hf", conversion)
    settings = BuildConfig(tokenizer=str(tokenizer), device="cpu", dtype="float32", limits=LIMITS)
    build(source, tmp_path / "engine", settings, verify="none")
    prompt = torch.randint(3, 90, (33,), generator=torch.Generator().manual_seed(1)).tolist()
    found, expected = prefill_logits(Harness(tmp_path / "engine", 256), prompt), reference.logits(prompt, len(prompt))
    assert expected.abs().max() > 0.3
    assert float((found.double() - expected.double()).abs().max()) <= 1e-4
    assert found.argmax(-1).tolist() == expected.argmax(-1).tolist()
