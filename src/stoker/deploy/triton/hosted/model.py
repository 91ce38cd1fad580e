"""The base class of models inside Triton's Python backend."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from stoker.base.errors import ConfigError
from stoker.deploy.deployment import Deployment, EngineSource
from stoker.deploy.triton.load import load_repository
from stoker.server.protocols.kserve.errors import client_message
from stoker.server.protocols.kserve.inference import Inference, Response, Run
from stoker.server.protocols.kserve.model_config import TritonOptions

CANCEL_POLL_S = 0.05

T = TypeVar("T")


class ResponseSender:
    """Sends the responses to one request. It never calls Triton after the final flag was sent, which would crash Triton."""

    def __init__(self, backend: Any, sender: Any) -> None:
        self._backend = backend
        self._sender = sender
        self._open = True

    def cancelled(self) -> bool:
        """Whether the client has cancelled the request."""
        return self._open and bool(self._sender.is_cancelled())

    def send(self, response: Response) -> None:
        """Send one response, with the final flag if it is the last one."""
        tensors = [self._backend.Tensor(name, np.ascontiguousarray(array)) for name, array in response.outputs.items()]
        self._send(self._backend.InferenceResponse(output_tensors=tensors), final=response.final)

    def fail(self, message: str, code: Any) -> None:
        """Send an error as the last response, unless the final flag was sent."""
        if self._open:
            self._send(self._backend.InferenceResponse(error=self._backend.TritonError(message, code)), final=True)

    def end(self) -> None:
        """Send the final flag, unless it was sent before."""
        if self._open:
            self._open = False
            self._sender.send(flags=self._backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _send(self, response: Any, *, final: bool) -> None:
        """Send a response. `final`: it is the last one."""
        self._open = not final
        self._sender.send(response, flags=self._backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)


class HostedModel:
    """One model. Its requests run concurrently in an event loop, which has its own thread."""

    run: Run  # runs one inference; set by each kind of model

    def __init__(self, backend: Any, args: dict[str, str]) -> None:
        self.backend = backend
        folder = Path(args["model_repository"])
        self.deployment = load_repository(folder.parent, {})
        self.deployment.nodes.check_one_host()
        assert isinstance(self.deployment.server.options, TritonOptions)
        self.options = self.deployment.server.options
        self.model = next(model for model in self.options.models if model.name == args["model_name"])
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="stoker", daemon=True)
        self._thread.start()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def execute(self, requests: list[Any]) -> None:
        """Start the requests. Each one responds through its own sender and does not wait for others."""
        for request in requests:
            sender = ResponseSender(self.backend, request.get_response_sender())
            asyncio.run_coroutine_threadsafe(self._run_request(request, sender), self.loop)

    def finalize(self) -> None:
        """Cancel the requests that are running, and end the event loop."""
        self.wait(self._cancel_requests())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    async def _cancel_requests(self) -> None:
        """Cancel all requests and wait until they have ended."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_request(self, request: Any, sender: ResponseSender) -> None:
        """Run one request and send its responses, until it ends or its client cancels it. Errors are sent as the last response."""
        task = asyncio.create_task(self._respond(request, sender))
        while not task.done():
            await asyncio.wait({task}, timeout=CANCEL_POLL_S)
            if sender.cancelled():
                task.cancel()
        if task.cancelled():
            sender.fail("cancelled by the client", self.backend.TritonError.CANCELLED)
        elif (error := task.exception()) is not None:
            sender.fail(client_message(error), self.backend.TritonError.INTERNAL)

    async def _respond(self, request: Any, sender: ResponseSender) -> None:
        """Send the responses of one request."""
        async with aclosing(self.run(self._inference(request))) as batches:
            async for batch in batches:
                for response in batch:
                    sender.send(response)
        sender.end()

    def _inference(self, request: Any) -> Inference:
        """The request as the KServe protocol represents it. Triton has checked it against config.pbtxt, and selects the outputs itself."""
        declared = {tensor.name: tensor.role or tensor.name for tensor in self.model.inputs}
        return Inference(
            model=self.model,
            request_id=request.request_id(),
            inputs={declared[tensor.name()]: tensor.as_numpy() for tensor in request.inputs()},
            parameters=json.loads(request.parameters() or "{}"),
            single=not self.model.decoupled,
        )


def engine_directory(deployment: Deployment) -> str:
    """The local directory of the engine. Raises ConfigError for other locations, because a model inside Triton does not download."""
    source = deployment.source
    if not isinstance(source, EngineSource) or not Path(source.location).is_dir():
        raise ConfigError(f"{deployment.path}: gpt_model_path is not a local engine directory.", cure="Name one, or use stoker serve.")
    return source.location


def tokenizer_directory(deployment: Deployment) -> str:
    """The local directory of the tokenizer files, by default that of the engine."""
    return deployment.tokenizer if deployment.tokenizer and Path(deployment.tokenizer).is_dir() else engine_directory(deployment)
