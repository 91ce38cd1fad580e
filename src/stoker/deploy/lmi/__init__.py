"""SageMaker LMI: model folders with a serving.properties, and model data that `stoker package lmi` writes."""

from __future__ import annotations

from stoker.deploy.deployment import FORMATS, Format
from stoker.deploy.lmi.load import FILE, is_lmi_folder, load_lmi
from stoker.deploy.lmi.model_settings import complete_lmi
from stoker.deploy.lmi.package import export_lmi

FORMATS.add("lmi", Format(name="lmi", file=FILE, recognise=is_lmi_folder, load=load_lmi, complete=complete_lmi, export=export_lmi))
