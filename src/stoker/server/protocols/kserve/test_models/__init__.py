"""Models for the examples of tritonclient and the tests of Triton, without an engine. `stoker serve --with-test-models` serves them.

Each module defines models with the names, tensors and results of the models that Triton's own examples use.
"""

from __future__ import annotations

from stoker.server.coordination import Coordination
from stoker.server.protocols.kserve.inference import Run, ServedModel
from stoker.server.protocols.kserve.model_config import TritonModel
from stoker.server.protocols.kserve.test_models import arithmetic, identity, mock_llm, repeat, sequence

_STATELESS: tuple[tuple[TritonModel, Run], ...] = (*arithmetic.MODELS, *identity.MODELS, *mock_llm.MODELS, *repeat.MODELS)
NAMES = tuple(model.name for model in (*(model for model, _ in _STATELESS), *sequence.MODELS))


def test_models(coordination: Coordination) -> list[ServedModel]:
    """All test models. `coordination` has the state of sequences."""
    run_sequence = sequence.SequenceRunner(coordination).run
    models = (*_STATELESS, *((model, run_sequence) for model in sequence.MODELS))
    return [ServedModel(model=model, run=run, ready=lambda: True) for model, run in models]
