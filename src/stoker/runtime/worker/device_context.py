"""Creates the context of a GPU while the process imports what it needs: the driver takes some tenths of a second for both at once."""

from __future__ import annotations

import threading

import torch

from stoker.base.logging import get_logger

log = get_logger(__name__)


class DeviceContext:
    """The context of a device, which a thread creates. Nothing is created on a CPU."""

    def __init__(self, device: str) -> None:
        """`device`: such as cuda:0. An unusable one is reported when it is used, and not here."""
        self._thread: threading.Thread | None = None
        if device != "cpu":
            self._thread = threading.Thread(target=_create, args=(device,), name="device-context", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Return when the context exists, or when it could not be created."""
        if self._thread is not None:
            self._thread.join()


def _create(device: str) -> None:
    """The thread: run one matrix product, which also loads the library of matrix products."""
    try:
        with torch.cuda.device(device):
            x = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
            torch.mm(x, x)
            torch.cuda.synchronize()
    except (RuntimeError, AssertionError, ValueError) as error:  # AssertionError: torch was compiled without CUDA
        log.debug("no context was created on %s before the checks: %s", device, error)
