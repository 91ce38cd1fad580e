"""Converts the metadata of a GGUF file to the data of a config.json."""

from __future__ import annotations

from typing import Any

import gguf

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.gguf.architecture import GGUFArchitecture
from stoker.builder.checkpoint.gguf.file import GGUFFile
from stoker.builder.checkpoint.gguf.metadata import Metadata
from stoker.builder.checkpoint.gguf.registry import read_model_data
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN
from stoker.core.model_config import MAX_LAYERS

_REQUIRED_KEYS = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count")

# Texts of tokens that end a generation although no metadata key names them (special_eog_ids in llama.cpp's src/llama-vocab.cpp).
_END_TOKENS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>",
    "<|end_of_text|>", "<end_of_utterance>",
})  # fmt: skip


def read_config(file: GGUFFile, row: GGUFArchitecture, m: Metadata) -> dict[str, Any]:
    """The data of a config.json for the model in a GGUF file.

    Raises CheckpointError when metadata is missing, or describes something that config.json cannot express.
    """
    optional = ("feed_forward_length",) if m.value("expert_count") else ()  # a model may have experts only
    if missing := [f"{row.name}.{key}" for key in _REQUIRED_KEYS if key not in optional and m.value(key) is None]:
        raise CheckpointError(f"{file.path}: the metadata lacks {', '.join(missing)}.", cure=DOWNLOAD_AGAIN)
    layers = m.require("block_count", int)  # checked before a row makes a list with an element for each layer
    if not 1 <= layers <= MAX_LAYERS:
        raise m.unsupported("block_count", layers, f"The number of layers must be from 1 to {MAX_LAYERS}.")
    config = read_model_data(row, m)
    config["dtype"] = _original_dtype(file)
    if end_ids := _end_ids(file):
        config["eos_token_id"] = end_ids
    for key, config_key in (("bos", "bos_token_id"), ("padding", "pad_token_id")):
        if (token := file.get(f"tokenizer.ggml.{key}_token_id", int)) is not None:
            config[config_key] = token
    return config


def _end_ids(file: GGUFFile) -> list[int]:
    """The ids of all tokens that end a generation, eos first.

    They are the tokens that the metadata names, and tokens that llama.cpp recognizes by their text.
    """
    named = [file.get(f"tokenizer.ggml.{key}_token_id", int) for key in ("eos", "eot", "eom")]
    by_text = [i for i, token in enumerate(file.get("tokenizer.ggml.tokens", [str], [])) if token in _END_TOKENS]
    return list(dict.fromkeys(i for i in (*named, *by_text) if i is not None))


def _original_dtype(file: GGUFFile) -> str:
    """The dtype of the model before quantization: float32, float16, or bfloat16, whose range covers all 16-bit models."""
    kinds = {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if kinds == {gguf.GGMLQuantizationType.F32}:
        return "float32"
    return "float16" if kinds == {gguf.GGMLQuantizationType.F16} else "bfloat16"
