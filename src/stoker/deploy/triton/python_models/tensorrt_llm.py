"""tensorrt_llm: token ids to token ids, by a Stoker executor that this model starts."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils

from stoker.deploy.triton.hosting import EngineModel


class TritonPythonModel:
    """What Triton's Python backend calls. The work is Stoker's, which must be installed where this runs."""

    def initialize(self, args: dict[str, str]) -> None:
        self._model = EngineModel(pb_utils, args)

    def execute(self, requests: list[Any]) -> None:
        self._model.execute(requests)

    def finalize(self) -> None:
        self._model.finalize()
