"""The clients with one named key: their limits, their priority, and the account of what a request uses."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec

from stoker.base import metrics
from stoker.base.types import GenerationRequest, Usage
from stoker.server.errors import RateLimitError
from stoker.server.metrics.frontend import FrontendMetrics
from stoker.server.tenants.counters import CounterTable
from stoker.server.tenants.key_file import KeyEntry
from stoker.server.tenants.limits import Headers, KeyLimits
from stoker.server.tenants.usage_log import UsageLog, UsageRecord

PRIORITY_STEP = 1 << 33  # between two priorities of keys; requests of one key have priorities within it
CHARS_PER_TOKEN = 4  # estimate for a prompt that is not tokenized yet


class Tenant:
    """The clients with one named key."""

    def __init__(self, entry: KeyEntry, table: CounterTable, counts: FrontendMetrics, usage_log: UsageLog | None) -> None:
        self.name = entry.name
        self._entry = entry
        self._limits = KeyLimits(entry, table)
        self._counts = counts
        self._usage_log = usage_log

    def count_request(self) -> None:
        """Count a request before it is read. Raises RateLimitError."""
        with self._count_refusal():
            self._limits.count_request()

    def headers(self) -> Headers:
        """The x-ratelimit headers of a response."""
        return self._limits.headers()

    def open_account(self, request: GenerationRequest, model: str) -> Account:
        """Reserve the tokens of a request. Raises RateLimitError, and UnavailableError if its usage could not be recorded."""
        if self._usage_log is not None:
            self._usage_log.check()
        prompt = request.prompt
        num_prompt = len(prompt) if isinstance(prompt, list) else len(prompt) // CHARS_PER_TOKEN + 1
        num_reserved = num_prompt + request.params.max_tokens * request.params.n
        with self._count_refusal():
            self._limits.reserve(num_reserved)
        own = min(max(request.priority, -PRIORITY_STEP // 2), PRIORITY_STEP // 2 - 1)
        request = msgspec.structs.replace(request, priority=self._entry.priority * PRIORITY_STEP + own)
        return Account(request, model, num_reserved, self)

    def record(self, account: Account, usage: Usage, outcome: str) -> asyncio.Future[None] | None:
        """Count what a request used. Returns the future of its line in the log, if there is one."""
        self._limits.settle(account.num_reserved, usage.prompt_tokens + usage.completion_tokens)
        self._counts.of(metrics.KEY_REQUESTS, self.name, outcome).inc()
        for kind, number in (("prompt", usage.prompt_tokens), ("cached", usage.cached_tokens), ("completion", usage.completion_tokens)):
            self._counts.of(metrics.KEY_TOKENS, self.name, kind).inc(number)
        if self._usage_log is None or not usage.prompt_tokens + usage.completion_tokens:
            return None
        return self._usage_log.append(
            UsageRecord(
                time=datetime.now(UTC).isoformat(timespec="milliseconds"),
                key=self.name,
                request_id=account.request.request_id,
                model=account.model,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
                outcome=outcome,
                duration_s=round(time.monotonic() - account.started, 6),
            )
        )

    @contextlib.contextmanager
    def _count_refusal(self) -> Iterator[None]:
        """Count a RateLimitError of the block by its limit."""
        try:
            yield
        except RateLimitError as error:
            self._counts.of(metrics.KEY_REFUSALS, self.name, error.limit_name).inc()
            raise


class Account:
    """What one request uses. Without a tenant, nothing is recorded. `request` has the priority of the key."""

    def __init__(self, request: GenerationRequest, model: str, num_reserved: int = 0, tenant: Tenant | None = None) -> None:
        self.request = request
        self.model = model
        self.num_reserved = num_reserved
        self.started = time.monotonic()
        self._tenant = tenant

    async def settle(self, usage: Usage, outcome: str) -> None:
        """Record a request that has ended. Returns when its line is on the disk. Raises UnavailableError if it cannot be written."""
        if (written := self._record(usage, outcome)) is not None:
            await written

    def close(self, usage: Usage | None, outcome: str) -> None:
        """Record a request that was cancelled or failed, unless it is recorded. `usage` is None if nothing was computed."""
        self._record(usage or Usage(), outcome)

    def _record(self, usage: Usage, outcome: str) -> asyncio.Future[None] | None:
        """Record the request once."""
        tenant, self._tenant = self._tenant, None
        return tenant.record(self, usage, outcome) if tenant is not None else None


_current: contextvars.ContextVar[Tenant | None] = contextvars.ContextVar("tenant", default=None)


def current_tenant() -> Tenant | None:
    """The tenant whose request this task handles. None: no named key."""
    return _current.get()


def act_as(tenant: Tenant | None) -> None:
    """This task, and tasks that it creates from now on, handle a request of `tenant`."""
    _current.set(tenant)


def open_account(request: GenerationRequest, model: str) -> Account:
    """The account of a request of the current tenant. Raises RateLimitError and UnavailableError."""
    tenant = current_tenant()
    return Account(request, model) if tenant is None else tenant.open_account(request, model)
