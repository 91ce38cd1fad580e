"""The limits of one named key: requests and tokens per minute, and tokens per day and month of UTC.

Per minute, what was used decreases continuously: with a limit of 60, one request is free again each second. A request reserves as
many tokens as its prompt has and as it may generate, so that concurrent requests cannot exceed a limit together. What it did not use is
returned.
"""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from stoker.server.errors import RateLimitError
from stoker.server.tenants.counters import Counters, CounterTable
from stoker.server.tenants.key_file import KeyEntry

Headers = list[tuple[bytes, bytes]]
MINUTE_S = 60.0


class Moment(NamedTuple):
    """The present: seconds of the monotonic clock, and the time in UTC."""

    monotonic_s: float
    utc: datetime

    @classmethod
    def now(cls) -> Moment:
        """This moment."""
        return cls(time.monotonic(), datetime.now(UTC))

    @property
    def day(self) -> int:
        """Days since 1970."""
        return int(self.utc.timestamp() // 86400)

    @property
    def month(self) -> int:
        """Months since the year 0."""
        return self.utc.year * 12 + self.utc.month - 1

    @property
    def next_day_s(self) -> float:
        """Seconds until the next day."""
        return 86400 - self.utc.timestamp() % 86400

    @property
    def next_month_s(self) -> float:
        """Seconds until the next month."""
        first = self.utc.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        return ((first + timedelta(days=32)).replace(day=1) - self.utc).total_seconds()


class KeyLimits:
    """The counters of one key in `table`, and the limits of its entry."""

    def __init__(self, entry: KeyEntry, table: CounterTable) -> None:
        self.entry = entry
        self._table = table

    def count_request(self) -> None:
        """Count one request. Raises RateLimitError if too many were sent within a minute."""
        if (limit := self.entry.requests_per_minute) is None:
            return
        with self._table.change(self.entry.slot) as counters:
            _advance(counters, self.entry, Moment.now())
            if counters.requests + 1 > limit:
                raise self._refused("requests_per_minute", (counters.requests + 1 - limit) * MINUTE_S / limit)
            counters.requests += 1

    def reserve(self, num_tokens: int) -> None:
        """Reserve tokens for a request. Raises RateLimitError if a limit leaves too few.

        A request that needs more than a whole limit per minute waits until nothing of it is used; a quota may be exceeded by one request.
        """
        entry, now = self.entry, Moment.now()
        with self._table.change(entry.slot) as counters:
            _advance(counters, entry, now)
            for name, used, left_s in (
                ("tokens_per_day", counters.day_tokens, now.next_day_s),
                ("tokens_per_month", counters.month_tokens, now.next_month_s),
            ):
                limit = getattr(entry, name)
                if limit is not None and used >= limit:
                    raise self._refused(name, left_s)
            if (limit := entry.tokens_per_minute) is not None:
                excess = counters.tokens + min(num_tokens, limit) - limit
                if excess > 0:
                    raise self._refused("tokens_per_minute", excess * MINUTE_S / limit)
            _add_tokens(counters, num_tokens)

    def settle(self, num_reserved: int, num_used: int) -> None:
        """Replace a reservation by the tokens that the request used."""
        with self._table.change(self.entry.slot) as counters:
            _advance(counters, self.entry, Moment.now())
            _add_tokens(counters, num_used - num_reserved)

    def restore_quotas(self, day_tokens: int, month_tokens: int) -> None:
        """Set the tokens of the present day and month, after a restart."""
        now = Moment.now()
        with self._table.change(self.entry.slot) as counters:
            counters.day_tokens, counters.day = day_tokens, now.day
            counters.month_tokens, counters.month = month_tokens, now.month

    def headers(self) -> Headers:
        """The headers that OpenAI sends: limits per minute, what is left, and the time until nothing is used."""
        counters = self._table.read(self.entry.slot)
        _advance(counters, self.entry, Moment.now())
        found: Headers = []
        for kind, limit, used in (
            (b"requests", self.entry.requests_per_minute, counters.requests),
            (b"tokens", self.entry.tokens_per_minute, counters.tokens),
        ):
            if limit is not None:
                found += [
                    (b"x-ratelimit-limit-" + kind, b"%d" % limit),
                    (b"x-ratelimit-remaining-" + kind, b"%d" % max(0, math.floor(limit - used))),
                    (b"x-ratelimit-reset-" + kind, _duration(used * MINUTE_S / limit)),
                ]
        return found

    def _refused(self, name: str, retry_after_s: float) -> RateLimitError:
        """The error of the limit `name`."""
        return RateLimitError(self.entry.name, name, getattr(self.entry, name), retry_after_s)


def _advance(counters: Counters, entry: KeyEntry, now: Moment) -> None:
    """Decrease what was used per minute by the time that has passed, and begin a new day or month. The clock may be set back."""
    elapsed_s = max(0.0, now.monotonic_s - counters.requests_at)
    counters.requests = max(0.0, counters.requests - elapsed_s * (entry.requests_per_minute or 0) / MINUTE_S)
    counters.requests_at = now.monotonic_s
    elapsed_s = max(0.0, now.monotonic_s - counters.tokens_at)
    counters.tokens = max(0.0, counters.tokens - elapsed_s * (entry.tokens_per_minute or 0) / MINUTE_S)
    counters.tokens_at = now.monotonic_s
    if now.day > counters.day:
        counters.day_tokens, counters.day = 0.0, now.day
    if now.month > counters.month:
        counters.month_tokens, counters.month = 0.0, now.month


def _add_tokens(counters: Counters, number: int) -> None:
    """Add tokens to all counters. A negative number returns a part of a reservation, which may be of an earlier day."""
    counters.tokens = max(0.0, counters.tokens + number)
    counters.day_tokens = max(0.0, counters.day_tokens + number)
    counters.month_tokens = max(0.0, counters.month_tokens + number)


def _duration(seconds: float) -> bytes:
    """A duration as OpenAI writes it: 17ms, 1.2s, 6m0s."""
    if seconds < 1:
        return b"%dms" % math.ceil(seconds * 1000)
    minutes, rest = divmod(seconds, 60)
    return b"%dm%ds" % (minutes, rest) if minutes else f"{rest:.3f}".rstrip("0").rstrip(".").encode() + b"s"
