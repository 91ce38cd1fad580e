"""Deployment formats: reads a folder of another server as a `Deployment`, and writes an engine as such a folder.

Each format is a module or package that adds one row to `deployment.FORMATS` when it is imported here.
"""

from __future__ import annotations

from stoker.deploy import checkpoint as checkpoint
from stoker.deploy import engine as engine
from stoker.deploy import lmi as lmi
from stoker.deploy import triton as triton
from stoker.deploy import truss as truss
