"""The files in which several frontends write their counters. prometheus-client maps them into memory and sums those of all frontends.

The files of a frontend have its index in their names, and not its process id: a frontend that is started again continues the counts of
the one that ended. Otherwise each one that ends would leave files of 2 MiB, which every scrape would have to read.

prometheus-client creates sparse files. A write to a mapped page for which the disk has no space ends the process with SIGBUS, so the space
is allocated first.
"""

from __future__ import annotations

import os
from pathlib import Path

from prometheus_client import values

from stoker.base.errors import ConfigError

KINDS = ("counter", "histogram")  # the types of metrics that frontends count; each frontend has a file of each
NUM_BYTES = 1 << 20  # prometheus-client's size of a new file, enough for several thousand samples


def use_files(folder: Path, index: int | None) -> None:
    """Create the files of the frontend with this index, or continue them. Metrics that are created afterwards are in these files.

    Without an index, they are those of this process. Raises ConfigError if there is no space on the disk.
    """
    name = os.getpid() if index is None else index
    for kind in KINDS:
        path = folder / f"{kind}_{name}.db"
        try:
            with path.open("ab") as file:
                os.posix_fallocate(file.fileno(), 0, NUM_BYTES)
        except OSError as error:
            if path.exists() and path.stat().st_size < NUM_BYTES:  # otherwise it has counts
                path.unlink()
            cure = "Free space on its disk, or set TMPDIR to a directory of another disk."
            raise ConfigError(f"{path} cannot be written: {error.strerror}.", cure=cure) from None
    values.ValueClass = values.MultiProcessValue(lambda: name)  # type: ignore[no-untyped-call]
