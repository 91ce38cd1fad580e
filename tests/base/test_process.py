"""Garbage collection of processes, each in a process of its own: frozen objects are never collected again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import gc, weakref
from stoker.base.process import freeze_objects
class Cycle:
    def __init__(self): self.own = self
before, garbage = Cycle(), weakref.ref(Cycle())
freeze_objects()
assert garbage() is None, "garbage is collected first"
assert gc.get_freeze_count() > 1000 and not any(found is before for found in gc.get_objects())
kept = weakref.ref(before)
after = weakref.ref(Cycle())
del before
gc.collect()
assert after() is None and kept() is not None
starts = []
gc.callbacks.append(lambda phase, info: starts.append(phase))
new = [[] for _ in range(9_000)]
assert not starts, "no collection of fewer than 10,000 objects"
"""


def test_frozen_objects_are_not_scanned_again() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)


IMPORTS = """
import gc, weakref
from stoker.base.process import importing
class Cycle:
    def __init__(self): self.own = self
starts = []
gc.callbacks.append(lambda phase, info: starts.append(phase))
try:
    with importing():
        modules = [[] for _ in range(100_000)]
        assert not starts
        raise ImportError
except ImportError:
    assert gc.isenabled(), "an import that fails leaves collections enabled"
gc.collect()
with importing():
    starts.clear()
    more, kept = [[] for _ in range(100_000)], weakref.ref(Cycle())
    assert not starts and not gc.isenabled()
assert gc.isenabled() and gc.get_freeze_count() > 200_000
after = weakref.ref(Cycle())
gc.collect()
assert after() is None and kept() is not None
"""


def test_imports_are_neither_interrupted_nor_scanned() -> None:
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, timeout=60)


COMMAND = """
import atexit, gc, sys
from pathlib import Path
starts = []
gc.callbacks.append(lambda phase, info: starts.append(phase))
atexit.register(lambda: Path(sys.argv[1]).write_text(f"{len(starts)} {gc.get_freeze_count()}"))  # runs after what is registered later
from stoker.base.process import collect_rarely
collect_rarely()
starts.clear()
modules = [[] for _ in range(9_000)]
assert not starts, "no collection of fewer than 10,000 objects"
more = [[] for _ in range(12_000)]
assert starts.count("start") == 2 and starts[0] == "start"
"""


def test_a_command_collects_rarely_and_not_at_its_end(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", COMMAND, tmp_path / "counts"], check=True, timeout=60)
    _, frozen = (tmp_path / "counts").read_text().split()
    assert int(frozen) > 20_000
