"""The files in which several frontends write their counters. prometheus-client maps them into memory and sums those of all frontends.

It creates sparse files. A write to a mapped page for which the disk has no space ends the process with SIGBUS, so the space is allocated
first.
"""

from __future__ import annotations

import os
from pathlib import Path

from stoker.base.errors import ConfigError

KINDS = ("counter", "histogram")  # the types of metrics that frontends count; each process has a file of each
NUM_BYTES = 1 << 20  # prometheus-client's size of a new file, enough for several thousand samples


def allocate_files(folder: Path) -> None:
    """Create the files of this process, with space on the disk. Raises ConfigError if there is none."""
    for kind in KINDS:
        path = folder / f"{kind}_{os.getpid()}.db"
        try:
            with path.open("ab") as file:
                os.posix_fallocate(file.fileno(), 0, NUM_BYTES)
        except OSError as error:
            path.unlink(missing_ok=True)
            cure = "Free space on its disk, or set TMPDIR to a directory of another disk."
            raise ConfigError(f"{path} cannot be written: {error.strerror}.", cure=cure) from None
