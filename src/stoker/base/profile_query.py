"""A request to profile the next steps of an executor, and its answer."""

from __future__ import annotations

import msgspec

MAX_STEPS = 1000
MAX_TIME_S = 300.0
BUSY = "another profile is being recorded"
WRITE_S = 120.0  # limit for writing the traces of all ranks


class ProfileQuery(msgspec.Struct, tag=True, array_like=True):
    """A request for a trace of `num_steps` steps, or of those that run within `time_s`. It is answered with `Mailbox.reply_profile`."""

    client: str
    number: int  # identifies the query of the client
    num_steps: int
    time_s: float


class ProfileResult(msgspec.Struct):
    """The file with the trace, in a folder that the receiver deletes; or why there is none."""

    path: str = ""
    num_steps: int = 0
    error: str = ""
