"""The supervisor's part of API keys: reads the file at the start and on SIGHUP, and sends its entries to the frontends."""

from __future__ import annotations

import asyncio
from pathlib import Path

from stoker.base.errors import StokerError
from stoker.base.logging import get_logger
from stoker.server.coordination import Coordinator
from stoker.server.settings import ServerSettings
from stoker.server.tenants.accepted_keys import API_KEYS, SharedKeys, restore_quotas, with_slots
from stoker.server.tenants.counters import CounterTable
from stoker.server.tenants.key_file import KeyEntry, read_key_file
from stoker.server.tenants.usage_log import UsageLog

log = get_logger(__name__)

COUNTERS = "counters"  # the file of the counters, in the run directory


class KeyReload:
    """The entries of the file of API keys. Without such a file, nothing is read."""

    def __init__(self, settings: ServerSettings, run_dir: Path, coordinator: Coordinator) -> None:
        self._file = settings.api_keys_file
        self._usage_log = settings.usage_log
        self._counters = run_dir / COUNTERS
        self._coordinator = coordinator
        self._slots: dict[str, int] = {}

    async def start(self) -> None:
        """Send the entries to the frontends that will connect. Raises ConfigError for an invalid file, or a log that cannot be opened."""
        if self._file is None:
            return
        entries = await self._read()
        table = CounterTable(self._counters)
        if self._usage_log is not None:
            UsageLog(self._usage_log).close()
            await asyncio.to_thread(restore_quotas, entries, table, self._usage_log)
        table.close()
        await self._publish(entries)

    async def reload(self) -> None:
        """Read the file again. An invalid one is logged, and the present entries remain in use. Requests are not interrupted."""
        if self._file is None:
            log.info("SIGHUP has no effect, because the server has no file of API keys.")
            return
        try:
            entries = await self._read()
        except StokerError as error:
            log.error("the API keys are not reloaded: %s", error)
            return
        await self._publish(entries)
        log.info("reloaded %s: %d entries, %d keys.", self._file, len(entries), sum(len(entry.digests) for entry in entries))

    async def _read(self) -> tuple[KeyEntry, ...]:
        """The entries of the file, with the slots of their counters. Raises ConfigError."""
        assert self._file is not None
        entries = await asyncio.to_thread(read_key_file, self._file, counts_quotas=self._usage_log is not None)
        return with_slots(entries, self._slots)

    async def _publish(self, entries: tuple[KeyEntry, ...]) -> None:
        """Send the entries to all frontends. Returns when they use them."""
        await self._coordinator.publish({API_KEYS: SharedKeys(entries, str(self._counters))})
