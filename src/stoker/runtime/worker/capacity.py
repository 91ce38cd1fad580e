"""The limits of a run."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.base.config import Limits, RuntimeConfig, check_within_limits


@dataclass(frozen=True, slots=True)
class Capacity:
    """The limits of a run: those of the engine, lowered by the runtime settings."""

    max_batch_size: int
    max_num_sequences: int
    max_num_tokens: int
    max_seq_len: int

    @staticmethod
    def of(limits: Limits, max_positions: int, config: RuntimeConfig) -> Capacity:
        """The limits of a run with `config`. Raises ConfigError for a runtime setting above the limit of the engine."""
        check_within_limits(limits, config)
        batch = config.max_batch_size or limits.max_batch_size
        return Capacity(
            max_batch_size=batch,
            max_num_sequences=config.max_num_sequences or batch,
            max_num_tokens=config.max_num_tokens or limits.max_num_tokens,
            max_seq_len=min(limits.max_seq_len, max_positions),
        )
