"""What a person asks of a build. Torch-free, so that deployment formats can fill it in."""

from __future__ import annotations

import msgspec

from stoker.base.config import DTYPES, Limits, Mapping, check_choice
from stoker.base.errors import ConfigError

DEVICES = ("cpu", "cuda")
VERIFY = ("auto", "full", "files", "none")


class BuildConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Every field that changes the engine; with the checkpoint's fingerprint it is the engine's address in the cache."""

    dtype: str | None = None  # None: the checkpoint's own, and float32 for the CPU
    quantization: str | None = None  # the name of a recipe; None: NO_QUANT
    limits: Limits = Limits()  # fields left at their default shrink to the model's positions; others are refused beyond them
    mapping: Mapping = Mapping()
    device: str | None = None  # cpu or cuda; None: cuda where there is one
    compute_capability: str | None = None  # "9.0"; None: this machine's device, or any when there is none here
    dummy_weights: bool = False  # write no weights; random ones are made at load
    trust_remote_code: bool = False  # let the checkpoint's own Python run, for its tokenizer and for verification
    tokenizer: str | None = None  # a directory to take the tokenizer from; None: the checkpoint

    def __post_init__(self) -> None:
        if self.dtype is not None:
            check_choice("dtype", self.dtype, DTYPES)
        if self.device is not None:
            check_choice("device", self.device, DEVICES)


def fit_limits(asked: Limits, max_positions: int) -> Limits:
    """Limits that the model's positions allow.

    Lengths left at their default shrink, and prompt and output together stay within the positions. Raises ConfigError for lengths that
    were chosen and don't fit.
    """
    if asked.max_seq_len <= max_positions:
        return asked
    default = Limits()
    names = ("max_input_len", "max_output_len", "max_total_len")
    chosen = {name: getattr(asked, name) for name in names if getattr(asked, name) != getattr(default, name)}
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
