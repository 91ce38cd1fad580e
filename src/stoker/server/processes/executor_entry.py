"""Entry point of the executor process: starts the processes of the other ranks, then imports what this one needs."""

from __future__ import annotations

import signal
import sys

from stoker.base.start_times import StartTimes
from stoker.runtime.worker_group.follower_process import WaitingFollowers


def main() -> int:
    """Run `executor.main` and return its exit status.

    The command line has the expected devices of the ranks, this one's first. The imports of the other ranks, which are as long as this
    one's, begin before it.
    """
    times = StartTimes()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # inherited by its child processes
    devices = sys.argv[1:]
    with WaitingFollowers(devices[1:]) as waiting:
        from stoker.server.processes.executor import main

        return main(devices, waiting, times)


if __name__ == "__main__":
    sys.exit(main())
