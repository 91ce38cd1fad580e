"""The time of a step, as a linear function of what the step computes."""

from __future__ import annotations

from pathlib import Path

import msgspec

from stoker.base.errors import ConfigError, reason_of
from stoker.runtime.schedule.group_scheduler import GroupPlan


class StepTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a step: fixed + decode rows × row + prefill tokens × prefill token + cached tokens that are read × context token.

    A step with prefill tokens takes `prefill_fixed_s` longer.
    """

    fixed_s: float
    """A step of any size: reading the weights, and launching."""

    row_s: float
    """Each row that decodes."""

    prefill_token_s: float
    """Each prompt token that is computed."""

    context_token_s: float
    """Each token of the KV cache that a row reads."""

    prefill_fixed_s: float = 0.0
    """A step with prompt tokens, in addition to those: launches that are not captured, or attention that computes decodes as prompts."""

    source: str = ""
    """What was measured, on which device."""

    def __post_init__(self) -> None:
        for name in ("fixed_s", "row_s", "prefill_token_s", "context_token_s", "prefill_fixed_s"):
            if not 0 <= getattr(self, name) < 3600:
                raise ConfigError(f"{name}={getattr(self, name)} is refused.", cure="Use seconds, from 0 to 3600.")
        if self.fixed_s <= 0:
            raise ConfigError(f"fixed_s={self.fixed_s} is refused: a step takes time.", cure="Use the time of a step of one row.")

    def series(self, plan: GroupPlan) -> tuple[float, float]:
        """(seconds of the first of the planned steps, seconds by which each further one takes longer: each row reads one more token)."""
        first_s = (
            self.fixed_s
            + self.row_s * plan.num_decodes
            + self.prefill_token_s * plan.num_prefill_tokens
            + self.context_token_s * plan.num_context_tokens
        )  # fmt: skip
        if plan.num_prefill_tokens:
            first_s += self.prefill_fixed_s
        return first_s, self.context_token_s * plan.num_decodes


def read_step_times(file: Path) -> StepTimes:
    """The step times in a JSON file. Raises ConfigError that names the file and the member."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=StepTimes)
    except (OSError, msgspec.MsgspecError) as error:
        cure = "It is a JSON object with fixed_s, row_s, prefill_token_s and context_token_s in seconds, and perhaps prefill_fixed_s."
        raise ConfigError(f"step_times={file} cannot be read: {reason_of(error)}.", cure=cure) from None
