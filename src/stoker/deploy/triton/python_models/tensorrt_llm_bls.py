"""tensorrt_llm_bls: preprocessing, tensorrt_llm and postprocessing, called from here."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils

from stoker.deploy.triton.hosted_bls import BLSModel


class TritonPythonModel:
    """What Triton's Python backend calls. The work is Stoker's, which must be installed where this runs."""

    def initialize(self, args: dict[str, str]) -> None:
        self._model = BLSModel(pb_utils, args)

    def execute(self, requests: list[Any]) -> None:
        self._model.execute(requests)

    def finalize(self) -> None:
        self._model.finalize()
