"""The time of a step: linear in what the step computes, with measured points and padding for what prompts add."""

from __future__ import annotations

import bisect
import itertools
from pathlib import Path

import msgspec

from stoker.base.config import check_range
from stoker.base.errors import ConfigError, reason_of
from stoker.runtime.schedule.group_scheduler import GroupPlan


class StepTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a step: fixed + decode rows × row + prefill tokens × prefill token + cached tokens that are read × context token.

    A step with prefill tokens takes `prefill_fixed_s` longer. The other fields describe what a GPU adds to this: captured steps with
    prompts are padded (`captured_tokens`), the time is not proportional to the prompt tokens (`captured_points`, `prefill_points`), and
    steps that are not captured occupy the host (`launch_s`).
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

    captured_tokens: tuple[int, ...] = ()
    """The sizes to which steps with prefill tokens are padded, ascending: rows that decode and prefill tokens together. A step with
    more tokens than the last size is not captured and not padded."""

    captured_rows: int | None = None
    """Steps with prefill tokens and more rows than this are not captured either. None: any number of rows."""

    captured_points: tuple[tuple[int, float], ...] = ()
    """(prefill tokens with padding, seconds by which a captured step with them is longer), ascending. The time is linear between the
    points, and from 0 to the first one. Each token beyond the last point takes `prefill_token_s`."""

    prefill_points: tuple[tuple[int, float], ...] = ()
    """The same for steps that are not captured, by their prefill tokens."""

    launch_s: float = 0.0
    """The host plans and launches a step with prefill tokens that is not captured. With overlap, the device computes the step before
    meanwhile, whose tokens are sent only after the launch; the step itself cannot end before."""

    source: str = ""
    """What was measured, on which device."""

    def __post_init__(self) -> None:
        for name in ("fixed_s", "row_s", "prefill_token_s", "context_token_s", "prefill_fixed_s", "launch_s"):
            _check_seconds(name, getattr(self, name))
        if self.fixed_s <= 0:
            raise ConfigError(f"fixed_s={self.fixed_s} is refused: a step takes time.", cure="Use the time of a step of one row.")
        for name in ("captured_tokens", "captured_points", "prefill_points"):
            entries = getattr(self, name)
            sizes = entries if name == "captured_tokens" else [tokens for tokens, _ in entries]
            if any(second <= first for first, second in itertools.pairwise([0, *sizes])):
                raise ConfigError(f"{name}={entries} is refused.", cure="Use positive numbers of tokens in ascending order.")
            if name != "captured_tokens":
                for tokens, seconds in entries:
                    _check_seconds(f"{name}: {tokens}", seconds)
                if entries and self.prefill_fixed_s:
                    message = f"prefill_fixed_s={self.prefill_fixed_s} is refused beside {name}."
                    raise ConfigError(message, cure="Add it to the times of the points.")
        if self.captured_points and not self.captured_tokens:
            raise ConfigError("captured_points have no effect without captured_tokens.", cure="Add the sizes, or leave the points out.")
        if self.captured_rows is not None:
            check_range("captured_rows", self.captured_rows, 1, 1 << 30)

    def series(self, plan: GroupPlan) -> tuple[float, float]:
        """(seconds of the first of the planned steps, seconds by which each further one takes longer: each row reads one more token)."""
        prefill_s = 0.0
        if num_tokens := plan.num_prefill_tokens:
            if self.captured_tokens and (size := self._captured_size(plan)) is not None:
                prefill_s = self._prefill_s(size - plan.num_decodes, self.captured_points)
            else:
                prefill_s = self._prefill_s(num_tokens, self.prefill_points)
        first_s = self.fixed_s + self.row_s * plan.num_decodes + prefill_s + self.context_token_s * plan.num_context_tokens
        if num_tokens:
            first_s += self.prefill_fixed_s
        return first_s, self.context_token_s * plan.num_decodes

    def launch_time_s(self, plan: GroupPlan) -> float:
        """Seconds in which the host launches a step with prefill tokens: 0 if it is captured."""
        return self.launch_s if self.launch_s and self._captured_size(plan) is None else 0.0

    def _captured_size(self, plan: GroupPlan) -> int | None:
        """The size to which a step with prefill tokens is padded; None if it is not captured."""
        at = bisect.bisect_left(self.captured_tokens, plan.num_prefill_tokens + plan.num_decodes)
        if at == len(self.captured_tokens) or (self.captured_rows is not None and len(plan) > self.captured_rows):
            return None
        return self.captured_tokens[at]

    def _prefill_s(self, num_tokens: int, points: tuple[tuple[int, float], ...]) -> float:
        """Seconds that prefill tokens, with those of the padding, add to a step."""
        last_tokens, last_s = points[-1] if points else (0, 0.0)
        if num_tokens >= last_tokens:
            return last_s + self.prefill_token_s * (num_tokens - last_tokens)
        at = bisect.bisect_right(points, num_tokens, key=lambda point: point[0])
        low_tokens, low_s = points[at - 1] if at else (0, 0.0)
        high_tokens, high_s = points[at]
        return low_s + (high_s - low_s) * (num_tokens - low_tokens) / (high_tokens - low_tokens)


def _check_seconds(name: str, seconds: float) -> None:
    """Raise ConfigError for a time that is none."""
    if not 0 <= seconds < 3600:
        raise ConfigError(f"{name}={seconds} is refused.", cure="Use seconds, from 0 to 3600.")


def read_step_times(file: Path) -> StepTimes:
    """The step times in a JSON file. Raises ConfigError that names the file and the member."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=StepTimes)
    except (OSError, msgspec.MsgspecError) as error:
        cure = "It is a JSON object with fixed_s, row_s, prefill_token_s and context_token_s in seconds; docs/scaling.md lists the others."
        raise ConfigError(f"step_times={file} cannot be read: {reason_of(error)}.", cure=cure) from None
