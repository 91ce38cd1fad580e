from __future__ import annotations

import pytest

from stoker.kernels.reference import attention as attention_reference
from stoker.kernels.reference import linear as linear_reference
from stoker.kernels.reference import quant_int4 as int4_reference
from stoker.kernels.reference import quant_int8 as int8_reference
from stoker.kernels.reference import rope as rope_reference


@pytest.fixture
def _no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test when a reference runs instead of the kernel."""

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("the reference ran")

    for module, name in (
        (linear_reference, "linear"), (int8_reference, "packed_linear"), (int4_reference, "packed_linear"),
        (rope_reference, "rope_store"), (attention_reference, "attention"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, fail)
