"""Authentication by API key: the keys of the settings and of the file, which the supervisor reads again on SIGHUP."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stoker.server.coordination import Values
from stoker.server.errors import AuthenticationError
from stoker.server.tenants.counters import MAX_SLOTS, CounterTable
from stoker.server.tenants.key_file import KeyEntry, digest_of, read_key_file
from stoker.server.tenants.limits import KeyLimits, Moment
from stoker.server.tenants.tenants import Tenant
from stoker.server.tenants.usage_log import UsageLog, read_tokens

if TYPE_CHECKING:
    from stoker.server.protocol import Context

API_KEYS = "api keys"  # in the coordination: SharedKeys
_SCHEMES = (b"bearer", b"api-key")  # OpenAI's and most clients; Baseten's
_CURE = "Send the header Authorization: Bearer KEY, or x-api-key: KEY."


class SharedKeys(msgspec.Struct, frozen=True):
    """The entries of the file, with their slots in the file of the counters."""

    entries: tuple[KeyEntry, ...]
    counters: str  # path


class AcceptedKeys:
    """The keys that a frontend accepts. If there are none, it accepts all clients."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._settings = settings = context.settings
        self._fixed = frozenset(digest_of(key) for key in settings.api_keys)
        shared: SharedKeys | None = context.coordination.values.get(API_KEYS)
        self.required = bool(settings.api_keys or settings.api_keys_file)
        self._table: CounterTable | None = None
        self._usage_log: UsageLog | None = None
        self._replace(())
        if shared is not None:
            self._table = CounterTable(Path(shared.counters))
            self._replace(shared.entries)
        elif settings.api_keys_file is not None:  # without a supervisor
            self._table = CounterTable()
            entries = with_slots(read_key_file(settings.api_keys_file, counts_quotas=settings.usage_log is not None), {})
            restore_quotas(entries, self._table, settings.usage_log)
            self._replace(entries)
        context.coordination.on_change(self._apply)

    @classmethod
    def of(cls, context: Context) -> AcceptedKeys:
        """The keys of a context, which the first call creates. Raises ConfigError for an invalid file."""
        if "accepted keys" not in context.shared:
            context.shared["accepted keys"] = cls(context)
        keys: AcceptedKeys = context.shared["accepted keys"]
        return keys

    def authenticate(self, headers: Mapping[bytes, bytes]) -> Tenant | None:
        """The tenant of headers, or gRPC metadata, with names in lower case; None if the key has no name, or none is required.

        Only digests are compared. Raises AuthenticationError for a missing or unknown key.
        """
        if not self.required:
            return None
        key = sent_key(headers)
        if not key:
            raise AuthenticationError("this server requires an API key.", cure=_CURE)
        digest = digest_of(key)
        if digest in self._by_digest:
            return self._by_digest[digest]
        if digest not in self._fixed:
            raise AuthenticationError("the API key is not accepted.", cure=_CURE)
        return None

    def named(self, name: str) -> Tenant | None:
        """The tenant with this name, if the file has it."""
        return self._by_name.get(name)

    async def _apply(self, changes: Values) -> None:
        """Use the entries of the file from now on. Requests in flight continue with those that they began with."""
        if (shared := changes.get(API_KEYS)) is not None:
            self._replace(shared.entries)

    def _replace(self, entries: Iterable[KeyEntry]) -> None:
        """Use these entries of the file."""
        self._by_digest: dict[bytes, Tenant | None] = {}
        self._by_name: dict[str, Tenant] = {}
        for entry in entries:
            tenant = self._tenant(entry) if entry.name else None
            self._by_digest.update(dict.fromkeys(entry.digests, tenant))
            if tenant is not None:
                self._by_name[entry.name] = tenant

    def _tenant(self, entry: KeyEntry) -> Tenant:
        """The tenant of a named entry. The first one opens the usage log."""
        assert self._table is not None
        if self._usage_log is None and self._settings.usage_log is not None:
            self._usage_log = UsageLog(self._settings.usage_log)
            self._context.cleanup.callback(self._usage_log.close)
        return Tenant(entry, self._table, self._context.metrics, self._usage_log)


def with_slots(entries: Iterable[KeyEntry], slots: dict[str, int]) -> tuple[KeyEntry, ...]:
    """The entries with the slots of their names. `slots` receives those of new names; when all are used, those of others are used again."""
    entries = tuple(entries)
    free: list[int] = []
    if len(slots) + len(entries) > MAX_SLOTS:
        names = {entry.name for entry in entries}
        free = [slots.pop(name) for name in list(slots) if name not in names]
    for entry in entries:
        if entry.name not in slots:
            slots[entry.name] = free.pop() if free else len(slots)
    return tuple(msgspec.structs.replace(entry, slot=slots[entry.name]) for entry in entries)


def restore_quotas(entries: Iterable[KeyEntry], table: CounterTable, usage_log: str | None) -> None:
    """Set the counters of the present day and month to what the usage log contains."""
    if usage_log is None:
        return
    now = Moment.now().utc
    totals = read_tokens(usage_log, now.strftime("%Y-%m-%d"), now.strftime("%Y-%m"))
    for entry in entries:
        if entry.name in totals:
            KeyLimits(entry, table).restore_quotas(*totals[entry.name])


def sent_key(headers: Mapping[bytes, bytes]) -> bytes:
    """The key in `authorization`, or else in `x-api-key`, which Anthropic's clients send; empty without one."""
    scheme, _, key = headers.get(b"authorization", b"").strip().partition(b" ")
    if scheme:
        return key.strip() if scheme.lower() in _SCHEMES else b""
    return headers.get(b"x-api-key", b"").strip()
