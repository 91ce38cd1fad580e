"""Profiles steps of an executor with torch.profiler, in the processes of all ranks of this host, and writes one trace for Perfetto.

The leader starts and stops the profiles of the followers with records of the plan channel, so all ranks profile the same steps. Each rank
writes its trace to a file of the same folder, in a thread; then the leader combines them. Process ids are distinct in the combined trace.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from stoker.base.logging import get_logger
from stoker.base.profile_query import WRITE_S, ProfileQuery, ProfileResult

log = get_logger(__name__)

MAX_TRACE_BYTES = 256 << 20  # of all ranks together
POLL_S = 0.05
ID_STEP = 10_000_000  # above the largest process id, between the process ids of two ranks
FLOW_STEP = 1 << 31  # between the ids of arrows of two ranks


def trace_folder(leader_pid: int, number: int) -> Path:
    """The folder of the traces of one profile, which only the leader creates, and only for its user."""
    return Path(tempfile.gettempdir()) / f"stoker-profile-{leader_pid}-{number}"


class RankTrace:
    """The profile of one rank, from now until `stop`."""

    def __init__(self, folder: Path, rank: int, device: str) -> None:
        self._file = folder / f"rank{rank}.json"
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.startswith("cuda"):
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()

    def stop(self) -> None:
        """End the profile, and write the trace in a thread. The file appears complete. On another host there is no folder for it."""
        self._profile.stop()
        threading.Thread(target=self._write, name="profile", daemon=True).start()

    def _write(self) -> None:
        """Write the trace and rename the file."""
        temporary = self._file.with_suffix(".new")
        try:
            if self._file.parent.is_dir():
                self._profile.export_chrome_trace(str(temporary))
                temporary.rename(self._file)
        except Exception as error:  # the leader reports the missing file
            if self._file.parent.is_dir():  # else the leader discarded the profile
                log.error("the profile cannot be written: %s", error)


class StepProfiler:
    """One profile of the leader and its followers on this host, whose ranks are `ranks`; the first one is the leader."""

    def __init__(self, query: ProfileQuery, number: int, ranks: list[int], device: str, first_step: int) -> None:
        self.query = query
        self.number = number
        self.result: ProfileResult | None = None  # set when the traces are written
        self._ranks = ranks
        self._first_step = first_step
        self._folder = trace_folder(os.getpid(), number)
        self.discard()  # of an executor that was killed and had the same process id, as in a container that starts again
        self._folder.mkdir(mode=0o700)
        self._deadline = time.monotonic() + query.time_s
        self._trace: RankTrace | None = RankTrace(self._folder, ranks[0], device)

    @property
    def is_recording(self) -> bool:
        """Whether steps are profiled."""
        return self._trace is not None

    def is_over(self, num_steps: int) -> bool:
        """Whether enough steps have ended, or the time is over. `num_steps` is the number of all steps of the executor."""
        return num_steps - self._first_step >= self.query.num_steps or time.monotonic() > self._deadline

    def stop(self, num_steps: int) -> None:
        """End the profile of this rank. `result` is set when all traces are written."""
        assert self._trace is not None
        self._trace.stop()
        self._trace = None
        recorded = min(num_steps - self._first_step, self.query.num_steps)
        threading.Thread(target=self._finish, args=(recorded,), name="profile-combine", daemon=True).start()

    def discard(self) -> None:
        """Delete the files of a profile whose result is not read, also while a rank writes them.

        The folder gets another name first, so that no rank can create a file in it while its content is deleted.
        """
        with contextlib.suppress(OSError), tempfile.TemporaryDirectory(prefix="stoker-discarded-", ignore_cleanup_errors=True) as trash:
            self._folder.rename(Path(trash) / self._folder.name)

    def _finish(self, num_steps: int) -> None:
        """Wait for the traces of all ranks, combine them, and set `result`."""
        try:
            files = self._wait_for_files()  # also without a step, because a folder cannot be deleted while a rank writes into it
            if not num_steps:
                raise ValueError(f"no step ran within {self.query.time_s:g} s; send requests meanwhile")
            path = combine(files, self._folder / "trace.json")
            result = ProfileResult(str(path), num_steps)
        except Exception as error:
            self.discard()
            result = ProfileResult(error=str(error))
        self.result = result

    def _wait_for_files(self) -> dict[int, Path]:
        """The trace of each rank. Raises ValueError if one is missing, or if they are too large together."""
        files = {rank: self._folder / f"rank{rank}.json" for rank in self._ranks}
        deadline = time.monotonic() + WRITE_S
        while missing := [rank for rank, file in files.items() if not file.exists()]:
            if not self._folder.is_dir():
                raise ValueError("the executor ended")
            if time.monotonic() > deadline:
                raise ValueError(f"the ranks {missing} wrote no trace within {WRITE_S:g} s")
            time.sleep(POLL_S)
        if (size := sum(file.stat().st_size for file in files.values())) > MAX_TRACE_BYTES:
            raise ValueError(f"the trace has {size} bytes, and the limit is {MAX_TRACE_BYTES}; profile fewer steps")
        return files


def combine(files: dict[int, Path], target: Path) -> Path:
    """Combine the traces of several ranks, and return the file of all; a single one is returned as it is."""
    if len(files) == 1:
        return next(iter(files.values()))
    combined: dict[str, Any] = {}
    for index, (rank, file) in enumerate(files.items()):
        trace = msgspec.json.decode(file.read_bytes())
        if not index:
            combined = {**trace, "traceEvents": []}
        shift_us = (trace.get("baseTimeNanoseconds", 0) - combined.get("baseTimeNanoseconds", 0)) / 1e3
        combined["traceEvents"] += [_shifted(event, rank, index, shift_us) for event in trace["traceEvents"]]
        file.unlink()
    target.write_bytes(msgspec.json.encode(combined))
    return target


def _shifted(event: dict[str, Any], rank: int, index: int, shift_us: float) -> dict[str, Any]:
    """An event with the ids and the time of the combined trace. The names of processes begin with their rank."""
    if isinstance(event.get("pid"), int):
        event["pid"] += index * ID_STEP
    elif "pid" in event:
        event["pid"] = f"rank {rank} {event['pid']}"
    if event.get("ph") in ("s", "t", "f") and isinstance(event.get("id"), int):
        event["id"] += index * FLOW_STEP
    if "ts" in event:
        event["ts"] += shift_us
    if event.get("ph") == "M" and event.get("name") == "process_name":
        event["args"]["name"] = f"rank {rank}: {event['args']['name']}"
    return event
