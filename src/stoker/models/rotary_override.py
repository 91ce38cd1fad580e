"""The rotary settings of a build (`rotary_base`, `rotary_scaling_type`, `rotary_scaling_factor`), which replace the checkpoint's."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from stoker.base.errors import ConfigError
from stoker.core.model_config import ModelConfig
from stoker.models.config_fields import replace_fields


def override_rotary(
    config: ModelConfig, *, base: float | None = None, scaling: str | None = None, factor: float | None = None
) -> ModelConfig:
    """A copy of `config` whose rotary layers use these settings. A scaling factor also extends the maximum sequence length.

    Raises ConfigError for a value out of range, for a model without rotary embeddings, and for a scaling of a model that already has one.
    """
    _check_settings(base, scaling, factor)
    ropes = config.ropes
    if not ropes:
        raise ConfigError(f"{config.architecture} has no rotary positions.", cure="Leave the rotary settings out.")
    existing = next((rope.scaling for rope in ropes if rope.scaling != "default"), None)
    if scaling is not None and existing is not None:
        raise ConfigError(
            f"rotary_scaling_type={scaling!r}: the checkpoint already scales its positions ({existing}).", cure="Leave it out."
        )
    fields: dict[str, Any] = {} if base is None else {"theta": float(base)}
    if scaling is not None:
        fields |= {"scaling": scaling, "factor": float(factor or 1.0), "original_max_positions": config.max_positions}

    def attention_fields(i: int) -> dict[str, Any]:
        """The replaced fields of the attention of layer number i."""
        attention = config.layers[i].attention
        rope = None if attention is None else attention.rope
        return {"rope": None if rope is None else msgspec.structs.replace(rope, **fields)}

    return replace_fields(config, attention=attention_fields, max_positions=int(config.max_positions * (factor or 1)))


def _check_settings(base: float | None, scaling: str | None, factor: float | None) -> None:
    """Raise ConfigError for a setting out of range or without its counterpart."""
    if base is not None and not (math.isfinite(base) and base > 1):
        raise ConfigError(f"rotary_base={base!r} is refused.", cure="Use a number above 1, such as 10000.")
    if scaling not in (None, "linear", "dynamic"):
        raise ConfigError(f"rotary_scaling_type={scaling!r} is not supported.", cure="Supported: linear, dynamic.")
    if (scaling is None) != (factor is None):
        raise ConfigError("rotary_scaling_type and rotary_scaling_factor belong together.", cure="Set both or neither.")
    if factor is not None and not (math.isfinite(factor) and factor > 1):
        raise ConfigError(f"rotary_scaling_factor={factor!r} is refused.", cure="Use a number above 1.")
