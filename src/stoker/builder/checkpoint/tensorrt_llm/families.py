"""The architectures of TensorRT-LLM whose checkpoints can be read: the Hugging Face architecture and the names of the modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stoker.builder.checkpoint.tensorrt_llm.tensors import Module

Modules = Mapping[str, Module]


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture of TensorRT-LLM."""

    architecture: str  # of Hugging Face
    modules: Modules  # of a layer

    @property
    def has_experts(self) -> bool:
        """Whether layers have experts."""
        return any(module.of_experts for module in self.modules.values())


OUTER_MODULES = {"transformer.vocab_embedding": "model.embed_tokens", "transformer.ln_f": "model.norm", "lm_head": "lm_head"}

# `fc` is the gate projection and `gate` the up projection: TensorRT-LLM names the activated half of a gated MLP after that of a plain one.
_LLAMA: Modules = {
    "attention.qkv": Module(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "rows"),
    "attention.dense": Module(("self_attn.o_proj",), "columns"),
    "attention.q_layernorm": Module(("self_attn.q_norm",), "same"),
    "attention.k_layernorm": Module(("self_attn.k_norm",), "same"),
    "mlp.fc": Module(("mlp.gate_proj",), "rows"),
    "mlp.gate": Module(("mlp.up_proj",), "rows"),
    "mlp.proj": Module(("mlp.down_proj",), "columns"),
    "input_layernorm": Module(("input_layernorm",), "same"),
    "post_layernorm": Module(("post_attention_layernorm",), "same"),
}
# In a fused projection, the up projection precedes the gate projection.
_MIXTRAL: Modules = {
    **{name: module for name, module in _LLAMA.items() if name != "mlp.gate"},
    "mlp.router": Module(("block_sparse_moe.gate",), "same"),
    "mlp.fc": Module(("block_sparse_moe.experts.{}.w3", "block_sparse_moe.experts.{}.w1"), "rows", of_experts=True),
    "mlp.proj": Module(("block_sparse_moe.experts.{}.w2",), "columns", of_experts=True),
}
_QWEN_MOE: Modules = {
    **_MIXTRAL,
    "mlp.router": Module(("mlp.gate",), "same"),
    "mlp.fc": Module(("mlp.experts.{}.up_proj", "mlp.experts.{}.gate_proj"), "rows", of_experts=True),
    "mlp.proj": Module(("mlp.experts.{}.down_proj",), "columns", of_experts=True),
    "mlp.shared_expert.fc": Module(("mlp.shared_expert.up_proj", "mlp.shared_expert.gate_proj"), "rows"),
    "mlp.shared_expert.proj": Module(("mlp.shared_expert.down_proj",), "columns"),
    "mlp.shared_expert_gate": Module(("mlp.shared_expert_gate",), "same"),
}

FAMILIES = {
    "LlamaForCausalLM": Family("LlamaForCausalLM", _LLAMA),
    "LLaMAForCausalLM": Family("LlamaForCausalLM", _LLAMA),
    "MistralForCausalLM": Family("MistralForCausalLM", _LLAMA),
    "MixtralForCausalLM": Family("MixtralForCausalLM", _MIXTRAL),
    "Qwen2ForCausalLM": Family("Qwen2ForCausalLM", _LLAMA),
    "Qwen2MoeForCausalLM": Family("Qwen2MoeForCausalLM", _QWEN_MOE),
    "Qwen3ForCausalLM": Family("Qwen3ForCausalLM", _LLAMA),
    "Qwen3MoeForCausalLM": Family("Qwen3MoeForCausalLM", _QWEN_MOE),
}
