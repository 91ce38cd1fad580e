"""tensorrt_llm inside Triton's Python backend. It starts a Stoker executor and connects to it like a frontend process."""

from __future__ import annotations

import sys
import tempfile
from typing import Any

from stoker.base import env
from stoker.deploy.triton.hosted.model import HostedModel, engine_directory, tokenizer_directory
from stoker.frontend.generation import GenerationService
from stoker.frontend.tokenizer import Tokenizer
from stoker.runtime.transport.zmq_client import ZmqExecutorClient
from stoker.server.processes.child import EXECUTOR_STOP_SIGNAL, Child
from stoker.server.processes.tasks import ExecutorTask
from stoker.server.protocols.kserve.in_flight import InFlight
from stoker.server.protocols.kserve.models.tensorrt_llm import TensorrtLLM

LOAD_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 10.0


class EngineModel(HostedModel):
    """The model tensorrt_llm, which starts the executor for gpt_model_path and stops it when the model is unloaded."""

    def __init__(self, backend: Any, args: dict[str, str]) -> None:
        super().__init__(backend, args)
        self._run_dir = tempfile.TemporaryDirectory(prefix="stoker-")
        self._service = self.wait(self._start())
        self.run = TensorrtLLM(lambda: self._service, self.options, self.deployment.server, InFlight()).run

    async def _start(self) -> GenerationService:
        """Start the executor process, and connect to it."""
        address = f"ipc://{self._run_dir.name}/executor"
        task = ExecutorTask(engine_directory(self.deployment), self.deployment.runtime, address)
        python = env.text("STOKER_PYTHON") or sys.executable
        self._executor = await Child.start(
            "executor", "stoker.server.processes.executor", task, python=python, stop_signal=EXECUTOR_STOP_SIGNAL
        )
        client = await ZmqExecutorClient.connect(address, connect_timeout_s=LOAD_TIMEOUT_S)
        return GenerationService(self.model.name, Tokenizer.load(tokenizer_directory(self.deployment)), client)

    def finalize(self) -> None:
        """Stop the executor and the event loop."""
        self.wait(self._service.close())
        self.wait(self._executor.stop(STOP_TIMEOUT_S))
        super().finalize()
        self._run_dir.cleanup()
