"""The process that owns the device: loads an engine and runs its executor behind ZeroMQ."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Any

from stoker.base.errors import StokerError
from stoker.base.logging import configure, get_logger
from stoker.runtime.client import ExecutorInfo, Message, Shutdown
from stoker.runtime.transport.zmq_mailbox import ZmqMailbox
from stoker.server.processes.child import end_with_parent, receive_task
from stoker.server.processes.tasks import ExecutorTask

log = get_logger(__name__)


class StoppableMailbox(ZmqMailbox):
    """Its executor ends when this process is told to."""

    stopping = False

    def poll(self, timeout_s: float) -> list[Message]:
        messages = super().poll(timeout_s)
        return [*messages, Shutdown(drain=False)] if self.stopping else messages


def main() -> int:
    configure()
    task, tell_ready = receive_task()
    end_with_parent()
    try:
        run(task, tell_ready)
    except StokerError as error:
        log.error("%s", error)
        return 1
    return 0


def run(task: ExecutorTask, tell_ready: Callable[[], Any]) -> None:
    """Load, tell, loop.

    Until the mailbox is there SIGTERM has the system's own effect, which ends this process at once: nothing is in flight that could be
    lost, and an exception out of a handler, amid an import or a library's cleaning up, comes out as another one.
    """
    from stoker.runtime.load import load_executor  # torch: only now, as an end may be asked for meanwhile

    def listen(info: ExecutorInfo) -> StoppableMailbox:
        mailbox = StoppableMailbox(task.address, info)
        signal.signal(signal.SIGTERM, lambda number, frame: setattr(mailbox, "stopping", True))
        return mailbox

    executor = load_executor(task.engine, task.config, listen)
    tell_ready()
    executor.run()


if __name__ == "__main__":
    sys.exit(main())
