"""Writes a saved Hugging Face checkpoint in the format of TensorRT-LLM, as its converters do: named, fused, sharded and padded by rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
Config = dict[str, Any]
Parts = tuple[Tensor, Tensor, Tensor]
QKV = Callable[[Tensors, str, str, Config], Parts | None]
Block = Callable[[Tensors, str, Config, int, int], Tensors]  # weights, Hugging Face prefix of the layer, config, rank, ranks


@dataclass
class Conversion:
    """How a converter of TensorRT-LLM reads a Hugging Face checkpoint. Names of modules are those of a layer, after `prefix`."""

    architecture: str  # in config.json
    prefix: str  # of layer {i}
    qkv: QKV
    modules: dict[str, str]  # TensorRT-LLM → Hugging Face: dense, fc, gate, proj and norms
    outer: dict[str, str]
    sizes: tuple[str, str, str, str, str]  # keys of hidden size, layers, heads, vocabulary and positions
    config: Callable[[Config], Config]
    transposed: bool = False  # Conv1D
    norm_offset: float = 0.0
    is_embedding_split: bool = False
    skipped_positions: int = 0
    head: Callable[[Tensor], Tensor] = lambda head: head
    kv_heads: Callable[[Config], int | None] = field(default=lambda hf: hf.get("num_key_value_heads"))
    block: Block | None = None  # further tensors of a layer
    stem: str = "transformer"
    tp: int = 2


def separate(q: str, k: str, v: str) -> QKV:
    """q, k and v are modules of their own."""

    def read(w: Tensors, prefix: str, suffix: str, hf: Config) -> Parts | None:
        names = [f"{prefix}{name}.{suffix}" for name in (q, k, v)]
        return (w[names[0]], w[names[1]], w[names[2]]) if names[0] in w else None

    return read


def stacked(name: str, transposed: bool = False) -> QKV:
    """All rows of q, then k, then v."""

    def read(w: Tensors, prefix: str, suffix: str, hf: Config) -> Parts | None:
        fused = w.get(f"{prefix}{name}.{suffix}")
        if fused is None:
            return None
        fused = fused.T if transposed and fused.dim() == 2 else fused
        size, kv = hf["_head"] * hf["_heads"], hf["_head"] * hf["_kv_heads"]
        q, k, v = fused.split((size, kv, kv))
        return q, k, v

    return read


def grouped(name: str) -> QKV:
    """Groups of query heads with their key head and value head, as reorder_qkv_weight_or_bias separates them."""

    def read(w: Tensors, prefix: str, suffix: str, hf: Config) -> Parts | None:
        fused = w.get(f"{prefix}{name}.{suffix}")
        if fused is None:
            return None
        kv_heads, per_group = hf["_kv_heads"], hf["_heads"] // hf["_kv_heads"]
        heads = fused.reshape(kv_heads, per_group + 2, hf["_head"], -1)
        q, k, v = (part.reshape(-1, *fused.shape[1:]) for part in (heads[:, :-2], heads[:, -2], heads[:, -1]))
        return q, k, v

    return read


def write_tensorrt_llm(path: Path, source: Path, conversion: Conversion) -> Path:
    """Write the checkpoint `source` in the format of TensorRT-LLM with the ranks of `conversion`."""
    tp = conversion.tp
    hf = json.loads((source / "config.json").read_text())
    w = {name: tensor.float() for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()}
    hidden, layers, heads, vocab, positions = (hf[key] if key else None for key in conversion.sizes)
    heads = heads or 1  # of models without attention
    hf |= {"_heads": heads, "_kv_heads": conversion.kv_heads(hf) or heads, "_head": hf.get("head_dim") or hidden // heads}
    path.mkdir(parents=True)
    for rank in range(tp):
        out: Tensors = {}
        for i in range(layers):
            out |= layer_tensors(w, conversion, hf, conversion.prefix.format(i=i), f"transformer.layers.{i}.", rank, tp)
        out |= outer_tensors(w, conversion, vocab, rank, tp)
        out = {name.replace("transformer.", f"{conversion.stem}."): tensor for name, tensor in out.items()}
        save_file({name: tensor.clone().contiguous() for name, tensor in out.items()}, path / f"rank{rank}.safetensors")
    # PretrainedConfig.to_dict writes these keys for every architecture.
    common = {
        "logits_dtype": "float32", "norm_epsilon": 1e-5, "head_size": hf["_head"], "num_key_value_heads": hf["_kv_heads"],
        "intermediate_size": 4 * hidden, "embedding_sharding_dim": 0, "kv_dtype": "float32", "qk_layernorm": False,
        "rotary_embedding_dim": hf["_head"], "runtime_defaults": None, "producer": {"name": "modelopt", "version": "0.30"},
    }  # fmt: skip
    config = common | {
        "architecture": conversion.architecture, "dtype": "float32", "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "vocab_size": vocab, "max_position_embeddings": positions,
        "mapping": {"world_size": tp, "tp_size": tp, "pp_size": 1}, "quantization": {"quant_algo": None},
        "use_parallel_embedding": conversion.is_embedding_split,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config | conversion.config(hf)))
    return path


def layer_tensors(w: Tensors, conversion: Conversion, hf: Config, old: str, new: str, rank: int, tp: int) -> Tensors:
    """The tensors of a layer of one rank."""
    out: Tensors = {}
    for suffix in ("weight", "bias"):
        if parts := conversion.qkv(w, old, suffix, hf):
            q, k, v = parts
            heads = hf["_kv_heads"]
            if heads < tp:
                k, v = (part.unflatten(0, (heads, -1)).repeat_interleave(tp // heads, 0).flatten(0, 1) for part in (k, v))
            out[f"{new}attention.qkv.{suffix}"] = torch.cat([part.chunk(tp)[rank] for part in (q, k, v)])
    if conversion.block is not None:
        out |= {f"{new}{name}": tensor for name, tensor in conversion.block(w, old, hf, rank, tp).items()}
    elif f"{old}mlp.gate.weight" in w:
        out |= expert_tensors(w, f"{old}mlp.", f"{new}mlp.", rank, tp)
    for module, name in conversion.modules.items():
        for suffix in ("weight", "bias"):
            tensor = w.get(f"{old}{name}.{suffix}")
            if tensor is None:
                continue
            if conversion.transposed and tensor.dim() == 2:
                tensor = tensor.T
            if module.endswith("layernorm"):
                tensor = tensor + conversion.norm_offset if suffix == "weight" else tensor
                tensor = tensor.chunk(tp)[rank] if tensor.dim() == 2 else tensor
            elif name == "mlp.gate_up_proj":
                gate, up = tensor.chunk(2)
                tensor = torch.cat((up.chunk(tp)[rank], gate.chunk(tp)[rank]))
            elif module in ("attention.dense", "mlp.proj"):
                tensor = tensor.chunk(tp, 1)[rank] if suffix == "weight" else tensor
            else:
                tensor = tensor.chunk(tp)[rank]
            out[f"{new}{module}.{suffix}"] = tensor
    return out


def expert_tensors(w: Tensors, old: str, new: str, rank: int, tp: int) -> Tensors:
    """The experts of a layer of one rank, which has a part of each matrix: up precedes gate."""
    experts = range(sum(name.startswith(f"{old}experts.") and name.endswith("down_proj.weight") for name in w))
    up, gate = (torch.stack([w[f"{old}experts.{e}.{part}_proj.weight"].chunk(tp)[rank] for e in experts]) for part in ("up", "gate"))
    down = torch.stack([w[f"{old}experts.{e}.down_proj.weight"].chunk(tp, 1)[rank] for e in experts])
    shared = [w[f"{old}shared_experts.{part}_proj.weight"].chunk(tp)[rank] for part in ("up", "gate")]
    return {
        f"{new}fc.weight": torch.cat((up, gate), 1), f"{new}proj.weight": down, f"{new}router.weight": w[f"{old}gate.weight"],
        f"{new}shared_expert.fc.weight": torch.cat(shared),
        f"{new}shared_expert.proj.weight": w[f"{old}shared_experts.down_proj.weight"].chunk(tp, 1)[rank],
    }  # fmt: skip


def outer_tensors(w: Tensors, conversion: Conversion, vocab: int, rank: int, tp: int) -> Tensors:
    """The embeddings, the last norm and the head of one rank."""
    out: Tensors = {}
    for module, name in conversion.outer.items():
        for suffix in ("weight", "bias"):
            tensor = w.get(f"{name}.{suffix}")
            if tensor is None and module == "lm_head" and suffix == "weight":
                tensor = w[f"{conversion.outer['transformer.vocab_embedding']}.weight"]  # tied
            if tensor is None:
                continue
            if module == "lm_head":
                tensor = conversion.head(tensor)
            if module == "lm_head" or (module == "transformer.vocab_embedding" and conversion.is_embedding_split):
                pad = -vocab % tp
                tensor = torch.nn.functional.pad(tensor, (0, 0, 0, pad) if tensor.dim() == 2 else (0, pad)).chunk(tp)[rank]
            if module == "transformer.ln_f" and suffix == "weight":
                tensor = tensor + conversion.norm_offset
            if module.endswith("position_embedding"):
                tensor = tensor[conversion.skipped_positions :]
            out[f"{module}.{suffix}"] = tensor
    return out
