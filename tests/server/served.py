"""A test program. Serves the engine argv[1] with the settings argv[2] (JSON), as `stoker serve` does.

The executor is that of the module argv[3], if there is one.
"""

from __future__ import annotations

import json
import sys

from stoker.base.config import RuntimeConfig
from stoker.base.errors import StokerError
from stoker.base.logging import configure
from stoker.server.processes import executor_control
from stoker.server.processes.supervisor import serve
from stoker.server.settings import ServerSettings


def main() -> int:
    configure()
    if len(sys.argv) > 3:
        executor_control.MODULE = sys.argv[3]
    settings = ServerSettings(http_port=0, **json.loads(sys.argv[2]))
    try:
        return serve(sys.argv[1], RuntimeConfig(device="cpu", kv_cache_tokens=4096), settings, lambda line: print(line, flush=True))
    except StokerError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
