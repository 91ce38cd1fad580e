"""Deployment formats: what a folder asks for, and an engine written as such a folder. One row of FORMATS each."""

from __future__ import annotations

from stoker.deploy import checkpoint as checkpoint
from stoker.deploy import engine as engine
from stoker.deploy import lmi as lmi
from stoker.deploy import triton as triton
from stoker.deploy import truss as truss
