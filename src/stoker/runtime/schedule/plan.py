"""The scheduler's answers: plain data, no torch."""

from __future__ import annotations

from stoker.runtime.request import Sequence


class StepPlan:
    """One step. Parallel lists over its rows; decode rows (one new token after a finished prompt) come first.

    starts[i] is the position of row i's first new token and num_new[i] how many are computed; samples[i] says whether the
    row's last token is the newest one, so that a token is sampled from it.
    """

    __slots__ = ("num_decodes", "num_new", "num_tokens", "samples", "sequences", "starts")

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.starts: list[int] = []
        self.num_new: list[int] = []
        self.samples: list[bool] = []
        self.num_decodes = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self.sequences)


class StepOutcome:
    """What a committed step changed. sequences[i] gained token_ids[i]; `finished` ended, with finish_reason and stop_id set.

    A sequence that the step ended is in both lists. Rows that sampled nothing, or whose sequence had ended before, are in neither.
    """

    __slots__ = ("finished", "sequences", "token_ids")

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.token_ids: list[int] = []
        self.finished: list[Sequence] = []
