"""Model repositories of Triton's inflight_batcher_llm, which Stoker reads, checks, fills and writes."""

from __future__ import annotations

from stoker.deploy.deployment import FORMATS, Format
from stoker.deploy.triton.export import export_triton
from stoker.deploy.triton.load import load_repository
from stoker.deploy.triton.repository import is_model_repository

FORMATS.add("triton", Format(name="triton", recognise=is_model_repository, load=load_repository, export=export_triton))
