"""What the model.py files of an exported repository share when a real Triton server runs them.

Each model instance is a process of Triton's Python backend. `tensorrt_llm` there owns a Stoker executor and reaches it as Stoker's own
frontends do; the other models only need the tokenizer. `backend` is the module triton_python_backend_utils, which exists there alone.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading
from collections.abc import Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from stoker.base import env
from stoker.base.config import Limits
from stoker.base.errors import ConfigError
from stoker.deploy.deployment import Deployment, EngineSource
from stoker.deploy.triton.load import load
from stoker.frontend.generation import GenerationService
from stoker.frontend.tokenizer import Tokenizer
from stoker.runtime.client import ExecutorInfo
from stoker.runtime.transport.in_process import InProcessClient, InProcessMailbox
from stoker.runtime.transport.zmq_client import ZmqExecutorClient
from stoker.server.processes.child import Child
from stoker.server.processes.tasks import ExecutorTask
from stoker.server.protocols.kserve.errors import client_message
from stoker.server.protocols.kserve.in_flight import InFlight
from stoker.server.protocols.kserve.inference import Inference, Response, Run
from stoker.server.protocols.kserve.model_config import TritonOptions
from stoker.server.protocols.kserve.models.tensorrt_llm import TensorrtLLM
from stoker.server.protocols.kserve.models.tokenizer import Postprocessing, Preprocessing

CANCEL_POLL_S = 0.05
LOAD_TIMEOUT_S = 600.0


class Sender:
    """Triton's response sender, which must not be touched once it has sent the final flag: asking it whether the client cancelled
    would crash the server."""

    def __init__(self, backend: Any, sender: Any) -> None:
        self._backend = backend
        self._sender = sender
        self._open = True

    def cancelled(self) -> bool:
        return self._open and self._sender.is_cancelled()

    def send(self, response: Response) -> None:
        tensors = [self._backend.Tensor(name, np.ascontiguousarray(array)) for name, array in response.outputs.items()]
        self._send(self._backend.InferenceResponse(output_tensors=tensors), final=response.final)

    def fail(self, message: str, code: Any) -> None:
        if self._open:
            self._send(self._backend.InferenceResponse(error=self._backend.TritonError(message, code)), final=True)

    def end(self) -> None:
        """The final flag alone, unless it has been sent."""
        if self._open:
            self._open = False
            self._sender.send(flags=self._backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _send(self, response: Any, *, final: bool) -> None:
        self._open = not final
        self._sender.send(response, flags=self._backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)


class Hosted:
    """One model inside Triton's Python backend. Requests run side by side in an event loop of their own thread."""

    run: Run  # what answers an inference; each kind of model sets its own

    def __init__(self, backend: Any, args: dict[str, str]) -> None:
        self.backend = backend
        folder = Path(args["model_repository"])
        self.deployment = load(folder.parent, {})
        assert isinstance(self.deployment.server.options, TritonOptions)
        self.options = self.deployment.server.options
        self.model = next(model for model in self.options.models if model.name == args["model_name"])
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="stoker", daemon=True)
        self._thread.start()

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def execute(self, requests: list[Any]) -> None:
        """Start the requests; each answers through its own sender, so none waits for another."""
        for request in requests:
            sender = Sender(self.backend, request.get_response_sender())
            asyncio.run_coroutine_threadsafe(self._answer(request, sender), self.loop)

    async def _answer(self, request: Any, sender: Sender) -> None:
        answering = asyncio.create_task(self._respond(request, sender))
        while not answering.done():
            await asyncio.wait({answering}, timeout=CANCEL_POLL_S)
            if sender.cancelled():
                answering.cancel()
        if answering.cancelled():
            sender.fail("cancelled by the client", self.backend.TritonError.CANCELLED)
        elif (error := answering.exception()) is not None:
            sender.fail(client_message(error), self.backend.TritonError.INTERNAL)

    async def _respond(self, request: Any, sender: Sender) -> None:
        async with aclosing(self.run(self.inference(request))) as batches:
            async for batch in batches:
                for response in batch:
                    sender.send(response)
        sender.end()

    def inference(self, request: Any) -> Inference:
        """Triton has checked names, types and shapes against config.pbtxt, and picks the outputs that were asked for itself."""
        declared = {tensor.name: tensor.role or tensor.name for tensor in self.model.inputs}
        inputs = {declared[tensor.name()]: tensor.as_numpy() for tensor in request.inputs()}
        return Inference(
            model=self.model, request_id=request.request_id(), inputs=inputs, parameters=json.loads(request.parameters() or "{}"),
            single=not self.model.decoupled,
        )  # fmt: skip

    def finalize(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()


class TokenizerModel(Hosted):
    """preprocessing or postprocessing."""

    def __init__(self, backend: Any, args: dict[str, str]) -> None:
        super().__init__(backend, args)
        kind = Preprocessing if self.model.kind == "preprocessing" else Postprocessing
        service = self.wait(tokenizer_service(self.deployment))
        self.run = kind(lambda: service, self.deployment.server).run


class EngineModel(Hosted):
    """tensorrt_llm: starts the executor of gpt_model_path and stops it with the model."""

    def __init__(self, backend: Any, args: dict[str, str]) -> None:
        super().__init__(backend, args)
        self._run_dir = tempfile.TemporaryDirectory(prefix="stoker-")
        self._service = self.wait(self._start())
        self.run = TensorrtLLM(lambda: self._service, self.options, self.deployment.server, InFlight()).run

    async def _start(self) -> GenerationService:
        engine, address = engine_of(self.deployment), f"ipc://{self._run_dir.name}/executor"
        task = ExecutorTask(engine, self.deployment.runtime, address)
        python = env.text("STOKER_PYTHON") or sys.executable
        self._executor = await Child.start("executor", "stoker.server.processes.executor", task, python=python)
        client = await ZmqExecutorClient.connect(address, connect_timeout_s=LOAD_TIMEOUT_S)
        return GenerationService(self.model.name, Tokenizer.load(tokenizer_of(self.deployment)), client)

    def finalize(self) -> None:
        self.wait(self._service.close())
        self.wait(self._executor.stop(10.0))
        super().finalize()
        self._run_dir.cleanup()


def engine_of(deployment: Deployment) -> str:
    """The engine directory. Raises ConfigError for a source that is not local: Triton's models don't download."""
    source = deployment.source
    if not isinstance(source, EngineSource) or not Path(source.location).is_dir():
        raise ConfigError(f"{deployment.path}: gpt_model_path is no local engine directory.", cure="Name one, or use stoker serve.")
    return source.location


def tokenizer_of(deployment: Deployment) -> str:
    return deployment.tokenizer if deployment.tokenizer and Path(deployment.tokenizer).is_dir() else engine_of(deployment)


class _Vocabulary(msgspec.Struct):
    vocab_size: int


class _Facts(msgspec.Struct):
    """The part of an engine's config.json that needs no torch to read."""

    limits: Limits
    model: _Vocabulary


async def tokenizer_service(deployment: Deployment) -> GenerationService:
    """A service whose encode and decode work, and that runs nothing."""
    facts = msgspec.json.decode((Path(engine_of(deployment)) / "config.json").read_bytes(), type=_Facts)
    info = ExecutorInfo(
        limits=facts.limits, max_seq_len=facts.limits.max_seq_len, vocab_size=facts.model.vocab_size, device="none", kv_cache_tokens=0,
        model="tokenizer",
    )  # fmt: skip
    return GenerationService("tokenizer", Tokenizer.load(tokenizer_of(deployment)), InProcessClient(InProcessMailbox(info)))
