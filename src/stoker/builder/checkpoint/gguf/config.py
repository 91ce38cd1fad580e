"""Converts the metadata of a GGUF file to the data of a config.json, and its tensor names to those of Hugging Face."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import gguf
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.base.registry import nearest
from stoker.builder.checkpoint.gguf.file import GGUFFile
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN
from stoker.builder.checkpoint.weights import TensorInfo

# GGUF architecture → (name in `architectures` of config.json, model_type).
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}

# GGUF metadata key, without the architecture's prefix → config.json key.
_CONFIG_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_REQUIRED_KEYS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")

# GGUF module name → Hugging Face module name, within the model or a layer.
_MODULE_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
ROPE_FACTORS = "rope_freqs.weight"

# Texts of tokens that end a generation although no metadata key names them (special_eog_ids in llama.cpp's src/llama-vocab.cpp).
_END_TOKENS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>",
    "<|end_of_text|>", "<end_of_utterance>",
})  # fmt: skip


def hugging_face_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor: blk.3.attn_q.weight → model.layers.3.self_attn.q_proj.weight.

    Unknown names do not change; the build rejects them later as unused.
    """
    module, _, suffix = name.rpartition(".")
    if found := re.fullmatch(r"blk\.(\d+)\.(\w+)", module):
        layer, part = found.groups()
        return f"model.layers.{layer}.{_MODULE_NAMES[part]}.{suffix}" if part in _MODULE_NAMES else name
    return f"{_MODULE_NAMES[module]}.{suffix}" if module in _MODULE_NAMES else name


def read_architecture(file: GGUFFile) -> str:
    """The name of the GGUF architecture. Raises CheckpointError when it is not supported."""
    architecture: str = file.get("general.architecture", str, "")
    if architecture not in ARCHITECTURES:
        near = nearest(architecture, list(ARCHITECTURES)) or list(ARCHITECTURES)
        raise CheckpointError(f"{file.path}: GGUF architecture {architecture!r} is not supported.", cure=f"Supported: {', '.join(near)}.")
    return architecture


def read_config(file: GGUFFile, tensors: Mapping[str, TensorInfo], rope_factors: Tensor | None) -> dict[str, Any]:
    """The data of a config.json for the model in a GGUF file.

    `tensors` are those of the file under Hugging Face names; `rope_factors` is the content of ROPE_FACTORS, if the file has it. Raises
    CheckpointError when metadata is missing, or describes something that config.json cannot express.
    """
    architecture = read_architecture(file)
    name, model_type = ARCHITECTURES[architecture]
    config: dict[str, Any] = {"architectures": [name], "model_type": model_type, "hidden_act": "silu"}
    for key, config_key in _CONFIG_KEYS.items():
        if (value := file.metadata.get(f"{architecture}.{key}")) is not None:
            config[config_key] = value
    embedding = tensors.get("model.embed_tokens.weight")
    config.setdefault("vocab_size", embedding.shape[0] if embedding else 0)
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    config["attention_bias"] = model_type == "llama" and "model.layers.0.self_attn.q_proj.bias" in tensors
    config["dtype"] = _original_dtype(file)
    if end_ids := _end_ids(file):
        config["eos_token_id"] = end_ids
    for key, config_key in (("bos", "bos_token_id"), ("padding", "pad_token_id")):
        if (token := file.get(f"tokenizer.ggml.{key}_token_id", int)) is not None:
            config[config_key] = token
    if (scaling := _rope_scaling(file, architecture, rope_factors)) is not None:
        config["rope_scaling"] = scaling
    if missing := [key for key in _REQUIRED_KEYS if key not in config]:
        raise CheckpointError(f"{file.path}: the metadata lacks {', '.join(missing)}.", cure=DOWNLOAD_AGAIN)
    _check_unsupported(file, architecture, config)
    return config


def _end_ids(file: GGUFFile) -> list[int]:
    """The ids of all tokens that end a generation, eos first.

    They are the tokens that the metadata names, and tokens that llama.cpp recognizes by their text.
    """
    named = [file.get(f"tokenizer.ggml.{key}_token_id", int) for key in ("eos", "eot", "eom")]
    by_text = [i for i, token in enumerate(file.get("tokenizer.ggml.tokens", [str], [])) if token in _END_TOKENS]
    return list(dict.fromkeys(i for i in (*named, *by_text) if i is not None))


def _check_unsupported(file: GGUFFile, architecture: str, config: dict[str, Any]) -> None:
    """Raise CheckpointError for metadata that changes the model and has no equivalent in config.json."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_size = config.get("head_dim") or (hidden // heads if type(heads) is type(hidden) is int and heads > 0 else None)
    for key, only in (("rope.dimension_count", head_size), ("attention.value_length", head_size), ("rope.scaling.attn_factor", 1.0)):
        if (value := file.metadata.get(f"{architecture}.{key}", only)) != only:
            raise CheckpointError(f"{file.path}: {key}={value!r} is not supported.", cure=f"Only {only} is.")


def _original_dtype(file: GGUFFile) -> str:
    """The dtype of the model before quantization: float32, float16, or bfloat16, whose range covers all 16-bit models."""
    kinds = {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if kinds == {gguf.GGMLQuantizationType.F32}:
        return "float32"
    return "float16" if kinds == {gguf.GGMLQuantizationType.F16} else "bfloat16"


def _rope_scaling(file: GGUFFile, architecture: str, rope_factors: Tensor | None) -> dict[str, Any] | None:
    """The rope_scaling of config.json. None without scaling."""
    if rope_factors is not None:
        # Llama 3.1's scaling, stored as one divisor per frequency.
        factors = rope_factors.tolist()
        positions = file.get(f"{architecture}.context_length", int)
        same = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
        return {"rope_type": "longrope", "original_max_position_embeddings": positions, **same}
    kind = file.get(f"{architecture}.rope.scaling.type", str, "none")
    if kind == "none":
        factor = file.get(f"{architecture}.rope.scale_linear", float, 1.0)  # the key of older files
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    scaling = {"rope_type": kind, "factor": file.get(f"{architecture}.rope.scaling.factor", float, 1.0)}
    if (original := file.get(f"{architecture}.rope.scaling.original_context_length", int)) is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling
