"""Trusses: folders with a config.yaml for the truss package, which Stoker reads and writes."""

from __future__ import annotations

from stoker.deploy.deployment import FORMATS, Format
from stoker.deploy.truss.export import export_truss
from stoker.deploy.truss.load import FILE, is_truss, load_truss

FORMATS.add("truss", Format(name="truss", file=FILE, recognise=is_truss, load=load_truss, export=export_truss))
