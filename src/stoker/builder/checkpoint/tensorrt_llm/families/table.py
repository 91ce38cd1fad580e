"""All families by the name that TensorRT-LLM writes."""

from __future__ import annotations

from stoker.builder.checkpoint.tensorrt_llm.families.derived_keys import Data
from stoker.builder.checkpoint.tensorrt_llm.families.family import Family
from stoker.builder.checkpoint.tensorrt_llm.families.gpt import GPT_FAMILIES
from stoker.builder.checkpoint.tensorrt_llm.families.llama import LLAMA_FAMILIES

FAMILIES: dict[str, Family] = {**LLAMA_FAMILIES, **GPT_FAMILIES}


def family_of(data: Data) -> Family | None:
    """The family of a checkpoint; None if its architecture is not supported."""
    found = FAMILIES.get(data["architecture"])
    return (found.variant(data) or found) if found is not None and found.variant is not None else found
