"""Triton's inflight_batcher_llm model repositories: read, checked, filled and written."""

from __future__ import annotations

from stoker.deploy.deployment import FORMATS, Format
from stoker.deploy.triton.export import export_triton
from stoker.deploy.triton.load import load
from stoker.deploy.triton.repository import recognise

FORMATS.add("triton", Format(name="triton", recognise=recognise, load=load, export=export_triton))
