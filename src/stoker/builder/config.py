"""What a person asks of a build. Torch-free, so that deployment formats can fill it in."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

from stoker.base.config import DEVICES, DTYPES, Limits, Mapping, check_choice, check_range
from stoker.base.errors import ConfigError

VERIFY = ("auto", "full", "files", "none")


class BuildConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Every field that changes the engine; with the checkpoint's fingerprint it is the engine's address in the cache."""

    dtype: str | None = None  # None: the checkpoint's own, and float32 for the CPU
    quantization: str | None = None  # the name of a recipe; None: NO_QUANT
    quantization_settings: dict[str, Any] = {}  # fields of its format: group_size, alpha, per_token; and calibration_size and the like
    kv_cache_dtype: str | None = None  # auto, int8 or float8_e4m3fn; None: as the recipe says
    calibration_data: str | None = None  # a file, folder or hub dataset; None: the text that Stoker ships
    calibration_size: int = 32  # windows that calibration reads
    calibration_seq_len: int = 512  # tokens of a window
    max_perplexity_increase: float | None = None  # a share above which the build refuses; None: the recipe's own
    limits: Limits = Limits()  # fields left at their default shrink to the model's positions; others are refused beyond them
    mapping: Mapping = Mapping()
    device: str | None = None  # cpu or cuda; None: cuda where there is one
    compute_capability: str | None = None  # "9.0"; None: this machine's device, or any when there is none here
    dummy_weights: bool = False  # write no weights; random ones are made at load
    trust_remote_code: bool = False  # let the checkpoint's own Python run, for its tokenizer and for verification
    tokenizer: str | None = None  # a directory to take the tokenizer from; None: the checkpoint
    shrinking: tuple[str, ...] = ()  # lengths of `limits` that shrink too, since nobody chose them
    versions: dict[str, str] = {}  # foreign options that name a model's version, such as gpt_model_version: checked against config.json
    rotary_base: float | None = None  # in place of the checkpoint's rope_theta
    rotary_dim: int | None = None  # checked: it must be the checkpoint's
    rotary_scaling_type: str | None = None  # linear or dynamic; with rotary_scaling_factor
    rotary_scaling_factor: float | None = None

    @property
    def changes_positions(self) -> bool:
        """Whether the engine's positions turn otherwise than the checkpoint's, so that their tokens cannot be compared."""
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
            raise ConfigError(f"max_perplexity_increase={self.max_perplexity_increase} is refused.", cure="Use a share such as 0.05.")
        check_range("calibration_size", self.calibration_size, 1, 1 << 20)
        check_range("calibration_seq_len", self.calibration_seq_len, 2, 1 << 20)

    @staticmethod
    def of_settings(settings: dict[str, Any]) -> dict[str, Any]:
        """The fields that foreign settings of a quantization fill: those of calibration by name, the rest as quantization_settings."""
        own = {name: value for name, value in settings.items() if name.startswith("calibration_")}
        return {**own, "quantization_settings": {name: value for name, value in settings.items() if name not in own}}


def fit_limits(asked: Limits, max_positions: int, shrinking: tuple[str, ...] = ()) -> Limits:
    """Limits that the model's positions allow.

    Lengths left at their default and those in `shrinking` shrink, and prompt and output together stay within the positions.
    Raises ConfigError for lengths that were chosen and don't fit.
    """
    if asked.max_seq_len <= max_positions:
        return asked
    default = Limits()
    names = ("max_input_len", "max_output_len", "max_total_len")
    chosen = {name: getattr(asked, name) for name in names if getattr(asked, name) != getattr(default, name) and name not in shrinking}
    lengths = [value for name, value in chosen.items() if name != "max_total_len"]
    if "max_total_len" in chosen or len(lengths) == 2 or any(value >= max_positions for value in lengths):
        what = ", ".join(f"{name}={value}" for name, value in chosen.items())
        raise ConfigError(
            f"{what}: sequences of {asked.max_seq_len} tokens, and the model has {max_positions} positions.", cure="Lower them."
        )
    most = max_positions - 1
    return msgspec.structs.replace(
        asked,
        max_input_len=min(asked.max_input_len, most),
        max_output_len=min(asked.max_output_len, most),
        max_total_len=max_positions,
    )
