"""Nemotron 3/4 and Minitron: layer norms with weight 1 + w, rotary on half of each head, and MLPs that square a ReLU."""

from __future__ import annotations

from typing import Any

from stoker.core.model_config import ModelConfig, NormConfig
from stoker.models.architecture import Architecture, TensorNames, Transformed
from stoker.models.architectures.arcee import names_without_gates, without_gates
from stoker.models.architectures.llama import IGNORED, llama_config
from stoker.models.config_fields import read_head_size, read_rope, replace_fields, require_values, value_or, with_defaults
from stoker.models.tensor_transforms import add_one, subtract_one


@with_defaults(
    vocab_size=256000, hidden_size=6144, intermediate_size=24576, num_attention_heads=48, hidden_act="relu2",
    max_position_embeddings=4096, norm_eps=1e-5,
)  # fmt: skip
def nemotron_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a Nemotron or Minitron checkpoint, from `hf`, the data of its config.json."""
    norm = NormConfig(kind="layer", eps=hf["norm_eps"], bias=True, wide=True)
    require_values(hf, rope_percent=value_or(hf, "partial_rotary_factor", 0.5))  # another name of the same fraction
    require_values(hf, kv_channels=read_head_size(hf))  # a copy of the head size in files that NeMo wrote
    rope = read_rope(hf, dim=read_head_size(hf), partial=0.5)
    config = without_gates(llama_config(hf, architecture="NemotronForCausalLM", rope=rope))
    return replace_fields(config, layer={"norm": norm}, norm=norm)


def nemotron_names(config: ModelConfig) -> TensorNames:
    """The checkpoint modules of Nemotron that make each engine module, by engine name; see `TensorNames`."""
    names: TensorNames = {}
    for key, source in names_without_gates(config).items():
        if key.endswith("norm") and isinstance(source, str):  # 1 is added to the weight, but not to the bias
            names[f"{key}.weight"] = Transformed((f"{source}.weight",), add_one, subtract_one)
            names[f"{key}.bias"] = f"{source}.bias"
        else:
            names[key] = source
    return names


ARCHITECTURES = (
    Architecture(
        name="NemotronForCausalLM",
        read_config=nemotron_config,
        tensor_names=nemotron_names,
        family="Nemotron 3 and 4 (dense), Minitron",
        oracle="transformers",
        model_types=("nemotron",),
        ignored_tensors=IGNORED,
    ),
)
