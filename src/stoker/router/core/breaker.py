"""The circuit breaker of a replica: after repeated failures it gets no requests for a while, and then one on trial."""

from __future__ import annotations

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0


class Breaker:
    """Opens after `max_failures` failures in a row. Each pause without requests is twice as long as the one before.

    After a pause one request is sent on trial: its success closes the breaker, its failure starts the next pause. Times are monotonic
    seconds.
    """

    def __init__(self, max_failures: int) -> None:
        self._max_failures = max_failures
        self._num_failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._open_until_s: float | None = None  # None: closed
        self._on_trial = False

    @property
    def is_closed(self) -> bool:
        """Whether requests may be sent without a limit."""
        return self._open_until_s is None

    @property
    def state(self) -> str:
        """closed, open, or trial: the pause is over, and the result of one request decides."""
        if self._open_until_s is None:
            return "closed"
        return "trial" if self._on_trial else "open"

    def allows(self, now_s: float) -> bool:
        """Whether a request may be sent now."""
        return self._open_until_s is None or (now_s >= self._open_until_s and not self._on_trial)

    def on_send(self) -> None:
        """A request is sent, which `allows` permitted."""
        if self._open_until_s is not None:
            self._on_trial = True

    def on_success(self) -> None:
        """A request succeeded: close."""
        self._num_failures, self._pause_s, self._open_until_s, self._on_trial = 0, FIRST_PAUSE_S, None, False

    def on_failure(self, now_s: float) -> None:
        """A request failed because of the replica."""
        self._num_failures += 1
        if self._on_trial:
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
            self._open_until_s, self._on_trial = now_s + self._pause_s, False
        elif self._open_until_s is None and self._num_failures >= self._max_failures:
            self._open_until_s = now_s + self._pause_s

    def on_cancel(self) -> None:
        """A request ended without showing whether the replica works, for example because its client left."""
        self._on_trial = False
