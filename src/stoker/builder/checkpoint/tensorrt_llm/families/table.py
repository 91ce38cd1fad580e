"""All families by the name that TensorRT-LLM writes."""

from __future__ import annotations

from stoker.builder.checkpoint.tensorrt_llm.families.family import Family
from stoker.builder.checkpoint.tensorrt_llm.families.gpt import GPT_FAMILIES
from stoker.builder.checkpoint.tensorrt_llm.families.llama import LLAMA_FAMILIES
from stoker.builder.checkpoint.tensorrt_llm.families.state import STATE_FAMILIES
from stoker.builder.checkpoint.tensorrt_llm.tensors import Data

FAMILIES: dict[str, Family] = {**LLAMA_FAMILIES, **GPT_FAMILIES, **STATE_FAMILIES}
# The Hugging Face architectures that checkpoints are read as.
ARCHITECTURES = {family.architecture for family in FAMILIES.values()} | {
    family.variant[1].architecture for family in FAMILIES.values() if family.variant is not None
}
# Names of TensorRT-LLM that are not supported, and why.
UNSUPPORTED = {
    "ArcticForCausalLM": "Stoker has no architecture with an MLP beside the experts of Arctic",
    "DbrxForCausalLM": "Stoker has no architecture of DBRX",
    "DeciLMForCausalLM": "Stoker has no architecture with layers of different sizes",
    "Grok1ModelForCausalLM": "Stoker has no architecture of Grok",
    "GrokForCausalLM": "Stoker has no architecture of Grok",
    "Phi3SmallForCausalLM": "Stoker has no block-sparse attention",
    "RecurrentGemmaForCausalLM": "Stoker has no linear recurrent unit",
}


def family_of(data: Data) -> Family | None:
    """The family of a checkpoint; None if its architecture is not supported."""
    found = FAMILIES.get(data["architecture"])
    if found is not None and found.variant is not None and found.variant[0](data):
        return found.variant[1]
    return found
