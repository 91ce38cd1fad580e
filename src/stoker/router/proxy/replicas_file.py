"""The replicas file: it is read again when it changes, and replicas are added and removed."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from stoker.base.errors import ConfigError, reason_of
from stoker.base.logging import get_logger
from stoker.router.proxy.application import RouterApplication
from stoker.router.settings import read_replicas

log = get_logger(__name__)

POLL_S = 0.5


def read_file(file: str) -> list[str]:
    """The URLs in a replicas file. Raises ConfigError."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"replicas_file={file} cannot be read: {reason_of(error)}.", cure="Name a text file with one URL a line."
        ) from None
    return read_replicas(text, file)


class ReplicasFile:
    """Replicas of the command line or of the admin routes stay; those of the file follow it."""

    def __init__(self, file: str, application: RouterApplication) -> None:
        self._file = file
        self._application = application
        self._urls: set[str] = set()
        self._state: tuple[int, int, int] | None = None

    async def run(self) -> None:
        """Apply the file whenever it changes. An invalid or missing file is logged, and changes nothing."""
        while True:
            try:
                await self.apply()
            except ConfigError as error:
                log.error("%s The replicas stay as they are.", error)
            await asyncio.sleep(POLL_S)

    async def apply(self) -> None:
        """Add and remove replicas if the file has changed. Raises ConfigError."""
        try:
            found = os.stat(self._file)
            state = (found.st_mtime_ns, found.st_size, found.st_ino)
        except OSError:
            state = (0, 0, 0)
        if state == self._state:
            return
        self._state = state
        urls = read_file(self._file)
        fleet = self._application.router.fleet
        for url in self._urls - set(urls):
            if (replica := fleet.get(url)) is not None:
                await self._application.remove(replica)
        added = {url for url in urls if url not in fleet}
        for url in urls:
            if url in added:
                self._application.add(url)
        self._urls = (self._urls & set(urls)) | added
