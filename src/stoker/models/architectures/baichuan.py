"""Baichuan 1 and 2: Llama with q, k and v in one matrix (`W_pack`).

The 13B models use ALiBi instead of rotary embeddings. The second generation normalizes the rows of its output head.
"""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import ModelConfig
from stoker.models.architecture import Architecture, TensorNames, Transformed
from stoker.models.architectures.llama import IGNORED, llama_config, llama_names
from stoker.models.config_fields import with_defaults
from stoker.models.tensor_transforms import normalize_rows, unchanged


def is_baichuan2(hf: dict[str, Any]) -> bool:
    """Whether the model is of the second generation. Both use the same architecture names and differ in these keys."""
    return "z_loss_weight" in hf or hf.get("vocab_size") == 125696


def has_alibi(hf: dict[str, Any]) -> bool:
    """Whether this is a 13B model, which uses ALiBi and has model_max_length in place of max_position_embeddings."""
    return "max_position_embeddings" not in hf


def model_versions(hf: dict[str, Any]) -> tuple[str, ...]:
    """The values of baichuan_model_version that agree with a config.json."""
    return (f"v{2 if is_baichuan2(hf) else 1}_{'13b' if has_alibi(hf) else '7b'}",)


@with_defaults(vocab_size=64000, model_max_length=4096)
def baichuan_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a Baichuan 1 or 2 checkpoint, from `hf`, the data of its config.json."""
    name = "BaichuanForCausalLM" if is_baichuan2(hf) else "BaiChuanForCausalLM"
    if not has_alibi(hf):
        return llama_config(hf, architecture=name)
    return llama_config(hf | {"max_position_embeddings": hf["model_max_length"]}, architecture=name, alibi=True, rope=None)


def baichuan_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of Baichuan 1 or 2 that make each engine module, by engine name; see `TensorNames`."""
    return llama_names(config) | {"layers.{i}.attention.qkv": "model.layers.{i}.self_attn.W_pack"}


def baichuan2_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of Baichuan 2 that make each engine module, by engine name; see `TensorNames`."""
    return baichuan_names(config) | {"head": Transformed(("lm_head",), normalize_rows, unchanged)}


_IGNORED = (*IGNORED, "model.future_mask", "*.alibi_mask")
_ORACLE = "7B: the same weights as Llama of transformers; 13B: a float64 forward pass"
ARCHITECTURES = (
    Architecture(
        name="BaiChuanForCausalLM",
        read_config=baichuan_config,
        tensor_names=baichuan_names,
        family="Baichuan 1 (7B, 13B)",
        oracle=_ORACLE,
        model_types=("baichuan",),
        variant=lambda hf: "BaichuanForCausalLM" if is_baichuan2(hf) else None,
        ignored_tensors=_IGNORED,
        version_options={"baichuan_model_version": model_versions},
    ),
    Architecture(
        name="BaichuanForCausalLM",
        read_config=baichuan_config,
        tensor_names=baichuan2_names,
        family="Baichuan 2 (7B, 13B)",
        oracle=_ORACLE,
        variant=lambda hf: None if is_baichuan2(hf) else "BaiChuanForCausalLM",
        ignored_tensors=_IGNORED,
        version_options={"baichuan_model_version": model_versions},
    ),
)
