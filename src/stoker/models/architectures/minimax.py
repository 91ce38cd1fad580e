"""MiniMax M2: Llama with q/k norms over all heads together, rotary on a part of each head, and experts chosen by sigmoid scores."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import MLPConfig, ModelConfig, MoEConfig, NormConfig
from stoker.models.architecture import Architecture, TensorNames
from stoker.models.architectures.llama import IGNORED, llama_config
from stoker.models.architectures.mistral import mixtral_names
from stoker.models.config_fields import read_activation, read_rope, replace_fields, require_values, value_or, with_defaults


@with_defaults(
    vocab_size=200064, hidden_size=3072, intermediate_size=1536, num_hidden_layers=62, num_attention_heads=48, num_key_value_heads=8,
    head_dim=128, max_position_embeddings=196608, num_experts_per_tok=8, num_local_experts=256,
)  # fmt: skip
def minimax_m2_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a MiniMax M2 checkpoint, from `hf`, the data of its config.json."""
    require_values(
        hf, attention_bias=False, mlp_bias=False, use_qk_norm=True, qk_norm_type="per_layer", scoring_func="sigmoid", use_routing_bias=True,
        shared_intermediate_size=0, sliding_window=None, attn_type_list=[1] * hf["num_hidden_layers"],
    )  # fmt: skip
    size = hf["head_dim"]
    partial = value_or(hf, "rotary_dim", size) / size
    config = llama_config(
        hf,
        architecture="MiniMaxM2ForCausalLM",
        rope=read_rope(hf, dim=size, theta=5e6, partial=partial),
        qk_norm=NormConfig(eps=hf.get("rms_norm_eps", 1e-6)),
        qk_norm_full=True,
    )
    moe = MoEConfig(
        num_experts=hf["num_local_experts"],
        top_k=hf["num_experts_per_tok"],
        expert=MLPConfig(size=hf["intermediate_size"], activation=read_activation(hf)),
        score="sigmoid",
        correction_bias=True,
    )
    return replace_fields(config, layer={"mlp": moe})


def minimax_m2_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of MiniMax M2 that make each engine module, by engine name; see `TensorNames`."""
    correction = "model.layers.{i}.block_sparse_moe.e_score_correction_bias"
    return mixtral_names(config) | {"layers.{i}.mlp.correction": correction}


ARCHITECTURES = (
    Architecture(
        name="MiniMaxM2ForCausalLM",
        read_config=minimax_m2_config,
        tensor_names=minimax_m2_names,
        family="MiniMax M2",
        oracle="transformers",
        model_types=("minimax_m2",),
        ignored_tensors=(*IGNORED, "model.layers.62.*", "model.layers.63.*", "model.layers.64.*"),  # multi-token prediction layers
        # Settings of multi-token prediction, and of blocks that M1 has and M2 does not.
        ignored_keys=(
            "use_mtp",
            "num_mtp_modules",
            "mtp_transformer_layers",
            "layernorm_*_beta",
            "mlp_intermediate_size",
            "shared_moe_mode",
        ),
    ),
)
