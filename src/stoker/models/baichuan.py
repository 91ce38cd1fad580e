"""Baichuan 1 and 2: Llama with W_pack for q, k and v; the 13B ones have ALiBi, and the second generation a head of unit rows."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import ModelConfig
from stoker.models.architecture import Architecture, Custom, Names, register
from stoker.models.llama import IGNORED, llama_config, llama_names
from stoker.models.read import defaults
from stoker.models.reshape import unit_rows


def is_second(hf: dict[str, Any]) -> bool:
    return "z_loss_weight" in hf or hf.get("vocab_size") == 125696


def has_alibi(hf: dict[str, Any]) -> bool:
    """The 7B ones declare max_position_embeddings; the 13B ones have model_max_length only."""
    return "max_position_embeddings" not in hf


def version(hf: dict[str, Any]) -> tuple[str, ...]:
    return (f"v{2 if is_second(hf) else 1}_{'13b' if has_alibi(hf) else '7b'}",)


@defaults(vocab_size=64000, model_max_length=4096)
def baichuan_config(hf: dict[str, Any]) -> ModelConfig:
    name = "BaichuanForCausalLM" if is_second(hf) else "BaiChuanForCausalLM"
    if not has_alibi(hf):
        return llama_config(hf, architecture=name)
    return llama_config(hf | {"max_position_embeddings": hf["model_max_length"]}, architecture=name, alibi=True, rope=None)


def baichuan_names(config: ModelConfig) -> Names:
    return llama_names(config) | {"layers.{i}.attention.qkv": "model.layers.{i}.self_attn.W_pack"}


def baichuan2_names(config: ModelConfig) -> Names:
    return baichuan_names(config) | {"head": Custom(("lm_head",), unit_rows)}


_IGNORED = (*IGNORED, "model.future_mask", "*.alibi_mask")
_ORACLE = "7B: the weights re-laid as Llama of transformers; 13B: a float64 forward"
register(
    Architecture(
        "BaiChuanForCausalLM",
        baichuan_config,
        baichuan_names,
        "Baichuan 1 (7B, 13B)",
        _ORACLE,
        ("baichuan",),
        variant=lambda hf: "BaichuanForCausalLM" if is_second(hf) else None,
        ignored=_IGNORED,
        versions={"baichuan_model_version": version},
    ),
    Architecture(
        "BaichuanForCausalLM",
        baichuan_config,
        baichuan2_names,
        "Baichuan 2 (7B, 13B)",
        _ORACLE,
        variant=lambda hf: None if is_second(hf) else "BaiChuanForCausalLM",
        ignored=_IGNORED,
        versions={"baichuan_model_version": version},
    ),
)
