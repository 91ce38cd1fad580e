"""The text model of Gemma 3n: several residual streams (AltUp), a low-rank product beside attention (LAuReL), an input of each layer of its
own, sparse activations in the first layers, and last layers that read the keys and values of earlier ones.
"""

from __future__ import annotations

from typing import Any

from stoker.base.errors import CheckpointError
from stoker.core.model_config import AltUpConfig, AttentionConfig, LayerConfig, MLPConfig, ModelConfig, NormConfig, RopeConfig
from stoker.models.architecture import Architecture, TensorNames
from stoker.models.architectures.gemma import LANGUAGE_MODEL_PREFIXES
from stoker.models.architectures.llama import llama_names
from stoker.models.config_fields import (
    apply_rope_scaling,
    read_activation,
    read_layer_types,
    read_max_positions,
    read_per_layer,
    read_rope,
    value_or,
    with_defaults,
)
from stoker.models.config_values import SIZE, each, either

_SLIDING, _FULL = "sliding_attention", "full_attention"
_SPARSE_LAYERS = 10  # the first layers of a model without activation_sparsity_pattern, if it has more


@with_defaults(
    vocab_size=262400, hidden_size=2048, intermediate_size=16384, num_hidden_layers=35, num_attention_heads=8, num_key_value_heads=2,
    head_dim=256, max_position_embeddings=32768, rms_norm_eps=1e-6, sliding_window=512, final_logit_softcapping=30.0,
    tie_word_embeddings=True, attention_bias=False, rope_local_base_freq=10000.0, vocab_size_per_layer_input=262144,
    hidden_size_per_layer_input=256, altup_active_idx=0, altup_correct_scale=True, altup_num_inputs=4, num_kv_shared_layers=15,
    laurel_rank=64,
)  # fmt: skip
def gemma3n_config(hf: dict[str, Any], *, architecture: str = "Gemma3nForCausalLM") -> ModelConfig:
    """The ModelConfig of a Gemma 3n checkpoint, from `hf`, the data of its config.json."""
    depth, norm = hf["num_hidden_layers"], NormConfig(eps=hf["rms_norm_eps"])
    activation = read_activation(hf, "hidden_activation", "gelu_pytorch_tanh")
    kinds = read_layer_types(hf, [_SLIDING if (i + 1) % 5 else _FULL for i in range(depth)])
    altup = _read_altup(hf, depth, activation)
    ropes = _read_ropes(hf)
    sizes, sparsities = read_per_layer(hf, "intermediate_size", depth), _read_sparsities(hf, depth)
    layers = [
        LayerConfig(
            attention=_attention(hf, ropes, kinds[i], kv_layer, norm),
            mlp=MLPConfig(size=sizes[i], activation=activation, sparsity=sparsities[i]),
            norm=norm,
            layout="altup",
            altup=altup,
        )
        for i, kv_layer in enumerate(_kv_layers(kinds, hf["num_kv_shared_layers"]))
    ]
    return ModelConfig(
        architecture=architecture,
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        max_positions=read_max_positions(hf, ropes[_FULL]),
        layers=tuple(layers),
        norm=norm,
        tie_head=bool(hf["tie_word_embeddings"]),
        embed_scale=hf["hidden_size"] ** 0.5,
        logit_softcap=hf["final_logit_softcapping"],
        altup=altup,
    )


def _read_altup(hf: dict[str, Any], depth: int, activation: str) -> AltUpConfig:
    """What the layers have beside attention and MLP. Raises CheckpointError for an active stream that does not exist."""
    streams, active = hf["altup_num_inputs"], hf["altup_active_idx"]
    if not 0 <= active < streams or streams < 2:
        raise CheckpointError(
            f"config.json: altup_active_idx={active} with altup_num_inputs={streams} is not supported.",
            cure="It must be the index of one of at least 2 streams.",
        )
    return AltUpConfig(
        num_streams=streams,
        active=active,
        scale_corrected=bool(hf["altup_correct_scale"]),
        laurel_rank=hf["laurel_rank"],
        num_inputs=depth,
        input_size=hf["hidden_size_per_layer_input"],
        input_vocab=hf["vocab_size_per_layer_input"],
        input_activation=activation,
    )


def _read_ropes(hf: dict[str, Any]) -> dict[str, RopeConfig]:
    """The rotary embedding of each kind of layer."""
    local = (hf.get("rope_parameters") or {}).get(_SLIDING) or {}
    theta = float(local.get("rope_theta") or hf["rope_local_base_freq"])
    return {
        _FULL: read_rope(hf, dim=hf["head_dim"], theta=1e6, kind=_FULL),
        _SLIDING: apply_rope_scaling(RopeConfig(dim=hf["head_dim"], theta=theta), local, hf),
    }


def _read_sparsities(hf: dict[str, Any], depth: int) -> list[float]:
    """The sparsity of the activations of each layer."""
    sparse = _SPARSE_LAYERS if depth > _SPARSE_LAYERS else 0
    default = [0.95] * sparse + [0.0] * (depth - sparse)
    return [float(each) for each in read_per_layer(hf, "activation_sparsity_pattern", depth, default)]


def _kv_layers(kinds: list[str], num_shared: int) -> list[int | None]:
    """For each layer, the layer whose keys and values it reads; None: its own.

    The last `num_shared` layers read those of the last layer of the same kind before them. Raises CheckpointError if there is none.
    """
    first = len(kinds) - num_shared
    if num_shared and set(kinds[: max(first, 0)]) != set(kinds):
        raise CheckpointError(
            f"config.json: num_kv_shared_layers={num_shared} is not supported.",
            cure="A layer of each kind must come before the shared ones.",
        )
    last = {kind: i for i, kind in enumerate(kinds[:first])}
    return [None if i < first else last[kind] for i, kind in enumerate(kinds)]


def _attention(hf: dict[str, Any], ropes: dict[str, RopeConfig], kind: str, kv_layer: int | None, norm: NormConfig) -> AttentionConfig:
    """The attention of a layer of one kind. Scores are not scaled, because queries and keys are normalized."""
    bias, window = bool(hf["attention_bias"]), hf["sliding_window"]
    return AttentionConfig(
        num_heads=hf["num_attention_heads"],
        num_kv_heads=hf["num_key_value_heads"],
        head_size=hf["head_dim"],
        qkv_bias=bias,
        out_bias=bias,
        scale=1.0,
        window=window if kind == _SLIDING else None,
        rope=ropes[kind],
        qk_norm=norm,
        v_norm=None if kv_layer is not None else NormConfig(eps=norm.eps, weight=False),
        kv_layer=kv_layer,
    )


def gemma3n_text_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of the language model in a multimodal Gemma 3n checkpoint."""
    text = value_or(hf, "text_config", {})
    return gemma3n_config(
        {"tie_word_embeddings": hf.get("tie_word_embeddings", True)} | text, architecture="Gemma3nForConditionalGeneration"
    )


def gemma3n_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of Gemma 3n that make each engine module, by engine name; see `TensorNames`."""
    assert config.altup is not None
    layer, others = "model.layers.{i}", range(config.altup.num_streams - 1)
    names = llama_names(config) | {
        "altup.expand": tuple(f"model.altup_projections.{k}" for k in others),
        "layer_inputs.embed": "model.embed_tokens_per_layer",
        "layer_inputs.project": "model.per_layer_model_projection",
        "layer_inputs.norm": "model.per_layer_projection_norm",
        "layers.{i}.attention_post_norm": f"{layer}.post_attention_layernorm",
        "layers.{i}.mlp_norm": f"{layer}.pre_feedforward_layernorm",
        "layers.{i}.mlp_post_norm": f"{layer}.post_feedforward_layernorm",
        "layers.{i}.altup.router": f"{layer}.altup.modality_router",
        "layers.{i}.altup.router_norm": f"{layer}.altup.router_norm",
        "layers.{i}.altup.predict": f"{layer}.altup.prediction_coefs",
        "layers.{i}.altup.correct": f"{layer}.altup.correction_coefs",
        "layers.{i}.altup.scale": f"{layer}.altup.correct_output_scale",
        "layers.{i}.laurel.left": f"{layer}.laurel.linear_left",
        "layers.{i}.laurel.right": f"{layer}.laurel.linear_right",
        "layers.{i}.laurel.norm": f"{layer}.laurel.post_laurel_norm",
        "layers.{i}.input.gate": f"{layer}.per_layer_input_gate",
        "layers.{i}.input.project": f"{layer}.per_layer_projection",
        "layers.{i}.input.norm": f"{layer}.post_per_layer_input_norm",
    }
    names |= {f"altup.merge.{k}": f"model.altup_unembed_projections.{k}" for k in others}
    shared = [i for i in range(config.num_layers) if config.kv_layer(i) != i]
    return names | {f"layers.{i}.attention.qkv": f"model.layers.{i}.self_attn.q_proj" for i in shared}


# Tensors that files contain and that the model does not read: those of layers that share keys and values, and an unused scale.
_UNREAD = ("model.layers.*.self_attn.[kv]_proj.*", "model.layers.*.self_attn.[kv]_norm.weight", "*.altup.correct_output_scale")
# Of training, and a factor of Gemma 2 that Gemma 3n does not have.
_IGNORED_KEYS = ("altup_coef_clip", "altup_lr_multiplier", "query_pre_attn_scalar")
ARCHITECTURES = (
    Architecture(
        name="Gemma3nForCausalLM",
        read_config=gemma3n_config,
        tensor_names=gemma3n_names,
        family="Gemma 3n (text model alone)",
        oracle="transformers",
        tensor_parallel="any; a pipeline stage needs the layers whose keys and values its layers read",
        model_types=("gemma3n_text",),
        ignored_tensors=_UNREAD,
        kinds={"intermediate_size": either(SIZE, each(SIZE))},
        ignored_keys=_IGNORED_KEYS,
    ),
    Architecture(
        name="Gemma3nForConditionalGeneration",
        read_config=gemma3n_text_config,
        tensor_names=gemma3n_names,
        family="Gemma 3n E2B and E4B (text)",
        oracle="transformers",
        tensor_parallel="any; a pipeline stage needs the layers whose keys and values its layers read",
        model_types=("gemma3n",),
        ignored_tensors=(*_UNREAD, "*vision_tower.*", "*audio_tower.*", "*embed_vision.*", "*embed_audio.*"),
        tensor_renames=LANGUAGE_MODEL_PREFIXES,
        kinds={"intermediate_size": either(SIZE, each(SIZE))},
        ignored_keys=(
            *_IGNORED_KEYS, "vision_config*", "audio_config*", "image_token_id", "audio_token_id", "boi_token_id", "eoi_token_id",
            "boa_token_id", "eoa_token_id", "audio_soft_tokens_per_image", "vision_soft_tokens_per_image",
        ),
    ),
)  # fmt: skip
