"""A connection to a Triton server that sends one request and prints its answers."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from http.client import HTTPException
from typing import Any

import typer

from stoker.base.errors import ConfigError, StokerError
from stoker.cli.clients.answers import Answers
from stoker.cli.clients.triton import (
    check_address,
    check_server,
    declared_inputs,
    import_tritonclient,
    input_tensors,
    key_headers,
    no_server,
)

STREAM_TIMEOUT_S = 3600
# Inputs that tensorrt_llm requires also of a stop request.
_REQUIRED_INPUTS = ("input_ids", "input_lengths", "request_output_len")


class TritonConnection:
    """A connection by tritonclient, which prints the server's answers. It sends the API key in STOKER_API_KEY."""

    def __init__(self, protocol: str, url: str, *, connections: int = 1, verbose: bool = False) -> None:
        check_address(url)
        self._tritonclient = import_tritonclient(protocol)
        options: dict[str, Any] = {"concurrency": connections} if protocol == "http" else {}
        self._client = self._tritonclient.InferenceServerClient(url, verbose=verbose, **options)
        self._streams = protocol == "grpc"
        self._protocol, self._url = protocol, url
        self._headers = key_headers()
        self._dtypes: dict[str, str] = {}  # of the inputs of the model

    def request(
        self, model: str, values: dict[str, Any], request_id: str, *, stop_after_ms: int, by_cancel: bool, accumulated: bool,
        decode: Callable[[list[int]], str] | None = None,
    ) -> str:  # fmt: skip
        """Send the request, print the answers, and return the text of the first one.

        `accumulated`: each response contains the text of the responses before it. `decode`: the text of token ids, which are otherwise
        printed as numbers. Raises UnavailableError when no server answers,
        ConfigError when the model cannot be stopped, and StokerError with the server's message.
        """
        from tritonclient.utils import InferenceServerException

        # A response that does not stream contains the whole text.
        accumulated = accumulated or not values.get("stream", values.get("streaming"))
        num_sequences = values.get("num_return_sequences") or values.get("beam_width", 1)
        answers = Answers(num_sequences, accumulated=accumulated, decode=decode, prompt_ids=values.get("input_ids", []))
        try:
            check_server(self._client, self._url, self._protocol)
            self._dtypes = declared_inputs(self._client, model, self._headers)
            if stop_after_ms and not by_cancel:
                self._check_stop_input(model)
            inputs = self._inputs(values)
            if self._streams:
                self._stream(model, inputs, values, request_id, stop_after_ms, by_cancel, answers)
            else:
                answers.add(self._client.infer(model, inputs, request_id=request_id, headers=self._headers))
                typer.echo()
                answers.finish()
        except InferenceServerException as error:
            if not (stop_after_ms and "CANCELLED" in str(error).upper()):
                raise StokerError(f"the server answered: {error.message()}") from None
        except (OSError, HTTPException) as error:
            raise no_server(self._url, self._protocol, error) from None
        finally:
            self._client.close()
        return answers.text

    def _check_stop_input(self, model: str) -> None:
        """Raise ConfigError if the model has no input that stops a request."""
        if "stop" not in self._dtypes:
            raise ConfigError(
                f"--stop-after-ms is refused: the model {model} has no input named stop.",
                cure="Add --stop-via-request-cancel, or use a model with that input.",
            )

    def _stream(
        self, model: str, inputs: Any, values: dict[str, Any], request_id: str, stop_after_ms: int, by_cancel: bool, answers: Answers
    ) -> None:
        """Send a request on a gRPC stream, collect its responses, and stop it after `stop_after_ms` milliseconds (0: never)."""
        from tritonclient.utils import InferenceServerException

        responses: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client.start_stream(lambda result, error: responses.put((result, error)), headers=self._headers)
        started = time.perf_counter()
        try:
            self._client.async_stream_infer(model, inputs, request_id=request_id, enable_empty_final_response=True)
        except InferenceServerException:  # the stream was refused before the request was sent
            raise responses.get(timeout=STREAM_TIMEOUT_S)[1] from None
        timer = threading.Timer(stop_after_ms / 1000, self._stop, (model, values, request_id, by_cancel))
        if stop_after_ms:
            timer.start()
        try:
            while True:
                result, error = responses.get(timeout=STREAM_TIMEOUT_S)
                if error is not None:
                    raise error
                response = result.get_response()
                if response.outputs:
                    answers.add(result)
                if response.parameters["triton_final_response"].bool_param:
                    break
        finally:
            timer.cancel()
            self._client.stop_stream()
        answers.finish()
        typer.echo(f"\n[INFO] Latency: {(time.perf_counter() - started) * 1e3:.3f} ms")

    def _stop(self, model: str, values: dict[str, Any], request_id: str, by_cancel: bool) -> None:
        """Stop the request, by cancelling the stream or by the model's stop input."""
        if by_cancel:
            self._client.stop_stream(cancel_requests=True)
        else:
            required = {name: values[name] for name in _REQUIRED_INPUTS if name in values}
            inputs = self._inputs(required | {"stop": True})
            self._client.async_stream_infer(model, inputs, request_id=request_id)

    def _inputs(self, values: dict[str, Any]) -> list[Any]:
        return input_tensors(self._tritonclient, values, self._dtypes)
