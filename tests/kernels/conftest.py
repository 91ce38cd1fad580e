"""Kernels run in Triton's interpreter here, which a kernel chooses when its module is first imported. Only this area imports them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import interpreter

interpreter.install()
