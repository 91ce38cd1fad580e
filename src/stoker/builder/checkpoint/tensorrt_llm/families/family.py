"""What is special about an architecture of TensorRT-LLM, and common parts of several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker.builder.checkpoint.tensorrt_llm.families.module_names import LLAMA, Modules
from stoker.builder.checkpoint.tensorrt_llm.tensors import Data

Values = Mapping[str, tuple[Any, ...]]  # key → its supported values; none: any, because it is read or has no effect


def _nothing(data: Data) -> dict[str, Any]:
    """No further keys."""
    return {}


# TensorRT-LLM writes "gelu" for each kind of GELU, and computes the approximation with tanh. The engine computes what the model does.
GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")
ROPE = ("rope_gpt_neox", None)
OUTER_MODULES = {"transformer.vocab_embedding": "model.embed_tokens", "transformer.ln_f": "model.norm", "lm_head": "lm_head"}


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture of TensorRT-LLM. `keys`, `values`, `fixed` and `derive` differ from or add to those of Llama."""

    architecture: str  # of Hugging Face
    modules: Modules  # of a layer
    layers: str = "model.layers.{}."  # prefix of the names of a layer
    outer: Mapping[str, str] = field(default_factory=lambda: OUTER_MODULES)
    keys: Mapping[str, str] = field(default_factory=dict)  # key → Hugging Face key; "" if it has none
    values: Values = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)  # Hugging Face keys
    derive: Callable[[Data], dict[str, Any]] = _nothing  # Hugging Face keys that are computed from others
    hidden_act: str = "silu"  # the Hugging Face key; "" for none, or one in `keys`
    norm_offset: float = 0.0  # by which stored weights of norms are larger than those of Hugging Face
    parameters: Modules = field(default_factory=dict)  # tensors of a layer that are no weight or bias of a module, with their full names
    position_rows: int = 0  # rows of zeros that precede the learned positions
    num_experts_key: str = ""  # the Hugging Face key of the number of experts; "" for a family without
    normalizations: tuple[int, ...] = (0, 1)  # of the weights of experts: supported numbers of moe.normalization_mode
    variant: tuple[Callable[[Data], bool], Family] | None = None  # (whether it applies, the family to use instead), for a shared name

    @property
    def modules_without_experts(self) -> Modules:
        """The modules of a layer that has an MLP instead of experts."""
        if not self.num_experts_key:
            return self.modules
        others = {name: module for name, module in self.modules.items() if not name.startswith("mlp.")}
        return others | {name: module for name, module in LLAMA.items() if name.startswith("mlp.")}


def outer_modules(embedding: str, norm: str, head: str = "lm_head", **others: str) -> dict[str, str]:
    """The Hugging Face names of the modules outside of layers. `others` are modules of `transformer`."""
    found = {"transformer.vocab_embedding": embedding, "transformer.ln_f": norm, "lm_head": head}
    return found | {f"transformer.{name}": other for name, other in others.items()}
