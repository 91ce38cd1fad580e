"""Agents of the NIXL library, with settings that its Python class does not have. https://github.com/ai-dynamo/nixl"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from typing import Any

from stoker.base.config import RuntimeConfig
from stoker.base.errors import DependencyError

PROGRESS_INTERVAL_MS = 10


def has_nixl() -> bool:
    """Whether the package is installed."""
    return importlib.util.find_spec("nixl") is not None


def check_backend(config: RuntimeConfig) -> None:
    """Raise DependencyError for the backend nixl without its package."""
    if config.transfer_backend == "nixl" and not has_nixl():
        raise DependencyError("nixl", "transfer_backend=nixl", "nixl")


def create_agent(name: str) -> Any:
    """An agent with the backend UCX, whose progress thread sleeps while there are no events.

    The thread is necessary: connections need progress on both sides, and so do reads that UCX emulates with messages, as over TCP. UCX
    wakes it through a file descriptor. The constructor of `nixl_agent` sets the time limit of that wait to 0, by which the thread takes a
    core while nothing is transferred. Therefore the agent of the bindings is replaced before it has a backend, and thus a thread. The
    limit is short because, according to NIXL, UCX does not announce all events.
    """
    from nixl._api import nixl_agent, nixl_agent_config
    from nixl._bindings import NIXL_THREAD_SYNC_NONE, nixlAgent, nixlAgentConfig

    _exit_without_destructors()
    config = nixlAgentConfig()
    config.useProgThread = True
    config.pthrDelay = 1000 * PROGRESS_INTERVAL_MS  # in us
    config.syncMode = NIXL_THREAD_SYNC_NONE  # its callers hold a lock
    agent = nixl_agent(name, nixl_agent_config(backends=[]))
    agent.agent = nixlAgent(name, config)
    agent.create_backend("UCX")
    return agent


@functools.cache
def _exit_without_destructors() -> None:
    """Skip the destructors of libraries at the end of this process, with its exit status.

    With NIXL 1.5.1, that of UCX's copy of libnl-route crashes (rtnl_tc_unregister), also after all agents were closed. on_exit (glibc)
    calls _exit with the status after Python has finished.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
