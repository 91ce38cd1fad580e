from __future__ import annotations

import sys
from pathlib import Path

for folder in ("server", "parity", "runtime", "parallel"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
