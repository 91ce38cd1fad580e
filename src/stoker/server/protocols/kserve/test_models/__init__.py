"""Models for the examples of tritonclient and the tests of Triton, without an engine. `stoker serve --with-test-models` serves them.

Each module defines models with the names, tensors and results of the models that Triton's own examples use.
"""

from __future__ import annotations

from stoker.server.protocols.kserve.inference import ServedModel
from stoker.server.protocols.kserve.test_models import arithmetic, identity, mock_llm, repeat


def test_models() -> list[ServedModel]:
    """All test models."""
    modules = (arithmetic, identity, mock_llm, repeat)
    return [ServedModel(model=model, run=run, ready=lambda: True) for module in modules for model, run in module.MODELS]
