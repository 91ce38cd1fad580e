"""gemma, gemma2, gemma3 and gemma3n. The converter adds 1 to the weights of norms, except for gemma3n, which is what the engine stores."""

from __future__ import annotations

import math
from functools import partial
from statistics import NormalDist
from typing import Any

from torch import Tensor

from stoker.builder.checkpoint.gguf.architecture import GGUFArchitecture
from stoker.builder.checkpoint.gguf.config_fields import layer_types, llama_config
from stoker.builder.checkpoint.gguf.metadata import Metadata
from stoker.core.model_config import ModelConfig
from stoker.models.architecture import TensorNames, Transformed


def _read_gemma(m: Metadata) -> dict[str, Any]:
    """Gemma 1."""
    return llama_config(m) | {"hidden_act": "gelu_pytorch_tanh"}


def _score_scale(m: Metadata, config: dict[str, Any], layers_of_27b: int) -> dict[str, Any]:
    """query_pre_attn_scalar: the head size, except in the models with 27 billion parameters, as in llama.cpp."""
    is_27b = m.get("block_count", int) == layers_of_27b
    size = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    scale = m.get("attention.scale", float)
    return {"query_pre_attn_scalar": size if scale is None else scale**-2}


def _read_gemma2(m: Metadata) -> dict[str, Any]:
    """Gemma 2, whose layers alternate between a sliding window and full attention."""
    config = llama_config(m)
    config |= {"hidden_activation": "gelu_pytorch_tanh", "head_dim": m.require("attention.key_length", int)}
    config |= {
        "sliding_window": m.get("attention.sliding_window", int, 4096),
        "attn_logit_softcapping": m.get("attn_logit_softcapping", float, 50.0),
        "final_logit_softcapping": m.get("final_logit_softcapping", float, 30.0),
        "layer_types": layer_types(m, 2),
    }
    del config["hidden_act"]
    return config | _score_scale(m, config, 46)


def _read_gemma3(m: Metadata) -> dict[str, Any]:
    """The text model of Gemma 3. Scaling and rope.freq_base apply to the layers with full attention."""
    config = llama_config(m)
    config |= {"hidden_activation": "gelu_pytorch_tanh", "head_dim": m.require("attention.key_length", int)}
    wide = config.pop("rope_scaling", {"rope_type": "default"}) | {"rope_theta": config.pop("rope_theta", 1e6)}
    local = {"rope_type": "default", "rope_theta": m.get("rope.freq_base_swa", float, 10000.0)}
    config |= {
        "sliding_window": m.get("attention.sliding_window", int, 4096),
        "final_logit_softcapping": m.get("final_logit_softcapping", float),
        "layer_types": layer_types(m, 6) if m.get("attention.sliding_window", int) else ["full_attention"] * m.require("block_count", int),
        "rope_parameters": {"full_attention": wide, "sliding_attention": local},
    }
    del config["hidden_act"]
    return config | _score_scale(m, config, 62)


def _read_gemma3n(m: Metadata) -> dict[str, Any]:
    """The text model of Gemma 3n. Defaults of absent keys are the constants of llama.cpp."""
    config, layers = llama_config(m), m.require("block_count", int)
    del config["hidden_act"]
    theta = config.pop("rope_theta", 1e6)
    local = {"rope_type": "default", "rope_theta": m.get("rope.freq_base_swa", float, 10000.0)}
    wide = config.pop("rope_scaling", {"rope_type": "default"}) | {"rope_theta": theta}
    sizes = {key: m.tensors.get(f"{key}.weight", ()) for key in ("blk.0.laurel_l", "per_layer_token_embd")}
    scales = m.get("activation_sparsity_scale", [float], [NormalDist().inv_cdf(0.95)] * 10 + [-math.inf] * (layers - 10))
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": m.require("attention.sliding_window", int),
        "layer_types": layer_types(m, 5),
        "rope_parameters": {"full_attention": wide, "sliding_attention": local},
        "final_logit_softcapping": m.get("final_logit_softcapping", float, 30.0),
        "num_kv_shared_layers": m.get("attention.shared_kv_layers", int, max(layers - 20, 0)),
        "activation_sparsity_pattern": [NormalDist().cdf(scale) for scale in scales],
        "altup_active_idx": m.get("altup.active_idx", int, 0),
        "altup_num_inputs": m.get("altup.num_inputs", int, 4),
        "hidden_size_per_layer_input": m.require("embedding_length_per_layer_input", int),
        "vocab_size_per_layer_input": sizes["per_layer_token_embd"][0],
        "laurel_rank": sizes["blk.0.laurel_l"][0],
    }


_GEMMA3N_NAMES: dict[str, str] = {
    "altup.router": "altup_router",
    "altup.router_norm": "altup_router_norm",
    "altup.predict": "altup_predict_coef",
    "altup.correct": "altup_correct_coef",
    "altup.scale": "altup_correct_scale.weight",
    "laurel.left": "laurel_l",
    "laurel.right": "laurel_r",
    "laurel.norm": "laurel_post_norm",
    "input.gate": "inp_gate",
    "input.project": "proj",
    "input.norm": "post_norm",
}


def _gemma3n_model_names(config: ModelConfig) -> TensorNames:
    """The modules outside the layers. The projections of all streams are one tensor [streams - 1, hidden, hidden]."""
    names: TensorNames = {
        "altup.expand": Transformed(("altup_proj",), _as_rows),
        "layer_inputs.embed": "per_layer_token_embd",
        "layer_inputs.project": "per_layer_model_proj",
        "layer_inputs.norm": "per_layer_proj_norm",
    }
    streams = config.altup.num_streams if config.altup is not None else 1
    return names | {f"altup.merge.{i}": Transformed(("altup_unembd_proj",), partial(_one_matrix, i)) for i in range(streams - 1)}


def _as_rows(tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """The matrices [streams - 1, hidden, hidden] one below the other."""
    return tensors[0].flatten(0, 1)


def _one_matrix(index: int, tensors: list[Tensor], config: ModelConfig) -> Tensor:
    """One of the matrices [streams - 1, hidden, hidden]."""
    return tensors[0][index]


ARCHITECTURES = (
    GGUFArchitecture(name="gemma", model_types=("gemma",), read_config=_read_gemma),
    GGUFArchitecture(name="gemma2", model_types=("gemma2",), read_config=_read_gemma2),
    GGUFArchitecture(
        name="gemma3",
        model_types=("gemma3_text", "gemma3"),
        read_config=_read_gemma3,
    ),
    GGUFArchitecture(
        name="gemma3n",
        model_types=("gemma3n_text", "gemma3n"),
        read_config=_read_gemma3n,
        names=lambda tensors: _GEMMA3N_NAMES,
        model_names=_gemma3n_model_names,
        ignored_tensors=("blk.*.attn_[kv].weight", "blk.*.attn_k_norm.weight"),  # of layers that share those of others
    ),
)
