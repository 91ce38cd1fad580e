"""The tables of input tensors are complete and consistent."""

from __future__ import annotations

from stoker.base.types import SamplingParams
from stoker.server.protocols.kserve.tensors.fields import INPUTS
from stoker.server.protocols.kserve.tensors.table import TENSORS


def test_every_declared_input_is_accepted_without_effect_or_rejected() -> None:
    assert {row.name for inputs, _ in TENSORS.values() for row in inputs} == {row.name for row in INPUTS}


def test_targets_are_sampling_parameters() -> None:
    assert set(INPUTS.targets().values()) <= set(SamplingParams.__struct_fields__)
