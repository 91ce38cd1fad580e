"""The settings of a build. This module is free of torch, so that deployment formats can create them."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

from stoker.base.config import DEVICES, DTYPES, Limits, Mapping, check_choice, check_range
from stoker.base.errors import ConfigError

VERIFY = ("auto", "full", "files", "none")


class BuildConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a build. Together with the checkpoint's fingerprint they determine the engine's address in the cache."""

    dtype: str | None = None
    """Dtype of activations and of weights that are not quantized. None: the checkpoint's on a GPU, float32 on a CPU."""

    quantization: str | None = None
    """Name of a recipe, such as AWQ. None: NO_QUANT, or AS_STORED for a pre-quantized checkpoint."""

    quantization_settings: dict[str, Any] = {}
    """Fields of the recipe's format, such as group_size, alpha and per_token."""

    kv_cache_dtype: str | None = None
    """`auto` (the engine's dtype), `int8` or `float8_e4m3fn`. None: as the recipe says."""

    calibration_data: str | None = None
    """Text for calibration: a file, a folder or a hub dataset. None: the text that Stoker ships."""

    calibration_size: int | None = None
    """Number of windows of text that calibration reads. None: 8 for FP8 without a quantized KV cache, otherwise 32."""

    calibration_seq_len: int = 512
    """Tokens of one window."""

    max_perplexity_increase: float | None = None
    """Fraction by which quantization may increase perplexity before the build fails; 0.05 is 5 %. None: the recipe's own limit."""

    limits: Limits = Limits()
    """Largest batch and sequence lengths. Lengths that are left at their default are reduced to the model's positions; others that exceed
    them are refused."""

    mapping: Mapping = Mapping()
    """Number of tensor-parallel and pipeline-parallel ranks."""

    device: str | None = None
    """`cpu` or `cuda`. None: cuda if this machine has a GPU."""

    compute_capability: str | None = None
    """Compute capability of the target GPU, such as `9.0`. None: that of this machine's GPU, or any if it has none."""

    dummy_weights: bool = False
    """Write no weights. Random ones are created at load."""

    trust_remote_code: bool = False
    """Allow Python code of the checkpoint to run, for its tokenizer and for verification."""

    tokenizer: str | None = None
    """Directory of the tokenizer. None: the checkpoint."""

    shrinking: tuple[str, ...] = ()
    """Names of further lengths in `limits` that may be reduced, because they are defaults of another system."""

    versions: dict[str, str] = {}
    """Options of other systems that name a model version, such as gpt_model_version. They are checked against config.json."""

    ignored_config_keys: tuple[str, ...] = ()
    """Keys of config.json that Stoker does not know and that have no effect on the model. Other unknown keys stop the build."""

    rotary_base: float | None = None
    """Replaces rope_theta of the checkpoint."""

    rotary_dim: int | None = None
    """Checked: it must be the number of rotary dimensions of the checkpoint."""

    rotary_scaling_type: str | None = None
    """`linear` or `dynamic`, together with rotary_scaling_factor."""

    rotary_scaling_factor: float | None = None
    """Factor by which positions are scaled, above 1."""

    @property
    def changes_positions(self) -> bool:
        """Whether the engine's rotary positions differ from the checkpoint's, so that their tokens cannot be compared."""
        return any(value is not None for value in (self.rotary_base, self.rotary_scaling_type, self.rotary_scaling_factor))

    def __post_init__(self) -> None:
        if self.dtype is not None:
            check_choice("dtype", self.dtype, DTYPES)
        if self.device is not None:
            check_choice("device", self.device, DEVICES)
        if self.compute_capability is not None and not re.fullmatch(r"[1-9]\d?\.\d", self.compute_capability):
            raise ConfigError(f"compute_capability={self.compute_capability!r} is refused.", cure="Use a number such as 9.0.")
        if self.device == "cpu" and self.compute_capability is not None:
            raise ConfigError(
                f"compute_capability={self.compute_capability!r} is refused: device=cpu has none.", cure="Leave one of them out."
            )
        if self.max_perplexity_increase is not None and not -1 <= self.max_perplexity_increase < math.inf:
            raise ConfigError(f"max_perplexity_increase={self.max_perplexity_increase} is refused.", cure="Use a fraction such as 0.05.")
        if self.calibration_size is not None:
            check_range("calibration_size", self.calibration_size, 1, 1 << 20)
        check_range("calibration_seq_len", self.calibration_seq_len, 2, 1 << 20)

    @staticmethod
    def fields_from_settings(settings: dict[str, Any]) -> dict[str, Any]:
        """BuildConfig fields from another system's quantization settings: `calibration_*` by name, others in quantization_settings."""
        calibration = {name: value for name, value in settings.items() if name.startswith("calibration_")}
        return {**calibration, "quantization_settings": {name: value for name, value in settings.items() if name not in calibration}}


def fit_limits(limits: Limits, max_positions: int, shrinking: tuple[str, ...] = ()) -> Limits:
    """`limits`, with lengths reduced so that prompt and output together fit the model's `max_positions`.

    Only lengths at their default, and those named in `shrinking`, are reduced. Raises ConfigError when the others do not fit.
    """
    if limits.max_seq_len <= max_positions:
        return limits
    default = Limits()
    names = ("max_input_len", "max_output_len", "max_total_len")
    chosen = {name: getattr(limits, name) for name in names if getattr(limits, name) != getattr(default, name) and name not in shrinking}
    lengths = [value for name, value in chosen.items() if name != "max_total_len"]
    if "max_total_len" in chosen or len(lengths) == 2 or any(value >= max_positions for value in lengths):
        settings = ", ".join(f"{name}={value}" for name, value in chosen.items())
        raise ConfigError(
            f"{settings}: sequences have up to {limits.max_seq_len} tokens, and the model has {max_positions} positions.",
            cure="Lower them.",
        )
    longest = max_positions - 1
    return msgspec.structs.replace(
        limits,
        max_input_len=min(limits.max_input_len, longest),
        max_output_len=min(limits.max_output_len, longest),
        max_total_len=max_positions,
    )
