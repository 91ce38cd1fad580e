"""Names the path in errors of a full or failing disk, which the system reports without it for a write to an open file."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


def is_of_disk(error: BaseException) -> bool:
    """Whether the disk is full, read-only or damaged, as opposed to an error of the network or of a file's content."""
    return isinstance(error, OSError) and error.errno in _OF_THE_DISK


@contextlib.contextmanager
def names_path(path: Path) -> Iterator[None]:
    """Errors of the disk that occur in the block, and that name no file, name `path`: the folder that the block writes to."""
    try:
        yield
    except OSError as error:
        if error.filename is None and is_of_disk(error):
            error.filename = str(path)
        raise
