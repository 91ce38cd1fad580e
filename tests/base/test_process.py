"""`freeze_objects`, in a process of its own: frozen objects are never collected again."""

from __future__ import annotations

import subprocess
import sys

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
"""


def test_frozen_objects_are_not_scanned_again() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
