"""Writes GGUF files of small models with the gguf library, in the layout of llama.cpp's converter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tiny
import tokenizers

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """The row permutation of llama.cpp's convert_hf_to_gguf.py (LlamaModel.permute)."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor."""
    module, suffix = name.rsplit(".", 1)
    if module.startswith("model.layers."):
        _, _, layer, part = module.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{suffix}"
    return f"{NAMES[module]}.{suffix}"


def write(
    path: Path,
    made: Any,
    kind: gguf.GGMLQuantizationType | Callable[[str], gguf.GGMLQuantizationType] | None = None,
    tokenizer: dict[str, Any] | None = None,
    metadata: dict[str, Any] | None = None,
    max_tensors: int = 0,
) -> Path:
    """Write a model. `kind`: block type of the matrices, or a function of their names. `metadata`: values to replace; None removes a value.

    `max_tensors`: the number of tensors in each part of a split file.
    """
    config, arch = made.config, made.config.model_type
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=max_tensors)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim if getattr(config, "head_dim", None) else config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for key, value in (tokenizer or byte_level(tiny.byte_level())).items():
        writer.add_key_value(f"tokenizer.{key}", *typed(value))
    fields = writer.kv_data[0]
    for key, value in (metadata or {}).items():
        fields.pop(key, None)
        if value is not None:
            writer.add_key_value(key, *typed(value))
    for name, tensor in made.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = tensor.float().numpy()
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            data = permute(data, config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads)
        if kind is not None and data.ndim == 2:
            code = kind(gguf_name(name)) if callable(kind) and not isinstance(kind, gguf.GGMLQuantizationType) else kind
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(data, code), raw_dtype=code)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# Where a block has float16 fields, if not only in its first two bytes: their byte offsets.
_HALVES = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,), "TQ1_0": (52,),
    "TQ2_0": (64,), "IQ1_M": (54,), "Q8_K": (0, 2), "MXFP4": (), "NVFP4": (),
}  # fmt: skip


def random_blocks(kind: gguf.GGMLQuantizationType, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Rows of blocks of random bytes, uint8 [rows, row_bytes], which have all values and finite scales."""
    raw = np.random.default_rng(seed).integers(0, 256, (rows, blocks, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    for field in _HALVES.get(kind.name, (0,)):
        raw[..., field + 1] &= 0x3B
    if kind.name == "MXFP4":
        raw[..., 0] &= 0x77  # exponents whose products are finite
    return raw.reshape(rows, -1)


def write_random(path: Path, kinds: dict[str, str], layers: int, hidden: int, mlp: int, vocab: int) -> Path:
    """Write a Llama of random blocks. `kinds`: the block type of modules such as ffn_down, and under "" of all others.

    Equal shapes have equal values, so that the size of a model does not matter here.
    """
    heads = hidden // 128
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(mlp)
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = ["<unk>", "<s>", "</s>", *(f"t{i}" for i in range(3, vocab))]
    pieces = {"tokens": tokens, "scores": [0.0] * vocab, "token_type": [2, 3, 3, *[1] * (vocab - 3)]}
    for key, value in {"model": "llama", "bos_token_id": 1, "eos_token_id": 2, **pieces}.items():
        writer.add_key_value(f"tokenizer.ggml.{key}", *typed(value))
    known: dict[tuple[str, int, int], np.ndarray] = {}
    layer = {"attn_q": (hidden, hidden), "attn_k": (hidden, hidden), "attn_v": (hidden, hidden), "attn_output": (hidden, hidden)}
    layer |= {"ffn_gate": (mlp, hidden), "ffn_up": (mlp, hidden), "ffn_down": (hidden, mlp)}
    shapes = {"token_embd": (vocab, hidden), "output": (vocab, hidden)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(layers) for name, shape in layer.items()}
    for name, (rows, columns) in shapes.items():
        kind = gguf.GGMLQuantizationType[kinds.get(name.rpartition(".")[2], kinds[""])]
        if (made := known.get((kind.name, rows, columns))) is None:
            made = known[kind.name, rows, columns] = random_blocks(kind, rows, columns // gguf.GGML_QUANT_SIZES[kind][0])
        writer.add_tensor(f"{name}.weight", made, raw_dtype=kind)
    for norm in ("output_norm", *(f"blk.{i}.{name}" for i in range(layers) for name in ("attn_norm", "ffn_norm"))):
        writer.add_tensor(f"{norm}.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level(core: tokenizers.Tokenizer, pre: str = "gpt-2") -> dict[str, Any]:
    """The metadata of a byte-level BPE tokenizer, without the prefix `tokenizer.`."""
    model = json.loads(core.to_str())["model"]
    tokens = [token for token, _ in sorted(core.get_vocab().items(), key=lambda item: item[1])]
    merges = [" ".join(m) if isinstance(m, list) else m for m in model["merges"]]
    kinds = [3 if token in ("<unk>", "<s>", "</s>") else 1 for token in tokens]
    return {
        "ggml.model": "gpt2", "ggml.pre": pre, "ggml.tokens": tokens, "ggml.token_type": kinds, "ggml.merges": merges,
        "ggml.bos_token_id": 1, "ggml.eos_token_id": 2, "ggml.unknown_token_id": 0, "chat_template": tiny.CHAT,
    }  # fmt: skip


def typed(value: Any) -> tuple[Any, gguf.GGUFValueType]:
    """The value with its GGUF type."""
    kinds = {
        str: gguf.GGUFValueType.STRING,
        bool: gguf.GGUFValueType.BOOL,
        int: gguf.GGUFValueType.UINT32,
        float: gguf.GGUFValueType.FLOAT32,
    }
    return value, gguf.GGUFValueType.ARRAY if isinstance(value, list) else kinds[type(value)]
