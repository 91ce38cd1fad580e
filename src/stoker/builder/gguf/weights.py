"""GGUF files: metadata becomes a config.json, tensor names their Hugging Face spelling, blocks plain numbers.

Source: the GGUF specification (github.com/ggml-org/ggml, docs/gguf.md) and llama.cpp's conversion, whose permutation of q and k rows
is undone here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.base.registry import nearest
from stoker.builder.checkpoint.weights import CHUNK_BYTES, FETCH, Stored, Weights
from stoker.builder.gguf.blocks import KEPT
from stoker.engine.tensor_file import as_bytes, read_into

# GGUF architecture → (the row of models/ that reads it, its model_type).
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}

# GGUF metadata key, after the architecture's name → config.json key.
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

_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip

_PLAIN = {
    gguf.GGMLQuantizationType.F32: torch.float32,
    gguf.GGMLQuantizationType.F16: torch.float16,
    gguf.GGMLQuantizationType.BF16: torch.bfloat16,
    gguf.GGMLQuantizationType.F64: torch.float64,
}


class GGUFWeights(Weights):
    """The tensors of a GGUF file in Hugging Face spelling; quantized blocks come out as float32."""

    def __init__(self, path: Path) -> None:
        self.files = [path]
        self.metadata, blocks = _read(path)
        self.architecture: str = self.get("general.architecture", str, "")
        if self.architecture not in ARCHITECTURES:
            near = nearest(self.architecture, list(ARCHITECTURES)) or list(ARCHITECTURES)
            raise CheckpointError(
                f"{path}: GGUF architecture {self.architecture!r} is not supported.", cure=f"Supported: {', '.join(near)}."
            )
        self._tensors = {_rename(name): block for name, block in blocks.items()}
        self.stored = {name: _stored(t) for name, t in self._tensors.items()}
        self._file = path.open("rb")
        self.config = self._make_config()
        self.stored.pop("rope_freqs.weight", None)
        matrices = {name: t.kind for name, t in self._tensors.items() if t.kind in KEPT and len(self.stored[name].shape) == 2}
        self.kept = {name: KEPT[kind].format for name, kind in matrices.items()}

    def get(self, key: str, kind: type | list[type], default: Any = None) -> Any:
        """A metadata value, or `default`. Raises CheckpointError unless it is of `kind`; [kind]: an array of such."""
        value = self.metadata.get(key)
        if value is None:
            return default
        one = kind[0] if isinstance(kind, list) else kind
        if isinstance(value, list) != isinstance(kind, list) or any(
            type(v) is not one for v in (value if isinstance(value, list) else [value])
        ):
            what = f"an array of {one.__name__}" if isinstance(kind, list) else one.__name__
            raise CheckpointError(f"{self.files[0]}: the metadata {key}={str(value)[:60]} is not {what}.", cure=FETCH)
        return value

    def chunks(self, name: str) -> Iterator[Tensor]:
        tensor, (rows, *rest) = self._tensors[name], self.stored[name].shape
        width = int(np.prod(rest, dtype=np.int64))
        row_bytes = tensor.num_bytes // rows
        block = self._head_rows(name) or 1
        step = max(1, CHUNK_BYTES // (width * 4) // block) * block
        for start in range(0, rows, step):
            count = min(step, rows - start)
            raw = np.empty((count, row_bytes), dtype=np.uint8)
            read_into(self._file.fileno(), as_bytes(torch.from_numpy(raw)), tensor.offset + start * row_bytes)
            values = self._values(raw, tensor.kind)
            yield _unpermute(values, block).reshape(-1) if block > 1 else values.reshape(-1)

    def take(self, name: str) -> dict[str, Tensor]:
        tensor, rows = self._tensors[name], self.stored[name].shape[0]
        raw = torch.empty((rows, tensor.num_bytes // rows), dtype=torch.uint8)
        read_into(self._file.fileno(), as_bytes(raw), tensor.offset)
        block = self._head_rows(name)  # rows are permuted whole, so packed ones as well
        return KEPT[tensor.kind].take(raw if block is None else _unpermute(raw, block))

    def _values(self, raw: np.ndarray, kind: gguf.GGMLQuantizationType) -> Tensor:
        """[rows, width] of packed rows."""
        if kind in _PLAIN:
            return torch.from_numpy(raw).view(_PLAIN[kind])
        return torch.from_numpy(gguf.quants.dequantize(raw, kind))

    def _head_rows(self, name: str) -> int | None:
        """Rows of one head where llama.cpp permuted them for interleaved rotary pairs; None elsewhere."""
        if self.architecture != "llama" or not re.search(r"\.self_attn\.[qk]_proj\.", name):
            return None
        heads = self.config["num_attention_heads"]
        if ".k_proj." in name:
            heads = self.config.get("num_key_value_heads") or heads
        return self.stored[name].shape[0] // heads

    def _make_config(self) -> dict[str, Any]:
        row, model_type = ARCHITECTURES[self.architecture]
        config: dict[str, Any] = {"architectures": [row], "model_type": model_type, "hidden_act": "silu"}
        for key, name in _CONFIG_KEYS.items():
            if (value := self.metadata.get(f"{self.architecture}.{key}")) is not None:
                config[name] = value
        config.setdefault("vocab_size", self.stored.get("model.embed_tokens.weight", Stored((0,), torch.float32)).shape[0])
        config["tie_word_embeddings"] = "lm_head.weight" not in self.stored
        config["attention_bias"] = model_type == "llama" and "model.layers.0.self_attn.q_proj.bias" in self.stored
        config["dtype"] = self._own_dtype()
        for key in ("bos", "eos", "padding"):
            if (token := self.get(f"tokenizer.ggml.{key}_token_id", int)) is not None:
                config[f"{'pad' if key == 'padding' else key}_token_id"] = token
        if (scaling := self._rope_scaling()) is not None:
            config["rope_scaling"] = scaling
        missing = [name for name in ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads") if name not in config]
        if missing:
            raise CheckpointError(f"{self.files[0]}: the metadata lacks {', '.join(missing)}.", cure=FETCH)
        self._refuse_others(config)
        return config

    def _refuse_others(self, config: dict[str, Any]) -> None:
        """Raise CheckpointError for metadata that would change the model and has no place in config.json."""
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        size = config.get("head_dim") or (hidden // heads if type(heads) is type(hidden) is int and heads > 0 else None)
        for key, only in (("rope.dimension_count", size), ("attention.value_length", size), ("rope.scaling.attn_factor", 1.0)):
            if (value := self.metadata.get(f"{self.architecture}.{key}", only)) != only:
                raise CheckpointError(f"{self.files[0]}: {key}={value!r} is not supported.", cure=f"Only {only} is.")

    def _own_dtype(self) -> str:
        """The dtype of the matrices; quantized ones came from a 16-bit model, whose range bfloat16 covers."""
        matrices = {t.kind for name, t in self._tensors.items() if len(self.stored[name].shape) > 1}
        if matrices == {gguf.GGMLQuantizationType.F32}:
            return "float32"
        return "float16" if matrices == {gguf.GGMLQuantizationType.F16} else "bfloat16"

    def _rope_scaling(self) -> dict[str, Any] | None:
        if "rope_freqs.weight" in self._tensors:
            # Llama 3.1's scaling, stored as one divisor a frequency.
            factors = self.read("rope_freqs.weight").tolist()
            positions = self.get(f"{self.architecture}.context_length", int)
            same = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
            return {"rope_type": "longrope", "original_max_position_embeddings": positions, **same}
        kind = self.get(f"{self.architecture}.rope.scaling.type", str, "none")
        if kind == "none":
            factor = self.get(f"{self.architecture}.rope.scale_linear", float, 1.0)  # as older files write it
            return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
        scaling = {"rope_type": kind, "factor": self.get(f"{self.architecture}.rope.scaling.factor", float, 1.0)}
        if (original := self.get(f"{self.architecture}.rope.scaling.original_context_length", int)) is not None:
            scaling["original_max_position_embeddings"] = original
        return scaling


class _Blocks(msgspec.Struct, frozen=True):
    """Where a tensor's packed rows are."""

    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def _read(path: Path) -> tuple[dict[str, Any], dict[str, _Blocks]]:
    """Metadata as plain values, and tensors by their GGUF names. The library's reader keeps four arrays for each token, so it is let go."""
    try:
        reader = gguf.GGUFReader(path)
        tensors = {
            t.name: _Blocks(t.tensor_type, tuple(int(n) for n in reversed(t.shape)), t.data_offset, t.n_bytes) for t in reader.tensors
        }
        return {name: _plain(field) for name, field in reader.fields.items()}, tensors
    except (ValueError, LookupError, ArithmeticError, TypeError, RecursionError) as problem:
        raise CheckpointError(f"{path} is not a whole GGUF file ({problem}).", cure=FETCH) from None


def _plain(field: gguf.ReaderField) -> Any:
    """A float32 reads as the shortest decimal that rounds to it: 1e-05, not 9.999999747378752e-06."""
    value = field.contents()
    return float(str(np.float32(value))) if field.types == [gguf.GGUFValueType.FLOAT32] else value


def _rename(name: str) -> str:
    """blk.3.attn_q.weight → model.layers.3.self_attn.q_proj.weight; unknown names stay, and are refused as unused later."""
    module, _, suffix = name.rpartition(".")
    if found := re.fullmatch(r"blk\.(\d+)\.(\w+)", module):
        layer, part = found.groups()
        return f"model.layers.{layer}.{_NAMES[part]}.{suffix}" if part in _NAMES else name
    return f"{_NAMES[module]}.{suffix}" if module in _NAMES else name


def _stored(tensor: _Blocks) -> Stored:
    return Stored(tensor.shape, _PLAIN.get(tensor.kind, torch.float32))


def _unpermute(rows: Tensor, head_rows: int) -> Tensor:
    """Rows (2i, 2i + 1) of each head go back to (i, i + half)."""
    return rows.view(-1, head_rows // 2, 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)
