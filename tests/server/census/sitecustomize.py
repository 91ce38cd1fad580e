"""Python imports this when it starts with this folder in PYTHONPATH: SIGUSR2 writes the number of objects by type to $CENSUS_DIR/PID.json.

Objects of the start that `freeze_objects` exempts from garbage collection are not counted. Processes are started again without a delay
or a limit, and each process retains few lines of its log.
"""

from __future__ import annotations

import gc
import json
import os
import signal
from collections import Counter, deque
from pathlib import Path

from stoker.base import logging
from stoker.server.processes import frontend_group, restart_policy


def write_census(*_: object) -> None:
    gc.collect()
    counts = Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())
    path = Path(os.environ["CENSUS_DIR"]) / f"{os.getpid()}.json"
    path.with_suffix(".new").write_text(json.dumps(counts))
    path.with_suffix(".new").rename(path)


signal.signal(signal.SIGUSR2, write_census)
restart_policy.FIRST_DELAY_S = restart_policy.MAX_DELAY_S = 0.0
frontend_group.MAX_RESTARTS = 1000
logging._State.recent._lines = deque(maxlen=4)
