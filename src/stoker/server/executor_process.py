"""The process that owns the device: loads an engine and runs its executor behind ZeroMQ."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any

from stoker.base.errors import StokerError
from stoker.base.logging import configure, get_logger
from stoker.runtime.client import ExecutorInfo, Message, Shutdown
from stoker.runtime.transport import ZmqMailbox
from stoker.server.child import end_with_parent, receive_task
from stoker.server.tasks import ExecutorTask

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
    mailboxes: list[StoppableMailbox] = []
    signal.signal(signal.SIGTERM, lambda number, frame: _stop(mailboxes, number, frame))
    end_with_parent()
    try:
        run(task, mailboxes, tell_ready)
    except StokerError as error:
        log.error("%s", error)
        return 1
    return 0


def run(task: ExecutorTask, mailboxes: list[StoppableMailbox], tell_ready: Any) -> None:
    """Load, tell, loop."""
    from stoker.runtime.load import load_executor  # torch: not before the signals are set up

    def listen(info: ExecutorInfo) -> StoppableMailbox:
        mailboxes.append(StoppableMailbox(task.address, info))
        return mailboxes[0]

    executor = load_executor(task.engine, task.config, listen)
    tell_ready()
    executor.run()


def _stop(mailboxes: list[StoppableMailbox], number: int, frame: FrameType | None) -> None:
    if not mailboxes:
        sys.exit(0)
    mailboxes[0].stopping = True


if __name__ == "__main__":
    sys.exit(main())
