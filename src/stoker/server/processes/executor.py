"""The process that owns the device: loads an engine and runs its executor behind ZeroMQ."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stoker.base.errors import ConfigError, StokerError
from stoker.base.logging import configure, get_logger
from stoker.base.process import freeze_objects, importing
from stoker.base.start_times import StartTimes
from stoker.runtime.client import ExecutorInfo, Message, Shutdown
from stoker.runtime.request import SequenceOutput
from stoker.runtime.transport.zmq_mailbox import ZmqMailbox
from stoker.runtime.worker_group.follower_process import WaitingFollowers
from stoker.server.processes.child import EXECUTOR_STOP_SIGNAL, USAGE_STATUS, end_with_parent, receive_task
from stoker.server.processes.tasks import ExecutorTask

if TYPE_CHECKING:
    from stoker.runtime.worker.device_context import DeviceContext

log = get_logger(__name__)


class StoppableMailbox(ZmqMailbox):
    """A mailbox that shuts its executor down once `stopping` is set.

    From then on it sends no outputs, so that frontends treat the requests as those of a failed executor, and not as cancelled ones.
    """

    stopping = False

    def poll(self, timeout_s: float) -> list[Message]:
        """The messages that have arrived, and Shutdown without draining once `stopping` is set."""
        messages = super().poll(timeout_s)
        return [*messages, Shutdown(drain=False)] if self.stopping else messages

    def send(self, outputs: list[SequenceOutput]) -> None:
        """Send outputs, unless `stopping` is set."""
        if not self.stopping:
            super().send(outputs)


def main() -> int:
    """Run the executor of the task that the supervisor sends. Returns the exit status.

    The command line has the expected devices of the ranks, this one's first. The processes of the other ranks are started at once.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # inherited by its child processes
    end_with_parent(EXECUTOR_STOP_SIGNAL)
    configure()
    times, devices = StartTimes(), sys.argv[1:]
    with WaitingFollowers(devices[1:]) as waiting:
        context = _import(devices)
        times.reached("imports")
        task, report_ready = receive_task()
        times.reached("task")
        if context is not None:
            context.wait()
            times.reached("device")
        try:
            run(task, report_ready, waiting, times)
        except StokerError as error:
            with contextlib.suppress(BrokenPipeError):
                report_ready(str(error))
            return USAGE_STATUS if isinstance(error, ConfigError) else 1
    return 0


def _import(devices: list[str]) -> DeviceContext | None:
    """Import what the executor needs, which takes seconds. The supervisor may still prepare the task.

    Meanwhile the context of the first device is created, and returned; None if no devices are known.
    """
    context: DeviceContext | None = None
    with importing():
        if devices:
            from stoker.runtime.worker.device_context import DeviceContext

            context = DeviceContext(devices[0])
        import stoker.runtime.load  # noqa: F401
    return context


def run(task: ExecutorTask, report_ready: Callable[[], Any], waiting: WaitingFollowers, times: StartTimes) -> None:
    """Load the engine, call `report_ready`, and run the executor until it is shut down.

    Once the mailbox (the executor's end of the ZeroMQ connection) exists, the stop signal ends all requests and the executor in an orderly
    way. Before that, it ends the process immediately, which is its default action: no request can be lost, and the exception of a handler
    could be swallowed by an import.
    """
    from stoker.runtime.load import load_executor

    def listen(info: ExecutorInfo) -> StoppableMailbox:
        """Open the mailbox of the executor. From now on the stop signal sets `stopping`."""
        mailbox = StoppableMailbox(task.address, info)
        signal.signal(EXECUTOR_STOP_SIGNAL, lambda number, frame: setattr(mailbox, "stopping", True))
        return mailbox

    executor = load_executor(task.engine, task.config, listen, task.nodes, waiting=waiting, times=times)
    waiting.close()  # processes that were started for other devices
    freeze_objects()
    report_ready()
    executor.run(capture_when_idle=True)


if __name__ == "__main__":
    sys.exit(main())
