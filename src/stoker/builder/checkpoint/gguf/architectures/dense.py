"""Dense models that differ from Llama in few keys: starcoder2, internlm2, baichuan, nemotron, stablelm, seed_oss, smollm3, ernie4_5,
apertus.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.gguf.architecture import GGUFArchitecture
from stoker.builder.checkpoint.gguf.config_fields import layer_norm_config, llama_config
from stoker.builder.checkpoint.gguf.metadata import Metadata
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN
from stoker.models.architecture import Transformed
from stoker.models.architectures.apertus import activation_parameters
from stoker.models.tensor_transforms import flatten

_BAICHUAN_13B_LAYERS = 40  # the larger Baichuan has linear biases; llama.cpp, too, recognizes it by this number


def _read_starcoder2(m: Metadata) -> dict[str, Any]:
    """StarCoder 2."""
    config = layer_norm_config(m, "norm_epsilon")
    config |= {"hidden_act": "gelu_pytorch_tanh", "use_bias": m.has_bias("attn_q", "attn_qkv")}
    return config | {"sliding_window": m.get("attention.sliding_window", int) or None}


def _read_internlm2(m: Metadata) -> dict[str, Any]:
    """InternLM 2 and 2.5."""
    return llama_config(m) | {"bias": m.has_bias("attn_q", "attn_qkv")}


def _read_baichuan(m: Metadata) -> dict[str, Any]:
    """Baichuan 1. llama.cpp evaluates Baichuan 2 in the same way: its converter expects a head whose rows were scaled to length 1."""
    config = llama_config(m)
    if m.get("block_count", int) != _BAICHUAN_13B_LAYERS:
        return config
    config.pop("rope_theta", None)
    return config | {"model_max_length": config.pop("max_position_embeddings", 4096)}


def _read_nemotron(m: Metadata) -> dict[str, Any]:
    """Nemotron and Minitron. The converter adds 1 to the weights of norms."""
    config = layer_norm_config(m, "norm_eps", partial_rotary=True)
    return config | {"hidden_act": "relu2", "attention_bias": m.has_bias("attn_q", "attn_qkv"), "mlp_bias": m.has_bias("ffn_up")}


def _read_stablelm(m: Metadata) -> dict[str, Any]:
    """StableLM."""
    config = layer_norm_config(m, partial_rotary=True)
    return config | {
        "use_parallel_residual": not m.has_tensor("blk.0.ffn_norm.weight"),
        "use_qkv_bias": m.has_bias("attn_q", "attn_qkv"),
        "qk_layernorm": m.has_tensor("blk.0.attn_q_norm.weight"),
    }


def _read_seed_oss(m: Metadata) -> dict[str, Any]:
    """Seed-OSS."""
    config = llama_config(m) | {"attention_bias": m.has_bias("attn_q", "attn_qkv"), "attention_out_bias": m.has_bias("attn_output")}
    return config | {"mlp_bias": m.has_bias("ffn_up")}


def _read_smollm3(m: Metadata) -> dict[str, Any]:
    """SmolLM3. Every fourth layer has no rotary embedding; the format has no key for it."""
    config = llama_config(m) | {"no_rope_layer_interval": 4}
    return config | {"attention_bias": m.has_bias("attn_q", "attn_qkv"), "mlp_bias": m.has_bias("ffn_up")}


def _read_ernie(m: Metadata) -> dict[str, Any]:
    """ERNIE 4.5, dense."""
    return llama_config(m) | {"use_bias": m.has_bias("attn_q", "attn_qkv")}


def _read_apertus(m: Metadata) -> dict[str, Any]:
    """Apertus, whose activation has parameters in each layer (`_xielu`)."""
    _xielu(m)
    config = llama_config(m) | {"hidden_act": "xielu", "attention_bias": m.has_bias("attn_q", "attn_qkv")}
    scaling = config.pop("rope_scaling", None) or {"rope_type": "default"}
    return config | {"rope_parameters": scaling | {"rope_theta": config.pop("rope_theta")}}


def _xielu(m: Metadata) -> dict[str, Tensor]:
    """float32 [4] for each layer: the parameters of its activation, which are keys without the prefix of the architecture."""
    layers = m.require("block_count", int)
    values = [m.get_of_file(f"xielu.{name}", [float], []) for name in ("alpha_p", "alpha_n", "beta", "eps")]
    if any(len(each) != layers for each in values):
        counts = ", ".join(str(len(each)) for each in values)
        problem = f"{m.file.path}: xielu.alpha_p, alpha_n, beta and eps have {counts} values, and the model has {layers} layers"
        raise CheckpointError(f"{problem}.", cure=DOWNLOAD_AGAIN)
    return {f"blk.{i}.xielu": activation_parameters([torch.tensor(each[i]) for each in values]) for i in range(layers)}


_PER_HEAD_NORMS = {
    "attention.q_norm": Transformed(("attn_q_norm",), flatten),
    "attention.k_norm": Transformed(("attn_k_norm",), flatten),
}
ARCHITECTURES = (
    GGUFArchitecture(name="starcoder2", model_types=("starcoder2",), read_config=_read_starcoder2),
    GGUFArchitecture(name="internlm2", model_types=("internlm2",), read_config=_read_internlm2, permuted=True),
    GGUFArchitecture(name="baichuan", model_types=("baichuan",), read_config=_read_baichuan, permuted=True),
    GGUFArchitecture(name="nemotron", model_types=("nemotron",), read_config=_read_nemotron),
    GGUFArchitecture(
        name="stablelm",
        model_types=("stablelm",),
        read_config=_read_stablelm,
        names=lambda tensors: _PER_HEAD_NORMS,
        ignored_keys=("use_parallel_residual",),  # llama.cpp, too, decides by the second norm
    ),
    GGUFArchitecture(
        name="seed_oss",
        model_types=("seed_oss",),
        read_config=_read_seed_oss,
        names=lambda tensors: {"mlp_norm": "post_attention_norm"},
    ),
    GGUFArchitecture(name="smollm3", model_types=("smollm3",), read_config=_read_smollm3, permuted=True),
    GGUFArchitecture(
        name="apertus",
        model_types=("apertus",),
        read_config=_read_apertus,
        names=lambda tensors: {"mlp.activation": "xielu"},
        computed=_xielu,
    ),
    GGUFArchitecture(name="ernie4_5", model_types=("ernie4_5",), read_config=_read_ernie),
)
