"""The GGUF tensors that make each engine tensor.

llama.cpp has one name for each kind of tensor, whatever the architecture, so one table serves all architectures except for a few entries of
their rows. Fused projections are accepted in place of separate ones. The experts of a layer are one tensor of three dimensions; the reader
presents each expert as a tensor of its own, `blk.0.ffn_up_exps.5.weight`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container

from stoker.builder.checkpoint.gguf.architecture import GGUFArchitecture
from stoker.core.model_config import MLPConfig, ModelConfig, MoEConfig
from stoker.models.architecture import TensorNames, Transformed

COMMON_NAMES: dict[str, str | tuple[str, ...]] = {
    "attention_norm": "attn_norm",
    "attention_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_post_norm": "post_ffw_norm",
    "attention.qkv": ("attn_q", "attn_k", "attn_v"),
    "attention.out": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "attention.sinks": "attn_sinks.weight",
    "mlp.down": "ffn_down",
    "mlp.router": "ffn_gate_inp",
    "mlp.correction": "exp_probs_b.bias",
    "mlp.experts.down": "ffn_down_exps.{e}",
    "mlp.shared.up": ("ffn_gate_shexp", "ffn_up_shexp"),
    "mlp.shared.down": "ffn_down_shexp",
    "mlp.shared_gate": "ffn_gate_inp_shexp",
}
MODEL_NAMES: TensorNames = {
    "embed": "token_embd",
    "embed_norm": "token_embd_norm",
    "positions": "position_embd",
    "norm": "output_norm",
    "head": "output",
}
# A fused module that replaces separate ones, if layer i has it.
_FUSED = {"attention.qkv": "attn_qkv", "mlp.experts.up": "ffn_gate_up_exps.{e}"}


def tensor_names(row: GGUFArchitecture, config: ModelConfig, tensors: Container[str]) -> TensorNames:
    """The GGUF module or tensors that make each engine module or tensor. `tensors` are those of the file, with experts apart."""
    names, own = dict(MODEL_NAMES), row.names(tensors)
    for i, layer in enumerate(config.layers):
        modules: dict[str, str | tuple[str, ...] | Transformed] = {**COMMON_NAMES}
        modules |= {f"mlp.{key}": source for key, source in _up_names(layer.mlp).items()}
        modules |= own
        if config.kv_layer(i) != i:
            modules["attention.qkv"] = "attn_q"
        for module, fused in _FUSED.items():
            if f"blk.{i}.{fused.replace('{e}', '0')}.weight" in tensors:
                modules[module] = fused
        names |= {f"layers.{i}.{module}": _in_layer(i, source) for module, source in modules.items()}
    return names | row.model_names(config)


def _up_names(mlp: MLPConfig | MoEConfig | None) -> dict[str, str | tuple[str, ...]]:
    """The GGUF modules of the up-projection; empty without an MLP."""
    if mlp is None:
        return {}
    if isinstance(mlp, MoEConfig):
        return {"experts.up": ("ffn_gate_exps.{e}", "ffn_up_exps.{e}") if mlp.expert.gated else "ffn_up_exps.{e}"}
    return {"up": ("ffn_gate", "ffn_up") if mlp.gated else "ffn_up"}


def _in_layer(i: int, source: str | tuple[str, ...] | Transformed) -> str | tuple[str, ...] | Transformed:
    """The names of `source` with the prefix of layer number i."""
    if isinstance(source, str):
        return f"blk.{i}.{source}"
    if isinstance(source, Transformed):
        return dataclasses.replace(source, sources=tuple(f"blk.{i}.{name}" for name in source.sources))
    return tuple(f"blk.{i}.{name}" for name in source)
