"""Tiny checkpoints of each row of the architecture table, with their references. Every row needs at least one."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import oracles
import torch
from oracles import Reference, Tensors, hf_logits, hf_model, random_like
from safetensors.torch import load_file, save_file
from torch import Tensor

VOCAB, POSITIONS = 101, 256
LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 40, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 5,
    "num_key_value_heads": 5, "max_position_embeddings": POSITIONS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GROUPED = LLAMA | {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}
MOE = GROUPED | {"moe_intermediate_size": 24, "num_experts_per_tok": 3}
MLA = GROUPED | {
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12, "v_head_dim": 10, "moe_intermediate_size": 24, "n_routed_experts": 8, "n_shared_experts": 2,
    "num_experts_per_tok": 3, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7,
}  # fmt: skip
GEMMA3N: dict[str, Any] = GROUPED | {
    "head_dim": 8, "num_hidden_layers": 6, "intermediate_size": [72, 56, 72, 64, 72, 40], "sliding_window": 9, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention", "full_attention", *["sliding_attention"] * 3],
    "activation_sparsity_pattern": [0.8, 0.95, 0.3, 0.0, 0.5, 0.0], "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": VOCAB, "laurel_rank": 5,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
GPT: dict[str, Any] = {
    "vocab_size": VOCAB, "n_positions": POSITIONS, "n_embd": 48, "n_layer": 3, "n_head": 6, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def native(config: str, *, bare: bool = False, strip: str = "", architecture: str | None = None, **sizes: Any) -> Reference:
    """A model of transformers, saved by transformers.

    `bare`: config.json has model_type but no architectures. `strip`: a prefix of tensor names that early checkpoints do not have.
    `architecture`: replaces the architecture in config.json.
    """
    model = hf_model(config, **sizes)

    def save(path: Path) -> None:
        model.save_pretrained(path)
        if strip:
            stripped = {k.removeprefix(strip): t for k, t in load_file(path / "model.safetensors").items()}
            save_file(stripped, path / "model.safetensors")
        if bare or architecture:
            data = json.loads((path / "config.json").read_text())
            data["architectures"] = [architecture] if architecture else None
            (path / "config.json").write_text(json.dumps(data))

    vocab = model.config.get_text_config().vocab_size
    return Reference(save, hf_logits(model), vocab, POSITIONS)


def published(
    config: dict[str, Any], tensors: Tensors, logits: Callable[[list[int], int], Tensor], positions: int = POSITIONS
) -> Reference:
    """A checkpoint in a layout that only the publisher's code reads."""

    def save(path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config))
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path / "model.safetensors")

    vocab = config.get("padded_vocab_size") or config.get("vocab_size") or config["text_config"]["vocab_size"]
    return Reference(save, logits, vocab, positions)


def converted(config: dict[str, Any], model: Any, rename: Callable[[Tensors], Tensors]) -> Reference:
    """The weights of a model of transformers, in the publisher's layout."""
    return published(config, rename(dict(model.state_dict())), hf_logits(model))


def renamed(tensors: Tensors, *pairs: tuple[str, str]) -> Tensors:
    """The tensors with each (old, new) part of their names replaced."""
    out = {}
    for name, tensor in tensors.items():
        for old, new in pairs:
            name = name.replace(old, new)
        out[name] = tensor
    return out


def without_tied_head(tensors: Tensors, settings: dict[str, Any]) -> Tensors:
    """The tensors without lm_head if `settings` tie it to the embeddings."""
    return {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight" or not settings.get("tie_word_embeddings")}


def fused(tensors: Tensors, layers: int, new: str, old: tuple[str, ...], join: Callable[[list[Tensor]], Tensor] = torch.cat) -> Tensors:
    """Join the tensors `old` of each layer into `new`. "{i}" stands for the layer index."""
    out = dict(tensors)
    for i in range(layers):
        for suffix in (".weight", ".bias"):
            names = [name.format(i=i) + suffix for name in old]
            if names[0] in out:
                out[new.format(i=i) + suffix] = join([out.pop(name) for name in names])
    return out


_QKV = tuple(f"model.layers.{{i}}.self_attn.{x}_proj" for x in "qkv")


def internlm(bias: bool = True, rotary: dict[str, Any] | None = None, **more: Any) -> Reference:
    """`rotary`: the setting of the publisher. It has no effect within the trained length, except for the base."""
    rotary = rotary or {"base": 10000, "type": "dynamic"}
    theta = {"rope_parameters": {"rope_type": "default", "rope_theta": rotary["base"]}}
    model = hf_model("Llama", **LLAMA | more, **theta, attention_bias=bias)
    names = {"architectures": ["InternLMForCausalLM"], "model_type": "internlm", "bias": bias, "rotary": rotary}
    return converted(LLAMA | more | names, model, lambda w: without_tied_head(w, more))


def internlm2(scaling: str = "dynamic", bias: bool = False, **more: Any) -> Reference:
    """`scaling`: the method of the rotary embedding."""
    sizes = GROUPED | more
    model = hf_model("Llama", **sizes, attention_bias=bias, rope_parameters={"rope_type": scaling, "factor": 2.0, "rope_theta": 1e6})
    groups = sizes["num_key_value_heads"]

    def by_group(parts: list[Tensor]) -> Tensor:
        q, k, v = (p.unflatten(0, (groups, -1, 8)) for p in parts)  # each group has its query heads, its key and its value
        return torch.cat((q, k, v), dim=1).flatten(0, 2)

    def rename(w: Tensors) -> Tensors:
        w = fused(without_tied_head(w, more), 3, "model.layers.{i}.attention.wqkv", _QKV, by_group)
        return renamed(
            w, ("self_attn.o_proj", "attention.wo"), ("input_layernorm", "attention_norm"), ("post_attention_layernorm", "ffn_norm"),
            ("mlp.gate_proj", "feed_forward.w1"), ("mlp.up_proj", "feed_forward.w3"), ("mlp.down_proj", "feed_forward.w2"),
            ("model.embed_tokens", "model.tok_embeddings"), ("lm_head", "output"),
        )  # fmt: skip

    config = {
        "architectures": ["InternLM2ForCausalLM"],
        "bias": bias,
        "rope_theta": 1e6,
        "rope_scaling": {"type": scaling, "factor": 2.0},
    }
    return converted(sizes | config, model, rename)


def baichuan_7b(second: bool, **more: Any) -> Reference:
    model = hf_model("Llama", **LLAMA | more)
    config = LLAMA | more | {"architectures": ["BaichuanForCausalLM" if second else "BaiChuanForCausalLM"], "model_type": "baichuan"}

    def rename(w: Tensors) -> Tensors:
        return fused(w, 3, "model.layers.{i}.self_attn.W_pack", _QKV)

    if not second:
        return converted(config, model, rename)
    tensors = rename(dict(model.state_dict()))
    with torch.no_grad():
        scaled = torch.nn.functional.normalize(model.lm_head.weight)
        model.lm_head.weight.copy_(scaled)
    return published(
        config | {"z_loss_weight": 0}, {**tensors, "lm_head.weight": scaled * torch.linspace(1, 5, VOCAB)[:, None]}, hf_logits(model)
    )


def baichuan_13b(second: bool, **more: Any) -> Reference:
    sizes = LLAMA | {"rms_norm_eps": 1e-6} | more
    tensors = fused(dict(hf_model("Llama", **sizes).state_dict()), 3, "model.layers.{i}.self_attn.W_pack", _QKV)
    config = {k: v for k, v in sizes.items() if k not in ("max_position_embeddings", "num_key_value_heads")}
    config |= {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", "model_max_length": POSITIONS}
    if second:
        config |= {"z_loss_weight": 0}
    return published(
        config,
        tensors,
        oracles.baichuan_13b(tensors, sizes["num_attention_heads"], sizes["num_hidden_layers"], sizes["rms_norm_eps"], unit_head=second),
    )


def qwen_tensors(model: Any) -> Tensors:
    w = fused(dict(model.state_dict()), 3, "transformer.h.{i}.attn.c_attn", _QKV)
    return renamed(
        w, ("model.layers", "transformer.h"), ("self_attn.o_proj", "attn.c_proj"), ("mlp.gate_proj", "mlp.w2"), ("mlp.up_proj", "mlp.w1"),
        ("mlp.down_proj", "mlp.c_proj"), ("input_layernorm", "ln_1"), ("post_attention_layernorm", "ln_2"),
        ("model.embed_tokens", "transformer.wte"), ("model.norm", "transformer.ln_f"),
    )  # fmt: skip


def qwen(trained: int, **more: Any) -> Reference:
    """Within the trained length, Qwen 1 computes what Qwen 2 does. Beyond it, log-n attention and NTK scaling take effect."""
    model = hf_model("Qwen2", **LLAMA | {key: more[key] for key in more if key in LLAMA})
    config = LLAMA | {
        "architectures": ["QWenLMHeadModel"], "model_type": "qwen", "kv_channels": 8, "seq_length": trained,
        "layer_norm_epsilon": 1e-6, "use_dynamic_ntk": True, "use_logn_attn": True, "no_bias": True,
    } | more | {"intermediate_size": 2 * model.config.intermediate_size}  # fmt: skip
    if trained >= POSITIONS or not (config["use_dynamic_ntk"] or config["use_logn_attn"]):
        return converted(config, model, lambda w: qwen_tensors(model))
    tensors = qwen_tensors(model)
    return published(config, tensors, oracles.qwen_1(tensors, config, trained, POSITIONS))


def chatglm2(ratio: float, linear: bool, grouped: bool = True) -> Reference:
    """`grouped`: two key-value heads, and biases of q, k and v; otherwise, q, k and v are fused head by head."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0 * ratio, "partial_rotary_factor": 0.5}
    if linear:
        rope = {"rope_type": "linear", "factor": ratio, "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    heads = {"head_dim": 8, "num_key_value_heads": 2 if grouped else 6}
    model = hf_model("Glm", **GROUPED | heads, rope_parameters=rope, rms_norm_eps=1e-5, attention_bias=grouped)

    def by_head(parts: list[Tensor]) -> Tensor:
        return torch.cat([part.unflatten(0, (6, -1)) for part in parts], dim=1).flatten(0, 1)

    def rename(w: Tensors) -> Tensors:
        w = fused(w, 3, "model.layers.{i}.self_attention.query_key_value", _QKV, torch.cat if grouped else by_head)
        return renamed(
            w, ("self_attn.o_proj", "self_attention.dense"), ("mlp.gate_up_proj", "mlp.dense_h_to_4h"),
            ("mlp.down_proj", "mlp.dense_4h_to_h"),
            ("model.embed_tokens", "transformer.embedding.word_embeddings"), ("model.norm", "transformer.encoder.final_layernorm"),
            ("model.layers", "transformer.encoder.layers"), ("lm_head", "transformer.output_layer"),
        ) | {"transformer.rotary_pos_emb.inv_freq": torch.ones(4)}  # fmt: skip

    config = {
        "architectures": ["ChatGLMModel"], "model_type": "chatglm", "padded_vocab_size": VOCAB, "hidden_size": 48, "ffn_hidden_size": 72,
        "num_layers": 3, "num_attention_heads": 6, "kv_channels": 8, "multi_query_attention": grouped, "multi_query_group_num": 2,
        "seq_length": POSITIONS, "add_qkv_bias": grouped, "layernorm_epsilon": 1e-5, "rope_ratio": ratio,
        "_name_or_path": "THUDM/chatglm2-6b-32k" if linear else "THUDM/chatglm3-6b-32k",
    }  # fmt: skip
    return converted(config, model, rename)


def glm_tensors(width: int, layers: int, extra: Tensors) -> Tensors:
    """Random tensors with the shapes of GPT-2 and the names of GLM."""
    generator, hidden = torch.Generator().manual_seed(3), 48
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(layers):
        p = f"transformer.layers.{i}"
        for name, rows, columns in (
            ("attention.query_key_value", 3 * hidden, hidden), ("attention.dense", hidden, hidden),
            ("mlp.dense_h_to_4h", width, hidden), ("mlp.dense_4h_to_h", hidden, width),
        ):  # fmt: skip
            shapes |= {f"{p}.{name}.weight": (rows, columns), f"{p}.{name}.bias": (rows,)}
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes |= {f"{p}.{name}.weight": (hidden,), f"{p}.{name}.bias": (hidden,)}
    shapes |= {"transformer.final_layernorm.weight": (hidden,), "transformer.final_layernorm.bias": (hidden,)}
    shapes |= {name: tuple(tensor.shape) for name, tensor in extra.items()}
    return {name: random_like(name, torch.empty(shape), generator) for name, shape in shapes.items()}


PREFIX = {"bos_token_id": 99, "mask_token_id": 97, "gmask_token_id": 98}


def chatglm1(**more: Any) -> Reference:
    config = {
        "architectures": ["ChatGLMModel"], "model_type": "chatglm", "vocab_size": VOCAB, "hidden_size": 48, "num_layers": 3,
        "num_attention_heads": 4, "inner_hidden_size": 120, "max_sequence_length": POSITIONS, "position_encoding_2d": True,
        "layernorm_epsilon": 1e-5,
    } | PREFIX | more  # fmt: skip
    heads, layers, eps = config["num_attention_heads"], config["num_layers"], config["layernorm_epsilon"]
    extra = {"transformer.word_embeddings.weight": torch.empty(VOCAB, 48), "lm_head.weight": torch.empty(VOCAB, 48)}
    tensors = glm_tensors(config["inner_hidden_size"], layers, extra)
    stored = tensors | {"transformer.layers.0.attention.rotary_emb.inv_freq": torch.ones(3)}
    return published(config, stored, oracles.chatglm_1(tensors, heads, layers, eps, start_id=99, mask_id=98))


def glm_10b(prefix: str, **more: Any) -> Reference:
    config = {
        "architectures": ["GLMModel"], "model_type": "glm", "vocab_size": VOCAB, "hidden_size": 48, "num_layers": 3,
        "num_attention_heads": 4, "max_sequence_length": POSITIONS, "block_position_encoding": True, "sop_token_id": 99,
        "mask_token_id": 97, "gmask_token_id": 98, "smask_token_id": 96,
        "layernorm_epsilon": 1e-5,
    } | more  # fmt: skip
    heads, layers, eps = config["num_attention_heads"], config["num_layers"], config["layernorm_epsilon"]
    tables = ("transformer.position_embeddings.weight", "transformer.block_position_embeddings.weight")
    extra = {name: torch.empty(POSITIONS + 1, 48) for name in tables} | {"word_embeddings.weight": torch.empty(VOCAB, 48)}
    tensors = glm_tensors(192, layers, extra)
    stored = {prefix + name: tensor for name, tensor in tensors.items()}
    return published(config, stored, oracles.glm(tensors, heads, layers, eps, start_id=99, mask_id=98))


def santacoder(**more: Any) -> Reference:
    model = hf_model("GPTBigCode", **GPT | more)
    size = model.config.n_embd // model.config.n_head

    def rename(w: Tensors) -> Tensors:
        out: Tensors = {}
        for name, tensor in w.items():
            if ".attn.c_attn" in name:
                q, kv = tensor.split((48, 2 * size))
                out[name.replace("c_attn", "q_attn")], out[name.replace("c_attn", "kv_attn")] = (
                    q.T if q.dim() == 2 else q,
                    kv.T if kv.dim() == 2 else kv,
                )
            elif name != "lm_head.weight" or not model.config.tie_word_embeddings:
                out[name] = tensor.T if ".h." in name and tensor.dim() == 2 else tensor
        return out

    config = GPT | {"architectures": ["GPT2LMHeadCustomModel"], "model_type": "gpt2", "attention_head_type": "multiquery"}
    return converted(config | {"activation_function": "gelu_pytorch_tanh"} | more, model, rename)


def deepseek_moe(first_dense: int = 1, shared: int | None = 2, **more: Any) -> Reference:
    """A Qwen2-MoE model whose shared expert has twice the weight, because its gate of zeros halves the output.

    `shared`: the number of shared experts. Without one, that of Qwen2-MoE has the output 0.
    """
    sizes = MOE | {"norm_topk_prob": False} | more
    dense = {
        "mlp_only_layers": list(range(first_dense)),
        "shared_expert_intermediate_size": sizes["moe_intermediate_size"] * (shared or 1),
        "num_experts": 8,
    }
    model = hf_model("Qwen2Moe", **sizes, **dense, qkv_bias=False)
    for layer in model.model.layers[first_dense:]:
        torch.nn.init.zeros_(layer.mlp.shared_expert_gate.weight)
        if shared is None:
            torch.nn.init.zeros_(layer.mlp.shared_expert.down_proj.weight)

    def rename(w: Tensors) -> Tensors:
        out: Tensors = {}
        for name, tensor in w.items():
            if name.endswith("experts.gate_up_proj"):
                for e in range(8):
                    gate, up = tensor[e].chunk(2)
                    stem = name.replace("gate_up_proj", f"{e}")
                    out[f"{stem}.gate_proj.weight"], out[f"{stem}.up_proj.weight"] = gate, up
            elif name.endswith("experts.down_proj"):
                out |= {name.replace("down_proj", f"{e}.down_proj.weight"): tensor[e] for e in range(8)}
            elif "shared_expert." in name and shared:
                out[name.replace("shared_expert.", "shared_experts.")] = tensor / 2 if "down_proj" in name else tensor
            elif "shared_expert" not in name:
                out[name] = tensor
        return without_tied_head(out, more)

    config = sizes | {
        "architectures": ["DeepseekForCausalLM"], "model_type": "deepseek", "n_routed_experts": 8, "n_shared_experts": shared,
        "first_k_dense_replace": first_dense, "moe_layer_freq": 1, "scoring_func": "softmax",
    }  # fmt: skip
    return converted(config, model, rename)


def refined_web() -> Reference:
    """Falcon 40B with the keys of its first config.json, in which n_head_kv implies grouped queries and two norms."""
    model = hf_model("Falcon", **_FALCON, new_decoder_architecture=True, num_kv_heads=2)
    config = {k: v for k, v in _FALCON.items() if not k.startswith("num_") and k != "max_position_embeddings"}
    config |= {
        "architectures": ["RWForCausalLM"], "model_type": "RefinedWeb", "n_layer": 3, "n_head": 6, "n_head_kv": 2, "alibi": False,
        "apply_residual_connection_post_layernorm": False, "bias": False, "parallel_attn": True,
    }  # fmt: skip
    return converted(config, model, lambda w: {name: tensor for name, tensor in w.items() if name != "lm_head.weight"})


def exaone3(tied: bool, scaling: dict[str, Any] | None = None, **more: Any) -> Reference:
    """`scaling`: the rotary setting, that of EXAONE 3.5 by default."""
    rope, sizes = scaling or _LLAMA3, {"rms_norm_eps": 1e-6, "hidden_act": "silu"} | GROUPED | more
    model = hf_model("Llama", **sizes, rope_parameters=rope, tie_word_embeddings=tied)

    def rename(w: Tensors) -> Tensors:
        w = renamed(
            w, ("self_attn.o_proj", "attn.attention.out_proj"), ("self_attn", "attn.attention"), ("mlp.gate_proj", "mlp.c_fc_0"),
            ("mlp.up_proj", "mlp.c_fc_1"), ("mlp.down_proj", "mlp.c_proj"), ("input_layernorm", "ln_1"),
            ("post_attention_layernorm", "ln_2"), ("model.embed_tokens", "transformer.wte"), ("model.norm", "transformer.ln_f"),
            ("model.layers", "transformer.h"),
        )  # fmt: skip
        return {name: tensor for name, tensor in w.items() if not (tied and name == "lm_head.weight")}

    other = {"num_hidden_layers": "num_layers", "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation_function"}
    config = {other.get(k, k): v for k, v in sizes.items()} | {
        "architectures": ["ExaoneForCausalLM"], "model_type": "exaone", "tie_word_embeddings": tied, "rope_theta": rope["rope_theta"],
        "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"},
    }  # fmt: skip
    return converted(config, model, rename)


def minicpm(scale_emb: float = 3, scale_depth: float = 1.4, dim_model_base: int = 16, **more: Any) -> Reference:
    """Granite with the multipliers that MiniCPM computes from scale_depth and dim_model_base."""
    sizes = GROUPED | more
    model = hf_model(
        "Granite", **sizes, embedding_multiplier=scale_emb, logits_scaling=48 / dim_model_base, attention_multiplier=8**-0.5,
        residual_multiplier=scale_depth / sizes["num_hidden_layers"] ** 0.5,
    )  # fmt: skip
    names = {"architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "tie_word_embeddings": bool(more.get("tie_word_embeddings"))}
    multipliers = {"scale_emb": scale_emb, "scale_depth": scale_depth, "dim_model_base": dim_model_base}
    return converted(sizes | names | multipliers, model, lambda w: without_tied_head(w, more))


def phi3_yarn(**more: Any) -> Reference:
    """Longrope under its early name, which transformers replaces in the files that it writes."""
    model = hf_model("Phi3", **GROUPED, **more)
    config = GROUPED | more | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
    return converted(config | {"rope_parameters": more["rope_parameters"] | {"rope_type": "yarn"}}, model, lambda w: w)


def stablelm_epoch() -> Reference:
    """StableLM with the names of keys in its first config.json."""
    model = hf_model("StableLm", **GROUPED, partial_rotary_factor=0.5, layer_norm_eps=1e-3)
    config = GROUPED | {"architectures": ["StableLMEpochForCausalLM"], "model_type": "stablelm_epoch", "rope_pct": 0.5, "norm_eps": 1e-3}
    return converted(config, model, lambda w: w)


def qwen_vl(name: str, **text: Any) -> Reference:
    """A multimodal model, of which the engine contains the language model."""
    vision: dict[str, Any] = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "out_hidden_size": 48,
    }  # fmt: skip
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]} if name != "Qwen2_5_VL" else {"fullatt_block_indexes": [0]}
    model = hf_model(name, multimodal=True, text_config=GROUPED | text, vision_config=vision, image_token_id=98, video_token_id=97)
    return Reference(lambda path: model.save_pretrained(path), hf_logits(model), VOCAB, POSITIONS)


def multimodal(name: str, text: dict[str, Any], vision: dict[str, Any], **more: Any) -> Reference:
    """A multimodal model as transformers saves it, of which the engine contains the language model."""
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 8}
    model = hf_model(name, multimodal=True, text_config=text, vision_config=small | vision, **more)
    return Reference(lambda path: model.save_pretrained(path), hf_logits(model), VOCAB, POSITIONS)


def kimi_k25(**text: Any) -> Reference:
    positions = {"pos_emb_height": 4, "pos_emb_width": 4, "patch_size": 4}
    return multimodal("Kimi_K25", MLA | {"n_group": 1, "topk_group": 1} | text, positions, projection_hidden_size=16)


def kimi_k25_published() -> Reference:
    """The names of tensors and keys in the publisher's files."""
    sizes = MLA | {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    model = hf_model("DeepseekV3", seed=1, **sizes, rope_parameters=_DEEP_YARN)
    tensors = {f"language_model.{name}": tensor for name, tensor in split_experts(dict(model.state_dict()), 8).items()}
    tensors |= {"vision_tower.patch_embed.proj.weight": torch.ones(3), "mm_projector.proj.0.weight": torch.ones(3)}
    text = sizes | {"model_type": "kimi_k2", "rope_theta": _DEEP_YARN["rope_theta"]}
    text |= {"rope_scaling": {"type": "yarn"} | {k: v for k, v in _DEEP_YARN.items() if k not in ("rope_theta", "rope_type")}}
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text}
    return published(config | {"tie_word_embeddings": False, "media_placeholder_token_id": 98}, tensors, hf_logits(model))


def split_experts(tensors: Tensors, count: int) -> Tensors:
    """The tensors with stacked experts as one linear each, as transformers saves them."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        for e in range(count) if "mlp.experts." in name else ():
            stem = name.replace("gate_up_proj", f"{e}").replace("down_proj", f"{e}")
            parts = zip(("gate_proj", "up_proj"), tensor[e].chunk(2), strict=True) if "gate_up" in name else (("down_proj", tensor[e]),)
            out |= {f"{stem}.{part}.weight": rows for part, rows in parts}
        if "mlp.experts." not in name:
            out[name] = tensor
    return out


def mistral3(kind: str, tied: bool, **text: Any) -> Reference:
    vision = {"model_type": "pixtral", "head_dim": 8, "image_size": 16}
    return multimodal("Mistral3", GROUPED | {"model_type": kind, **_HEAD} | text, vision, tie_word_embeddings=tied)


def llama4(**text: Any) -> Reference:
    vision = {"image_size": 16, "projector_input_dim": 16, "projector_output_dim": 16, "vision_output_dim": 16}
    return multimodal("Llama4", _LLAMA4 | text, vision)


def qwen3_vl_moe_published() -> Reference:
    """Experts [experts, in, out], as in the published files."""
    model = hf_model("Qwen3Moe", **MOE, num_experts=6, norm_topk_prob=True, head_dim=12)
    tensors: Tensors = {"model.visual.merger.norm.weight": torch.ones(3)}
    for name, tensor in model.state_dict().items():
        stacked = "mlp.experts." in name
        tensors[name.replace("model.", "model.language_model.", 1)] = tensor.transpose(1, 2) if stacked else tensor
    text = MOE | {"model_type": "qwen3_vl_moe_text", "num_experts": 6, "head_dim": 12, "norm_topk_prob": True, "rope_theta": 10000.0}
    text |= {"rope_scaling": {"mrope_interleaved": True, "mrope_section": [2, 2, 2], "rope_type": "default"}}
    config = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe", "text_config": text}
    return published(config | {"tie_word_embeddings": False}, tensors, hf_logits(model))


def gemma3_multimodal(scaling: dict[str, Any] | None = None, **more: Any) -> Reference:
    """The text model, saved as the language model of a multimodal checkpoint. `scaling`: the rotary setting of full attention."""
    sizes = GROUPED | {"head_dim": 8, "sliding_window": 9, "sliding_window_pattern": 2, "query_pre_attn_scalar": 10} | more
    rope = scaling or _GEMMA3_ROPE["full_attention"]
    model = hf_model("Gemma3Text", **sizes, rope_parameters=_GEMMA3_ROPE | {"full_attention": rope})
    tensors = {f"language_model.{name}": tensor for name, tensor in without_tied_head(dict(model.state_dict()), _TIED | more).items()}
    tensors |= {
        "vision_tower.vision_model.post_layernorm.weight": torch.ones(3),
        "multi_modal_projector.mm_input_projection_weight": torch.ones(3),
    }
    text = {k: v for k, v in sizes.items() if not k.endswith("token_id")} | {"model_type": "gemma3_text", "rope_theta": rope["rope_theta"]}
    text |= {"rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"}}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text, "vocab_size": VOCAB}
    return published(config, tensors, hf_logits(model))


def gemma3n_multimodal(**more: Any) -> Reference:
    """The text model, saved as the language model of a multimodal checkpoint, with weights that the published files have in addition."""
    sizes = GEMMA3N | more
    model = hf_model("Gemma3nText", **sizes)
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in without_tied_head(dict(model.state_dict()), _TIED | more).items()
    }
    if sizes["num_kv_shared_layers"]:
        shared, rows = "model.language_model.layers.5.self_attn", sizes["num_key_value_heads"] * sizes["head_dim"]
        tensors |= {f"{shared}.k_proj.weight": torch.ones(rows, 48), f"{shared}.v_proj.weight": torch.ones(rows, 48)}
        tensors |= {f"{shared}.k_norm.weight": torch.ones(sizes["head_dim"])}
    tensors |= {"model.vision_tower.timm_model.conv_stem.conv.weight": torch.ones(3)}
    tensors |= {"model.audio_tower.conformer.0.norm.weight": torch.ones(3), "model.embed_vision.embedding.weight": torch.ones(3)}
    text = {k: v for k, v in sizes.items() if not k.endswith("token_id")} | {"model_type": "gemma3n_text", "rope_theta": 1e6}
    text |= {"altup_coef_clip": 120.0, "altup_lr_multiplier": 1.0, "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000.0}
    config = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": text, "audio_token_id": 99}
    return published(config, tensors, hf_logits(model))


_TIED = {"tie_word_embeddings": True}  # unless a file has another value
_GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}
_OPT = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "ffn_dim": 80, "num_attention_heads": 6,
    "max_position_embeddings": POSITIONS, "word_embed_proj_dim": 48, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2,
}  # fmt: skip
_FALCON = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "ffn_hidden_size": 80, "bos_token_id": 1,
    "eos_token_id": 2, "max_position_embeddings": POSITIONS,
}  # fmt: skip
# The eager attention of Falcon in transformers adds ALiBi twice; sdpa adds it once.
_RW = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True, "num_attention_heads": 4}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    "rope_theta": 500000.0,
}  # fmt: skip
_LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.2],
    "long_factor": [2.0, 4.0],
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
}
_DEEP_YARN = YARN | {"mscale": 0.7, "mscale_all_dim": 0.6}
_NEOX = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"} | {"hidden_size": 48, "num_attention_heads": 3}
_BLOOM = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "n_layer": 3,
    "seq_length": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MPT = {"vocab_size": VOCAB, "d_model": 48, "n_layers": 3, "max_seq_len": POSITIONS, "bos_token_id": 1, "eos_token_id": 2}
_HEAD = {"head_dim": 8}
_ERNIE_MOE = {"moe_intermediate_size": 24, "moe_num_experts": 6, "moe_k": 3, "moe_num_shared_experts": 2}
MOE_ONLY = {"moe_intermediate_size": 24, "num_experts_per_tok": 3}
_MULTIPLIERS = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.6, "attention_multiplier": 0.2}
_LLAMA4 = GROUPED | {
    **_HEAD, "intermediate_size_mlp": 80, "num_local_experts": 5, "interleave_moe_layer_step": 2, "no_rope_layer_interval": 3,
    "attention_chunk_size": 16, "floor_scale": 16,
}  # fmt: skip
_MINISTRAL3 = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4, "original_max_position_embeddings": 32}
_LONG_MSCALE = {
    "rope_type": "longrope", "short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [2.0, 4.0, 4.0, 8.0], "short_mscale": 1.3,
    "long_mscale": 1.2, "rope_theta": 10000.0, "original_max_position_embeddings": POSITIONS,
}  # fmt: skip
_NTK_ALPHA = {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
_LAST_FULL = ["sliding_attention", "sliding_attention", "full_attention"]

# (row of the table, what is special about this checkpoint) → a function that creates its reference.
MAMBA2: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 40, "num_hidden_layers": 3, "num_heads": 8, "head_dim": 10, "state_size": 12, "n_groups": 4,
    "expand": 2, "conv_kernel": 4, "chunk_size": 8, "time_step_limit": (0.0, 90.0), "layer_norm_epsilon": 0.05,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
QWEN3_NEXT = MOE | {
    "num_hidden_layers": 4, "head_dim": 16, "num_experts": 6, "shared_expert_intermediate_size": 40, "linear_key_head_dim": 12,
    "linear_value_head_dim": 10, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "norm_topk_prob": True, "rms_norm_eps": 0.05,
}  # fmt: skip
_DELTA_NET_KEYS = ("head_dim", "rms_norm_eps", "num_hidden_layers")
QWEN3_5 = GROUPED | {key: value for key, value in QWEN3_NEXT.items() if key in _DELTA_NET_KEYS or key.startswith("linear_")}
QWEN3_NEXT_MOE = {key: value for key, value in QWEN3_NEXT.items() if key not in ("intermediate_size", "norm_topk_prob")}
NEMOTRON_H: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12,
    "max_position_embeddings": POSITIONS, "ssm_state_size": 12, "mamba_num_heads": 8, "mamba_head_dim": 10, "n_groups": 4,
    "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "layer_norm_epsilon": 0.05, "time_step_limit": (0.0, 90.0),
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GRANITE_HYBRID = GROUPED | {
    "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24, "shared_intermediate_size": 40, "mamba_n_heads": 8,
    "mamba_d_head": 12, "mamba_d_state": 12, "time_step_limit": (0.0, 90.0), "embedding_multiplier": 3.0, "logits_scaling": 0.5,
    "residual_multiplier": 0.6, "attention_multiplier": 0.3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
FALCON_H1 = GROUPED | {
    "num_hidden_layers": 2,
    "mamba_d_ssm": 80, "mamba_n_heads": 8, "mamba_d_head": 10, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_norm_before_gate": False,
    "mlp_multipliers": [0.88, 0.59], "ssm_multipliers": [0.35, 0.25, 0.4, 0.5, 0.3], "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.6,
    "attention_in_multiplier": 1.1, "attention_out_multiplier": 0.9, "key_multiplier": 0.4, "embedding_multiplier": 5.0,
    "lm_head_multiplier": 0.7, "time_step_limit": (0.0, 90.0), "rms_norm_eps": 0.05,
}  # fmt: skip
JAMBA = GROUPED | {
    "num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 6, "num_experts_per_tok": 3, "mamba_d_state": 12,
    "rms_norm_eps": 0.05,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 40, "num_hidden_layers": 3, "state_size": 12, "layer_norm_epsilon": 0.05, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip

CASES: dict[tuple[str, str], Callable[[], Reference]] = {
    ("LlamaForCausalLM", "plain"): partial(native, "Llama", **LLAMA),
    ("LlamaForCausalLM", "tied, biased, no architectures"): partial(
        native, "Llama", bare=True, **GROUPED, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=12
    ),
    ("LlamaForCausalLM", "llama3"): partial(native, "Llama", **GROUPED, rope_parameters=_LLAMA3),
    ("LlamaForCausalLM", "yarn"): partial(native, "Llama", **GROUPED, rope_parameters=YARN),
    ("LlamaForCausalLM", "linear"): partial(
        native, "Llama", **GROUPED, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    ),
    ("LlamaForCausalLM", "Xverse"): partial(native, "Llama", architecture="XverseForCausalLM", **LLAMA),
    ("LlamaForCausalLM", "Aquila"): partial(native, "Llama", architecture="AquilaForCausalLM", **GROUPED),
    ("MistralForCausalLM", "window"): partial(native, "Mistral", **GROUPED, sliding_window=11, **_HEAD),
    ("MixtralForCausalLM", "plain"): partial(native, "Mixtral", **GROUPED, num_local_experts=5, num_experts_per_tok=2),
    ("DeepseekForCausalLM", "plain"): deepseek_moe,
    ("DeepseekV2ForCausalLM", "groups"): partial(
        native, "DeepseekV2", **MLA, topk_method="group_limited_greedy", n_group=4, topk_group=2, rope_parameters=_DEEP_YARN
    ),
    ("DeepseekV2ForCausalLM", "lite"): partial(native, "DeepseekV2", **MLA | {"q_lora_rank": None}),
    ("DeepseekV3ForCausalLM", "yarn"): partial(native, "DeepseekV3", **MLA, n_group=4, topk_group=2, rope_parameters=_DEEP_YARN),
    ("DeepseekV3ForCausalLM", "kimi"): partial(
        native, "DeepseekV3", **MLA | {"n_shared_experts": 1}, n_group=1, topk_group=1, rope_parameters=YARN | {"mscale": 1.0}
    ),
    ("DeepseekV3ForCausalLM", "halves"): partial(native, "DeepseekV3", **MLA, n_group=1, topk_group=1, rope_interleave=False),
    ("FalconForCausalLM", "7b"): partial(native, "Falcon", **_FALCON),
    ("FalconForCausalLM", "40b, 180b"): partial(native, "Falcon", **_FALCON, new_decoder_architecture=True, num_kv_heads=2),
    ("FalconForCausalLM", "11b"): partial(
        native, "Falcon", **_FALCON, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1
    ),
    ("FalconForCausalLM", "rw"): partial(native, "Falcon", attention="sdpa", **_FALCON | _RW),
    ("FalconForCausalLM", "40b as first published"): refined_web,
    ("InternLMForCausalLM", "plain"): internlm,
    ("InternLM2ForCausalLM", "plain"): internlm2,
    ("InternLM3ForCausalLM", "plain"): partial(native, "InternLM3", architecture="InternLM3ForCausalLM", **GROUPED, **_HEAD),
    ("BaiChuanForCausalLM", "v1_7b"): partial(baichuan_7b, False),
    ("BaiChuanForCausalLM", "v1_13b"): partial(baichuan_13b, False),
    ("BaichuanForCausalLM", "v2_7b"): partial(baichuan_7b, True),
    ("BaichuanForCausalLM", "v2_13b"): partial(baichuan_13b, True),
    ("ChatGLM1Model", "plain"): chatglm1,
    ("GLMModel", "plain"): partial(glm_10b, ""),
    ("GLMModel", "with its head's prefix"): partial(glm_10b, "glm."),
    ("ChatGLMModel", "chatglm3"): partial(chatglm2, 1.0, linear=False),
    ("ChatGLMModel", "chatglm3_32k"): partial(chatglm2, 50.0, linear=False),
    ("ChatGLMModel", "chatglm2_32k"): partial(chatglm2, 4.0, linear=True),
    ("GlmForCausalLM", "plain"): partial(native, "Glm", **GROUPED, **_HEAD),
    ("Glm4ForCausalLM", "plain"): partial(native, "Glm4", **GROUPED, **_HEAD),
    ("GPTJForCausalLM", "plain"): partial(native, "GPTJ", **GPT, rotary_dim=4),
    ("GPTJForCausalLM", "tied head with a bias"): partial(native, "GPTJ", **GPT, rotary_dim=4, tie_word_embeddings=True),
    ("QWenLMHeadModel", "within"): partial(qwen, POSITIONS),
    ("QWenLMHeadModel", "past"): partial(qwen, 50),
    ("Qwen2ForCausalLM", "MiMo"): partial(native, "Qwen2", architecture="MiMoForCausalLM", **GROUPED),
    ("Qwen2ForCausalLM", "window"): partial(
        native, "Qwen2", **GROUPED, use_sliding_window=True, sliding_window=9, max_window_layers=1, tie_word_embeddings=True
    ),
    ("Qwen2MoeForCausalLM", "plain"): partial(
        native, "Qwen2Moe", **MOE, num_experts=6, shared_expert_intermediate_size=56, decoder_sparse_step=1, mlp_only_layers=[1]
    ),
    ("Qwen3ForCausalLM", "plain"): partial(native, "Qwen3", **GROUPED, **_HEAD),
    ("Mamba2ForCausalLM", "plain"): partial(native, "Mamba2", **MAMBA2),
    ("Mamba2ForCausalLM", "one group, biased, tied, long kernel"): partial(
        native,
        "Mamba2",
        **MAMBA2 | {"n_groups": 1, "conv_kernel": 7, "time_step_limit": (0.0, float("inf"))},
        use_bias=True,
        tie_word_embeddings=True,
    ),
    ("Mamba2ForCausalLM", "no convolution bias, bounded time step"): partial(
        native, "Mamba2", **MAMBA2 | {"expand": 1, "head_dim": 5, "time_step_limit": (0.6, 0.9)}, use_conv_bias=False, bare=True
    ),
    ("GraniteMoeHybridForCausalLM", "plain"): partial(native, "GraniteMoeHybrid", **GRANITE_HYBRID),
    ("GraniteMoeHybridForCausalLM", "no experts, rotary, tied"): partial(
        native,
        "GraniteMoeHybrid",
        **GRANITE_HYBRID | {"num_local_experts": 0, "mamba_n_groups": 2},
        position_embedding_type="rope",
        tie_word_embeddings=True,
    ),
    ("GraniteMoeHybridForCausalLM", "biased, no attention, bounded time step"): partial(
        native,
        "GraniteMoeHybrid",
        **GRANITE_HYBRID | {"layer_types": None, "time_step_limit": (0.5, 0.8)},
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        mamba_d_conv=3,
    ),
    ("FalconH1ForCausalLM", "plain"): partial(native, "FalconH1", **FALCON_H1),
    ("FalconH1ForCausalLM", "norm, biased, tied, no sizes of heads"): partial(
        native,
        "FalconH1",
        **FALCON_H1 | {"mamba_d_ssm": None, "mamba_d_head": "auto", "mamba_rms_norm": True},
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        mamba_proj_bias=True,
        projectors_bias=True,
    ),
    ("FalconH1ForCausalLM", "norm before gate, head size, one group, bounded time step, yarn"): partial(
        native,
        "FalconH1",
        **FALCON_H1 | {"mamba_n_groups": 1, "mamba_norm_before_gate": True, "time_step_limit": (0.6, 0.9), "mlp_multipliers": None},
        mamba_rms_norm=True,
        mamba_conv_bias=False,
        mamba_d_conv=3,
        head_dim=14,
        rope_parameters=YARN,
    ),
    ("JambaForCausalLM", "plain"): partial(native, "Jamba", **JAMBA),
    ("JambaForCausalLM", "no experts, tied, biased, long kernel"): partial(
        native,
        "Jamba",
        **JAMBA | {"num_experts": 1, "num_experts_per_tok": 1},
        tie_word_embeddings=True,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        mamba_d_conv=7,
    ),
    ("JambaForCausalLM", "experts everywhere, step rank, attention first, wide"): partial(
        native,
        "Jamba",
        **JAMBA | {"attn_layer_period": 4, "attn_layer_offset": 0, "num_key_value_heads": 6},
        expert_layer_period=1,
        expert_layer_offset=0,
        mamba_dt_rank=5,
        mamba_expand=3,
    ),
    ("MambaForCausalLM", "plain"): partial(native, "Mamba", **MAMBA),
    ("MambaForCausalLM", "biased, untied, long kernel, no architectures"): partial(
        native, "Mamba", **MAMBA, use_bias=True, conv_kernel=7, tie_word_embeddings=False, time_step_rank=5, bare=True
    ),
    ("MambaForCausalLM", "no convolution bias, narrow"): partial(
        native, "Mamba", **MAMBA, use_conv_bias=False, expand=1, hidden_act="gelu"
    ),
    ("FalconMambaForCausalLM", "plain"): partial(native, "FalconMamba", **MAMBA, mixer_rms_eps=0.05),
    ("FalconMambaForCausalLM", "biased, untied"): partial(
        native, "FalconMamba", **MAMBA, mixer_rms_eps=0.02, use_bias=True, tie_word_embeddings=False, conv_kernel=2
    ),
    ("FalconMambaForCausalLM", "no convolution bias, step rank, wide"): partial(
        native, "FalconMamba", **MAMBA, mixer_rms_eps=0.05, use_conv_bias=False, time_step_rank=7, expand=3
    ),
    ("Qwen3NextForCausalLM", "plain"): partial(native, "Qwen3Next", **QWEN3_NEXT),
    ("Qwen3NextForCausalLM", "dense layers, biased attention, other layer types"): partial(
        native,
        "Qwen3Next",
        **QWEN3_NEXT | {"linear_num_value_heads": 6},
        mlp_only_layers=[1],
        attention_bias=True,
        layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"],
    ),
    ("Qwen3NextForCausalLM", "one key head, tied, sparse step 2"): partial(
        native,
        "Qwen3Next",
        **QWEN3_NEXT | {"linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 2},
        tie_word_embeddings=True,
        decoder_sparse_step=2,
    ),
    ("NemotronHForCausalLM", "plain"): partial(native, "NemotronH", **NEMOTRON_H),
    ("NemotronHForCausalLM", "no MLPs in places, biased, longer steps"): partial(
        native,
        "NemotronH",
        **NEMOTRON_H | {"layers_block_type": ["mamba", "mamba", "mlp", "attention", "mamba"], "time_step_min": 0.7},
        use_bias=True,
        mlp_bias=True,
    ),
    ("NemotronHForCausalLM", "experts in groups, one group of heads"): partial(
        native,
        "NemotronH",
        **NEMOTRON_H | {"n_routed_experts": 8, "n_groups": 1},
        n_group=4,
        topk_group=2,
        norm_topk_prob=False,
        routed_scaling_factor=2.5,
        use_conv_bias=False,
    ),
    ("Qwen3_5ForCausalLM", "plain"): partial(native, "Qwen3_5Text", **QWEN3_5),
    ("Qwen3_5ForCausalLM", "biased, tied, other layer types, rotary fraction"): partial(
        native,
        "Qwen3_5Text",
        **QWEN3_5 | {"linear_num_value_heads": 6, "linear_conv_kernel_dim": 3},
        attention_bias=True,
        tie_word_embeddings=True,
        layer_types=["full_attention", "linear_attention", "full_attention", "linear_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
    ),
    ("Qwen3_5ForCausalLM", "with vision"): partial(
        qwen_vl,
        "Qwen3_5",
        **{key: QWEN3_5[key] for key in QWEN3_5 if key not in GROUPED},
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]},
    ),
    ("Qwen3_5MoeForCausalLM", "plain"): partial(native, "Qwen3_5MoeText", **QWEN3_NEXT_MOE | {"num_experts_per_tok": 6}),
    ("Qwen3_5MoeForCausalLM", "one key head, biased, other layer types"): partial(
        native,
        "Qwen3_5MoeText",
        **QWEN3_NEXT_MOE | {"linear_num_key_heads": 1, "linear_num_value_heads": 3},
        attention_bias=True,
        layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"],
    ),
    ("Qwen3MoeForCausalLM", "plain"): partial(native, "Qwen3Moe", **MOE, num_experts=6, norm_topk_prob=True, **_HEAD),
    ("GPT2LMHeadModel", "plain"): partial(native, "GPT2", **GPT),
    ("GPT2LMHeadModel", "as first published"): partial(native, "GPT2", strip="transformer.", **GPT, scale_attn_by_inverse_layer_idx=True),
    ("GPTBigCodeForCausalLM", "starcoder"): partial(native, "GPTBigCode", **GPT),
    ("GPTBigCodeForCausalLM", "many heads"): partial(native, "GPTBigCode", **GPT, multi_query=False),
    ("GPT2LMHeadCustomModel", "santacoder"): santacoder,
    ("Starcoder2ForCausalLM", "window"): partial(native, "Starcoder2", **GROUPED, sliding_window=13),
    ("GemmaForCausalLM", "plain"): partial(native, "Gemma", **GROUPED, **_HEAD),
    ("Gemma2ForCausalLM", "plain"): partial(native, "Gemma2", **GROUPED, **_HEAD, sliding_window=9, query_pre_attn_scalar=10),
    ("Gemma3ForCausalLM", "plain"): partial(
        native,
        "Gemma3Text",
        **GROUPED,
        **_HEAD,
        sliding_window=9,
        sliding_window_pattern=2,
        query_pre_attn_scalar=10,
        rope_parameters=_GEMMA3_ROPE,
    ),
    ("Gemma3ForCausalLM", "scaled local layers"): partial(
        native,
        "Gemma3Text",
        **GROUPED,
        **_HEAD,
        sliding_window=9,
        sliding_window_pattern=2,
        query_pre_attn_scalar=10,
        rope_parameters=_GEMMA3_ROPE | {"sliding_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    ("Gemma3ForConditionalGeneration", "text"): gemma3_multimodal,
    ("Gemma3nForCausalLM", "plain"): partial(native, "Gemma3nText", **GEMMA3N),
    ("Gemma3nForCausalLM", "another active stream, biased, scaled, untied"): partial(
        native,
        "Gemma3nText",
        **GEMMA3N
        | {"altup_active_idx": 2, "altup_num_inputs": 3, "altup_correct_scale": False, "final_logit_softcapping": 7.0}
        | {"layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 4},
        attention_bias=True,
        tie_word_embeddings=False,
        rope_parameters=_GEMMA3_ROPE,
    ),
    ("Gemma3nForCausalLM", "other layer types, nothing shared"): partial(
        native,
        "Gemma3nText",
        **GEMMA3N | {"num_kv_shared_layers": 0, "layer_types": ["full_attention", *["sliding_attention"] * 4, "full_attention"]},
    ),
    ("Gemma3nForCausalLM", "one kind of layer, few inputs, one size"): partial(
        native,
        "Gemma3nText",
        **GEMMA3N | {"layer_types": ["full_attention"] * 6, "num_kv_shared_layers": 5, "vocab_size_per_layer_input": 60},
        hidden_activation="gelu",
    ),
    ("Gemma3nForConditionalGeneration", "text"): gemma3n_multimodal,
    ("PhiForCausalLM", "plain"): partial(native, "Phi", **LLAMA | {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3}),
    ("PhiForCausalLM", "tied head with a bias"): partial(native, "Phi", **GROUPED, tie_word_embeddings=True),
    ("PhiForCausalLM", "q/k norms"): partial(native, "Phi", **GROUPED, qk_layernorm=True),
    ("Phi3ForCausalLM", "window"): partial(native, "Phi3", **GROUPED, sliding_window=11),
    ("Phi3ForCausalLM", "longrope"): partial(native, "Phi3", **GROUPED, original_max_position_embeddings=POSITIONS, rope_parameters=_LONG),
    ("OPTForCausalLM", "plain"): partial(native, "OPT", **_OPT),
    ("OPTForCausalLM", "350m"): partial(native, "OPT", **_OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 20}),
    ("OPTForCausalLM", "as first published"): partial(native, "OPT", strip="model.", **_OPT),
    ("BloomForCausalLM", "plain"): partial(native, "Bloom", **_BLOOM, n_head=8),
    ("BloomForCausalLM", "as first published, six heads"): partial(native, "Bloom", strip="transformer.", **_BLOOM, n_head=6),
    ("BloomForCausalLM", "residual after norm"): partial(
        native, "Bloom", **_BLOOM, n_head=4, apply_residual_connection_post_layernorm=True
    ),
    ("MptForCausalLM", "plain"): partial(native, "Mpt", **_MPT, n_heads=8),
    ("MptForCausalLM", "clipped, six heads"): partial(native, "Mpt", **_MPT, n_heads=6, attn_config={"clip_qkv": 1.0}),
    ("GPTNeoXForCausalLM", "parallel"): partial(native, "GPTNeoX", **_NEOX),
    ("GPTNeoXForCausalLM", "sequential"): partial(native, "GPTNeoX", **_NEOX, use_parallel_residual=False, attention_bias=False),
    ("Olmo2ForCausalLM", "plain"): partial(native, "Olmo2", **GROUPED),
    ("ArceeForCausalLM", "biased"): partial(native, "Arcee", **GROUPED, attention_bias=True, mlp_bias=True),
    ("ArceeForCausalLM", "tied, yarn"): partial(native, "Arcee", **GROUPED, tie_word_embeddings=True, rope_parameters=YARN),
    ("NemotronForCausalLM", "plain"): partial(native, "Nemotron", **GROUPED, **_HEAD),
    ("NemotronForCausalLM", "biased, a quarter rotated"): partial(
        native, "Nemotron", **GROUPED, attention_bias=True, mlp_bias=True, head_dim=16, partial_rotary_factor=0.25
    ),
    ("NemotronForCausalLM", "tied, linear"): partial(
        native,
        "Nemotron",
        **GROUPED,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    ),
    ("SeedOssForCausalLM", "plain"): partial(native, "SeedOss", **GROUPED, head_dim=12),
    ("SeedOssForCausalLM", "all biases"): partial(native, "SeedOss", **GROUPED, **_HEAD, attention_out_bias=True, mlp_bias=True),
    ("SeedOssForCausalLM", "no biases, tied"): partial(
        native, "SeedOss", **LLAMA, **_HEAD, attention_bias=False, tie_word_embeddings=True, rope_parameters=YARN
    ),
    ("SmolLM3ForCausalLM", "plain"): partial(native, "SmolLM3", **GROUPED, no_rope_layer_interval=3),
    ("SmolLM3ForCausalLM", "window"): partial(
        native, "SmolLM3", **GROUPED, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=9, attention_bias=True
    ),
    ("SmolLM3ForCausalLM", "layers listed, yarn"): partial(
        native, "SmolLM3", **GROUPED, no_rope_layers=[0, 1, 0], rope_parameters=YARN, tie_word_embeddings=False, mlp_bias=True
    ),
    ("CwmForCausalLM", "plain"): partial(native, "Cwm", **GROUPED, **_HEAD, sliding_window=9, rope_parameters=_LLAMA3),
    ("CwmForCausalLM", "layers listed, biased"): partial(
        native,
        "Cwm",
        **GROUPED,
        head_dim=12,
        sliding_window=13,
        layer_types=_LAST_FULL,
        mlp_bias=True,
        tie_word_embeddings=True,
        rope_parameters=YARN,
    ),
    ("StableLmForCausalLM", "plain"): partial(native, "StableLm", **GROUPED),
    ("StableLmForCausalLM", "12b"): partial(native, "StableLm", **GROUPED, qk_layernorm=True, use_parallel_residual=True),
    ("StableLmForCausalLM", "1.6b"): partial(
        native, "StableLm", **LLAMA, use_qkv_bias=True, tie_word_embeddings=True, partial_rotary_factor=0.5
    ),
    ("StableLmForCausalLM", "as first published"): stablelm_epoch,
    ("OlmoForCausalLM", "plain"): partial(native, "Olmo", **LLAMA),
    ("OlmoForCausalLM", "clipped"): partial(native, "Olmo", **GROUPED, clip_qkv=0.7, attention_bias=True),
    ("OlmoForCausalLM", "tied, yarn"): partial(native, "Olmo", **GROUPED, tie_word_embeddings=True, rope_parameters=YARN),
    ("OlmoeForCausalLM", "plain"): partial(native, "Olmoe", **GROUPED, num_experts=6, num_experts_per_tok=2),
    ("OlmoeForCausalLM", "weights sum to 1, biased"): partial(
        native, "Olmoe", **LLAMA, num_experts=5, num_experts_per_tok=3, norm_topk_prob=True, attention_bias=True
    ),
    ("Olmo3ForCausalLM", "window"): partial(native, "Olmo3", **GROUPED, sliding_window=9, layer_types=_LAST_FULL),
    ("Olmo3ForCausalLM", "yarn of full attention"): partial(
        native, "Olmo3", **GROUPED, sliding_window=9, layer_types=_LAST_FULL, rope_scaling=YARN
    ),
    ("Exaone4ForCausalLM", "plain"): partial(native, "Exaone4", **GROUPED, sliding_window=9, sliding_window_pattern=3),
    ("Exaone4ForCausalLM", "full attention"): partial(
        native, "Exaone4", **GROUPED, sliding_window=None, layer_types=["full_attention"] * 3, tie_word_embeddings=True
    ),
    ("Exaone4ForCausalLM", "llama3, wide heads"): partial(
        native, "Exaone4", **GROUPED, sliding_window=9, layer_types=_LAST_FULL, head_dim=12, rope_parameters=_LLAMA3
    ),
    ("Ernie4_5ForCausalLM", "plain"): partial(native, "Ernie4_5", **GROUPED, **_HEAD),
    ("Ernie4_5ForCausalLM", "biased, linear"): partial(
        native,
        "Ernie4_5",
        **GROUPED,
        head_dim=12,
        use_bias=True,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    ),
    ("GraniteForCausalLM", "plain"): partial(
        native, "Granite", **GROUPED, embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.6, attention_multiplier=0.2
    ),
    ("GraniteMoeForCausalLM", "plain"): partial(
        native,
        "GraniteMoe",
        **GROUPED,
        num_local_experts=5,
        num_experts_per_tok=2,
        embedding_multiplier=3.0,
        logits_scaling=2.0,
        residual_multiplier=0.6,
        attention_multiplier=0.2,
    ),
    ("GraniteMoeForCausalLM", "tied, biased, yarn"): partial(
        native, "GraniteMoe", **GROUPED, num_local_experts=4, tie_word_embeddings=True, attention_bias=True, rope_parameters=YARN
    ),
    ("MiniMaxM2ForCausalLM", "half rotated"): partial(
        native,
        "MiniMaxM2",
        **GROUPED,
        **_HEAD,
        num_local_experts=6,
        num_experts_per_tok=2,
        rotary_dim=4,
        rope_parameters={"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},  # what transformers 5.17 reads
    ),
    ("MiniMaxM2ForCausalLM", "wide heads"): partial(
        native, "MiniMaxM2", **GROUPED, head_dim=12, num_local_experts=4, num_experts_per_tok=3, tie_word_embeddings=True
    ),
    ("Glm4MoeForCausalLM", "air"): partial(
        native, "Glm4Moe", **MOE, head_dim=12, n_routed_experts=5, n_shared_experts=2, first_k_dense_replace=2, norm_topk_prob=False
    ),
    ("Glm4MoeForCausalLM", "4.5"): partial(
        native, "Glm4Moe", **MOE, **_HEAD, n_routed_experts=6, use_qk_norm=True, attention_bias=True, routed_scaling_factor=2.5
    ),
    ("Glm4MoeForCausalLM", "groups, linear"): partial(
        native,
        "Glm4Moe",
        **MOE,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    ),
    ("Ernie4_5_MoeForCausalLM", "plain"): partial(native, "Ernie4_5_Moe", **GROUPED, **_ERNIE_MOE),
    ("Ernie4_5_MoeForCausalLM", "few layers of experts, not tied"): partial(
        native,
        "Ernie4_5_Moe",
        **GROUPED,
        **_ERNIE_MOE | {"moe_num_shared_experts": 0, "moe_k": 2},
        moe_layer_interval=2,
        moe_layer_end_index=1,
        tie_word_embeddings=False,
    ),
    ("ExaoneForCausalLM", "3.5"): partial(exaone3, False),
    ("ExaoneForCausalLM", "tied"): partial(exaone3, True),
    ("MiniCPMForCausalLM", "plain"): minicpm,
    ("MiniCPMForCausalLM", "tied"): partial(minicpm, tie_word_embeddings=True),
    ("Qwen2_5_VLForConditionalGeneration", "text"): partial(
        qwen_vl, "Qwen2_5_VL", rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 2, 1]}
    ),
    ("Qwen2_5_VLForConditionalGeneration", "window"): partial(
        qwen_vl,
        "Qwen2_5_VL",
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    ),
    ("Qwen3VLForConditionalGeneration", "text"): partial(
        qwen_vl, "Qwen3VL", head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 1, 1]}
    ),
    ("Qwen3VLForConditionalGeneration", "biased, wide heads"): partial(
        qwen_vl,
        "Qwen3VL",
        head_dim=12,
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]},
    ),
    ("Qwen3VLMoeForConditionalGeneration", "text"): partial(
        qwen_vl, "Qwen3VLMoe", **MOE_ONLY, num_experts=6, head_dim=8, tie_word_embeddings=False
    ),
    ("Qwen3VLMoeForConditionalGeneration", "a dense layer, biased"): partial(
        qwen_vl, "Qwen3VLMoe", **MOE_ONLY, num_experts=4, mlp_only_layers=[1], attention_bias=True, rope_parameters=_LLAMA3
    ),
    ("Qwen3VLMoeForConditionalGeneration", "as published"): qwen3_vl_moe_published,
    ("ApertusForCausalLM", "plain"): partial(native, "Apertus", **GROUPED),
    ("ApertusForCausalLM", "biased, linear"): partial(
        native, "Apertus", **LLAMA, attention_bias=True, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    ),
    ("ApertusForCausalLM", "tied, yarn"): partial(native, "Apertus", **GROUPED, tie_word_embeddings=True, rope_parameters=YARN),
    ("HunYuanDenseV1ForCausalLM", "plain"): partial(native, "HunYuanDenseV1", **GROUPED, **_HEAD),
    ("HunYuanDenseV1ForCausalLM", "alpha, tied"): partial(
        native, "HunYuanDenseV1", **GROUPED, head_dim=12, tie_word_embeddings=True, rope_parameters=_NTK_ALPHA | {"rope_theta": 1e4}
    ),
    ("HunYuanDenseV1ForCausalLM", "biased, yarn"): partial(
        native, "HunYuanDenseV1", **LLAMA, **_HEAD, attention_bias=True, rope_parameters=YARN
    ),
    ("HunYuanMoEV1ForCausalLM", "plain"): partial(native, "HunYuanMoEV1", **GROUPED, **_HEAD, num_experts=5, moe_topk=2),
    ("HunYuanMoEV1ForCausalLM", "experts by layer, alpha"): partial(
        native,
        "HunYuanMoEV1",
        **GROUPED,
        head_dim=12,
        num_experts=4,
        moe_topk=[1, 2, 3],
        rope_parameters=_NTK_ALPHA | {"rope_theta": 1e4},
    ),
    ("HunYuanMoEV1ForCausalLM", "tied, biased"): partial(
        native, "HunYuanMoEV1", **LLAMA, **_HEAD, num_experts=3, moe_topk=3, tie_word_embeddings=True, attention_bias=True
    ),
    ("PhimoeForCausalLM", "two experts"): partial(native, "Phimoe", **GROUPED, num_local_experts=2, router_jitter_noise=0.5),
    ("PhimoeForCausalLM", "plain"): partial(native, "Phimoe", **GROUPED, num_local_experts=5),
    ("PhimoeForCausalLM", "all biases, window"): partial(
        native,
        "Phimoe",
        **GROUPED,
        num_local_experts=4,
        attention_bias=True,
        lm_head_bias=True,
        sliding_window=11,
        router_jitter_noise=0.2,
    ),
    ("PhimoeForCausalLM", "longrope"): partial(native, "Phimoe", **GROUPED, num_local_experts=6, rope_parameters=_LONG_MSCALE),
    ("Llama4ForCausalLM", "plain"): partial(native, "Llama4Text", **_LLAMA4),
    ("Llama4ForCausalLM", "layers listed, two experts, no norms"): partial(
        native,
        "Llama4Text",
        **_LLAMA4 | {"head_dim": 12, "moe_layers": [0, 2], "no_rope_layers": [0, 1, 1], "num_experts_per_tok": 2, "use_qk_norm": False},
        attention_bias=True,
    ),
    ("Llama4ForCausalLM", "yarn, tied"): partial(
        native, "Llama4Text", **_LLAMA4, rope_parameters=YARN, tie_word_embeddings=True, attn_temperature_tuning=False
    ),
    ("Llama4ForConditionalGeneration", "scout"): partial(llama4, interleave_moe_layer_step=1, rope_parameters=_LLAMA3),
    ("Llama4ForConditionalGeneration", "maverick"): partial(llama4, use_qk_norm=False),
    ("MinistralForCausalLM", "layers listed"): partial(
        native, "Ministral", **GROUPED, **_HEAD, sliding_window=9, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    ("MinistralForCausalLM", "tied, full attention"): partial(
        native, "Ministral", **LLAMA, **_HEAD, sliding_window=9, layer_types=["full_attention"] * 3, tie_word_embeddings=True
    ),
    ("MinistralForCausalLM", "window, wide heads"): partial(native, "Ministral", **GROUPED, head_dim=12, sliding_window=13),
    ("Ministral3ForCausalLM", "plain"): partial(native, "Ministral3", **GROUPED, **_HEAD, rope_parameters=_MINISTRAL3),
    ("Ministral3ForCausalLM", "window, tied"): partial(
        native, "Ministral3", **GROUPED, head_dim=12, rope_parameters=_MINISTRAL3, sliding_window=9, tie_word_embeddings=True
    ),
    ("Ministral3ForCausalLM", "mscale"): partial(native, "Ministral3", **LLAMA, **_HEAD, rope_parameters=_MINISTRAL3 | {"mscale": 0.7}),
    ("Mistral3ForConditionalGeneration", "3.1"): partial(mistral3, "mistral", False, sliding_window=None),
    ("Mistral3ForConditionalGeneration", "ministral 3"): partial(mistral3, "ministral3", False, rope_parameters=_MINISTRAL3),
    ("Mistral3ForConditionalGeneration", "tied, window"): partial(mistral3, "mistral", True, sliding_window=9),
    ("Kimi_K25ForConditionalGeneration", "as published"): kimi_k25_published,
    ("Kimi_K25ForConditionalGeneration", "yarn"): partial(kimi_k25, rope_parameters=_DEEP_YARN),
    ("GraniteMoeSharedForCausalLM", "plain"): partial(
        native, "GraniteMoeShared", **GROUPED, num_local_experts=5, num_experts_per_tok=2, shared_intermediate_size=20, **_MULTIPLIERS
    ),
    ("GraniteMoeSharedForCausalLM", "no shared expert, tied"): partial(
        native, "GraniteMoeShared", **GROUPED, num_local_experts=4, shared_intermediate_size=0, tie_word_embeddings=True
    ),
    ("GraniteMoeSharedForCausalLM", "biased, yarn"): partial(
        native, "GraniteMoeShared", **LLAMA, num_local_experts=4, shared_intermediate_size=88, attention_bias=True, rope_parameters=YARN
    ),
    ("CohereForCausalLM", "plain"): partial(native, "Cohere", **GROUPED, logit_scale=0.5),
    ("CohereForCausalLM", "q/k norms"): partial(native, "Cohere", **GROUPED, use_qk_norm=True),
    ("Cohere2ForCausalLM", "window"): partial(native, "Cohere2", **GROUPED, sliding_window=9, sliding_window_pattern=3),
    ("GptOssForCausalLM", "plain"): partial(
        native,
        "GptOss",
        **GROUPED,
        **_HEAD,
        num_local_experts=6,
        num_experts_per_tok=2,
        sliding_window=9,
        rope_parameters=YARN | {"truncate": False},
    ),
}

FIRST = {row: (row, what) for row, what in reversed(CASES)}  # one case per row
