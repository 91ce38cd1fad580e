"""Qwen 2 and 2.5: Llama with biases on q, k and v. Qwen2-MoE adds experts and a gated shared expert."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import MLPConfig, ModelConfig, MoEConfig
from stoker.models.architecture import Architecture, TensorNames
from stoker.models.architectures.llama import IGNORED, llama_config, llama_names
from stoker.models.config_fields import read_activation, read_layer_types, replace_fields, require_values, value_or, with_defaults


@with_defaults(vocab_size=151936, intermediate_size=22016, max_position_embeddings=32768, max_window_layers=28, sliding_window=4096)
def qwen2_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a Qwen 2 checkpoint, from `hf`, the data of its config.json."""
    return with_sliding_window(llama_config(hf, architecture="Qwen2ForCausalLM", qkv_bias=True, out_bias=False), hf)


def with_sliding_window(config: ModelConfig, hf: dict[str, Any]) -> ModelConfig:
    """A copy of `config` with a sliding window if use_sliding_window is set.

    It applies to the layers that layer_types lists, or else to those from max_window_layers on.
    """
    require_values(hf, use_mrope=False)
    if not hf.get("use_sliding_window") or not hf.get("sliding_window"):
        return config
    first = hf["max_window_layers"]
    layer_types = read_layer_types(hf, ["full_attention" if i < first else "sliding_attention" for i in range(config.num_layers)])
    return replace_fields(config, attention=lambda i: {"window": hf["sliding_window"] if layer_types[i] == "sliding_attention" else None})


@with_defaults(
    vocab_size=151936, hidden_size=2048, intermediate_size=5632, num_hidden_layers=24, num_attention_heads=16,
    num_key_value_heads=16, max_position_embeddings=32768, moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
    num_experts=60, num_experts_per_tok=4, qkv_bias=True, max_window_layers=28, sliding_window=4096,
)  # fmt: skip
def qwen2_moe_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a Qwen2-MoE checkpoint, from `hf`, the data of its config.json."""
    config = llama_config(hf, architecture="Qwen2MoeForCausalLM", qkv_bias=bool(hf["qkv_bias"]), out_bias=False)
    if hf.get("use_sliding_window") and not hf.get("layer_types"):
        layer_types = [
            "sliding_attention" if i % 2 == 0 and i < hf["max_window_layers"] else "full_attention" for i in range(config.num_layers)
        ]
        hf = hf | {"layer_types": layer_types}
    shared = MLPConfig(size=hf["shared_expert_intermediate_size"], activation=read_activation(hf))
    return with_experts(with_sliding_window(config, hf), hf, num_experts=hf["num_experts"], shared=shared, shared_gate=True)


def with_experts(config: ModelConfig, hf: dict[str, Any], *, num_experts: int, **moe: Any) -> ModelConfig:
    """A copy of `config` with experts in every decoder_sparse_step-th layer, except those in mlp_only_layers.

    `moe` are further fields of MoEConfig.
    """
    mlp = MoEConfig(
        num_experts=num_experts,
        top_k=hf["num_experts_per_tok"],
        expert=MLPConfig(size=hf["moe_intermediate_size"], activation=read_activation(hf)),
        renormalize=bool(hf.get("norm_topk_prob", False)),
        **moe,
    )
    step, dense = hf.get("decoder_sparse_step", 1), value_or(hf, "mlp_only_layers", [])
    return replace_fields(config, layer=lambda i: {"mlp": mlp} if i not in dense and (i + 1) % step == 0 else {})


def qwen2_moe_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of Qwen2-MoE that make each engine module, by engine name; see `TensorNames`."""
    moe = "model.layers.{i}.mlp"
    return llama_names(config) | {
        "layers.{i}.mlp.router": f"{moe}.gate",
        "layers.{i}.mlp.experts.up": (f"{moe}.experts.{{e}}.gate_proj", f"{moe}.experts.{{e}}.up_proj"),
        "layers.{i}.mlp.experts.down": f"{moe}.experts.{{e}}.down_proj",
        "layers.{i}.mlp.shared.up": (f"{moe}.shared_expert.gate_proj", f"{moe}.shared_expert.up_proj"),
        "layers.{i}.mlp.shared.down": f"{moe}.shared_expert.down_proj",
        "layers.{i}.mlp.shared_gate": f"{moe}.shared_expert_gate",
    }


# Keys that are only read with use_sliding_window.
WINDOW_KEYS = ("sliding_window", "max_window_layers", "layer_types")
ARCHITECTURES = (
    Architecture(
        name="Qwen2ForCausalLM",
        read_config=qwen2_config,
        tensor_names=llama_names,
        family="Qwen 2, 2.5, MiMo",
        oracle="transformers",
        model_types=("qwen2", "mimo"),
        aliases=("MiMoForCausalLM",),
        ignored_tensors=(*IGNORED, "model.mtp_layers.*"),  # the multi-token prediction layer of MiMo, which `--speculate` reads
        ignored_keys=(*WINDOW_KEYS, "num_nextn_predict_layers"),
    ),
    Architecture(
        name="Qwen2MoeForCausalLM",
        read_config=qwen2_moe_config,
        tensor_names=qwen2_moe_names,
        family="Qwen 1.5/2 MoE",
        oracle="transformers",
        model_types=("qwen2_moe",),
        ignored_tensors=IGNORED,
        ignored_keys=WINDOW_KEYS,
    ),
)
