"""Tables of rotary position embeddings, with the scaling methods of checkpoints."""

from __future__ import annotations

import math
from typing import cast

import msgspec
import torch
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.core.forward_batch import ForwardBatch
from stoker.core.model_config import RopeConfig


def rope_table(config: RopeConfig, num_positions: int, device: torch.device | str) -> Tensor:
    """The rotary table, float32 [num_positions, dim]: each row holds dim / 2 cosines, then dim / 2 sines.

    Angles are computed in float64: at position 100,000 a float32 angle has an error of 0.004. Methods that depend on the length (dynamic,
    qwen, longrope) use `num_positions`, the engine's limit, instead of the length of each sequence: cached keys were rotated when they were
    stored, so only a fixed table makes results independent of when tokens were computed. Raises ConfigError for an unknown method.
    """
    if config.two_axes:
        config = msgspec.structs.replace(config, dim=config.dim // 2)
    frequencies, factor = _frequencies(config, num_positions)
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequencies[None, :]
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * factor).to(device, torch.float32)


def _frequencies(config: RopeConfig, num_positions: int) -> tuple[Tensor, float]:
    """(radians per position, float64 [dim / 2]; factor of cosines and sines), by the scaling method of the config."""
    try:
        method = METHODS[config.scaling]
    except KeyError:
        raise ConfigError(f"rope scaling {config.scaling!r} is unknown.", cure=f"Supported methods: {', '.join(METHODS)}.") from None
    return method(config, num_positions)


def _base_frequencies(theta: float, dim: int) -> Tensor:
    """Radians per position, float64 [dim / 2], without scaling."""
    return theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def _default(config: RopeConfig, num_positions: int) -> tuple[Tensor, float]:
    """The result of `_frequencies` without scaling."""
    return _base_frequencies(config.theta, config.dim), 1.0


def _linear(config: RopeConfig, num_positions: int) -> tuple[Tensor, float]:
    """The result of `_frequencies` with linear scaling: all frequencies are divided by the factor."""
    return _base_frequencies(config.theta, config.dim) / config.factor, 1.0


def _dynamic(config: RopeConfig, num_positions: int) -> tuple[Tensor, float]:
    """The result of `_frequencies` with NTK-aware scaling: a larger base for longer contexts."""
    ratio = config.factor * num_positions / config.original_max_positions - (config.factor - 1)
    if num_positions <= config.original_max_positions:
        ratio = 1.0
    return _base_frequencies(config.theta * ratio ** (config.dim / (config.dim - 2)), config.dim), 1.0


def _qwen(config: RopeConfig, num_positions: int) -> tuple[Tensor, float]:
    """The result of `_frequencies` with NTK-aware scaling in powers of two (get_ntk_alpha of Qwen 1)."""
    ratio = num_positions / config.original_max_positions
    alpha = 2 ** math.ceil(math.log2(ratio) + 1) - 1 if ratio > 1 else 1
    return _base_frequencies(config.theta * alpha ** (config.dim / (config.dim - 2)), config.dim), 1.0


def _llama3(config: RopeConfig, num_positions: int) -> tuple[Tensor, float]:
    """The result of `_frequencies` with the method of Llama 3.1.

    Low frequencies are divided by the factor, high ones stay, and the ones between them are blended linearly.
    """
    plain = _base_frequencies(config.theta, config.dim)
    turns = config.original_max_positions * plain / (2 * math.pi)  # turns over the original context
    blend = ((turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)).clamp(0, 1)
    return plain * (blend + (1 - blend) / config.factor), 1.0


def _yarn(config: RopeConfig, num_positions: int) -> tuple[Tensor, float]:
    """The result of `_frequencies` with YaRN (arXiv 2309.00071) and DeepSeek's two mscale settings."""
    dim, original = config.dim, config.original_max_positions

    def feature_of(turns: float) -> float:
        """The (fractional) index of the feature pair that makes this number of turns over the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = feature_of(config.beta_fast), feature_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    plain = _base_frequencies(config.theta, dim)
    return plain / config.factor * ramp + plain * (1 - ramp), _yarn_factor(config)


def _yarn_factor(config: RopeConfig) -> float:
    """The factor of cosines and sines in YaRN."""
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return yarn_mscale(config.factor, config.mscale) / yarn_mscale(config.factor, config.mscale_all_dim)
    return yarn_mscale(config.factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's factor for attention over longer contexts: 0.1 × mscale × ln(factor) + 1, or 1 for a factor of at most 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(config: RopeConfig, num_positions: int) -> tuple[Tensor, float]:
    """The result of `_frequencies` with LongRoPE (arXiv 2402.13753): a divisor for each frequency.

    The long divisors are used if the engine's length exceeds the original length.
    """
    original = config.original_max_positions
    divisors = config.long_factor if num_positions > original else config.short_factor
    if len(divisors) != config.dim // 2:
        raise ConfigError(f"longrope has {len(divisors)} factors for {config.dim // 2} frequencies.", cure="Correct rope_scaling.")
    factor = config.long_mscale if num_positions > original else config.short_mscale
    factor = config.attention_factor if factor is None else factor
    if factor is None:
        factor = math.sqrt(1 + math.log(config.factor) / math.log(original)) if config.factor > 1 else 1.0
    return _base_frequencies(config.theta, config.dim) / torch.tensor(divisors, dtype=torch.float64), factor


def step_table(cos_sin: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
    """(positions 0 … T - 1, table [T, dim]) for a model with two position axes: half of the angles by position, half by block position.

    Computed once per step. Features i and i + dim / 2 must be pairs over both halves of a head.
    """
    shared = batch.shared.get("rope")
    if shared is None:
        assert batch.block_positions is not None
        pairs = [cos_sin.index_select(0, axis).chunk(2, dim=-1) for axis in (batch.positions, batch.block_positions)]
        table = torch.cat((pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]), dim=-1)
        shared = batch.shared["rope"] = (torch.arange(len(table), dtype=torch.int32, device=table.device), table)
    return cast(tuple[Tensor, Tensor], shared)


METHODS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "qwen": _qwen,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
