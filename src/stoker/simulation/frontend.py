"""The processes between a client and the executor of a replica: the router and the HTTP server, as one queue."""

from __future__ import annotations

import msgspec

from stoker.base.errors import ConfigError
from stoker.simulation.running_steps import RunningSteps


class FrontendTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times that a request spends outside the executor, on the way through the router and the HTTP server. All are 0 by default."""

    frontend_request_ms: float = 0.0
    """From the client to the executor, if nothing else is to do."""

    frontend_first_token_ms: float = 0.0
    """From the end of the step to the client, in addition to the time of the tokens."""

    frontend_token_us: float = 0.0
    """Microseconds of each streamed token. The tokens of a step are sent one after the other; a request that arrives meanwhile waits."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not 0 <= (value := getattr(self, name)) <= 1e6:
                raise ConfigError(f"{name}={value} is refused.", cure="Use a time from 0 to 1000000.")


class Frontend:
    """The queue of one replica. It is assumed to have sent the tokens of a step before the next one ends."""

    def __init__(self, times: FrontendTimes) -> None:
        self._request_s, self._first_token_s = times.frontend_request_ms / 1e3, times.frontend_first_token_ms / 1e3
        self._token_s = times.frontend_token_us / 1e6
        self._free_s = 0.0  # when everything until now is done, except tokens of the running steps
        self._before_s = 0.0  # the same, except the newest tokens, which may be sent later than now

    def receive(self, now_s: float, steps: RunningSteps | None) -> float:
        """A request arrives while `steps` run. Returns when the executor receives it."""
        if steps is not None and now_s < steps.launched_s:  # the tokens of the step before are not sent yet
            self._before_s = max(self._before_s, now_s) + self._request_s
            self._free_s = max(self._free_s, self._before_s)
            return self._before_s
        if steps is not None and (num_ended := steps.num_ended(now_s)):
            self._free_s = max(self._free_s, steps.end_s(num_ended) + steps.plan.num_decodes * self._token_s)
        self._free_s = self._before_s = max(self._free_s, now_s) + self._request_s
        return self._free_s

    def send(self, now_s: float, num_tokens: int) -> tuple[float, float]:
        """The host has the tokens of a step at `now_s`. Returns when a first token of it is with the client, and when all others are."""
        self._before_s = self._free_s
        self._free_s = max(self._free_s, now_s) + num_tokens * self._token_s
        return self._free_s + self._first_token_s, self._free_s
