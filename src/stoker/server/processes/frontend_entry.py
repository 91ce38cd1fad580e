"""Entry point of a frontend process. `frontend` is imported in a function, so that an unsupported library is reported in one line."""

from __future__ import annotations

import sys

from stoker.base.errors import StokerError
from stoker.base.logging import configure, get_logger
from stoker.base.process import importing
from stoker.server.processes.child import end_with_parent

log = get_logger(__name__)


def main() -> int:
    """Run `frontend.main` and return its exit status. If its import fails, report the error and return 1."""
    end_with_parent()
    configure()
    try:
        with importing():
            from stoker.server.processes.frontend import main
    except StokerError as error:
        log.error("%s", error)
        return 1
    return main()


if __name__ == "__main__":
    sys.exit(main())
