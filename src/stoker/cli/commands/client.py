"""`stoker client`: a request to a Triton server, with the options of inflight_batcher_llm_client.py and end_to_end_grpc_client.py."""

from __future__ import annotations

import queue
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from stoker.base.errors import ConfigError, StokerError
from stoker.cli.clients.answers import Answers

DEFAULT_PROMPT = "Born in north-east France, Soyer trained as a"  # the reference client's
GRPC_PORT, HTTP_PORT = 8001, 8000
STREAM_TIMEOUT_S = 3600


def client(
    text: Annotated[str | None, typer.Argument(help="The prompt. Default: the reference client's.")] = None,
    url: Annotated[str | None, typer.Option("--url", "-u", help="host:port. Default: localhost:8001, or localhost:8000 for HTTP.")] = None,
    protocol: Annotated[str, typer.Option("--protocol", "-i", help="grpc or http.")] = "grpc",
    model_name: Annotated[str, typer.Option(help="ensemble or tensorrt_llm_bls for text, tensorrt_llm for token ids.")] = "ensemble",
    output_len: Annotated[int, typer.Option("--output-len", "--request-output-len", "-o", help="Maximum number of new tokens.")] = 100,
    streaming: Annotated[bool, typer.Option("--streaming", "-S", help="Print the answer as it is generated.")] = False,
    overwrite_output_text: Annotated[
        bool, typer.Option(help="Each response contains all text so far (accumulate_tokens); print only what is new.")
    ] = False,
    beam_width: Annotated[int, typer.Option("--beam-width", "-b", help="Number of beams. Above 1, the answer does not stream.")] = 1,
    num_return_sequences: Annotated[int, typer.Option(help="Number of answers.")] = 1,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; requires --top-k or --top-p.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely tokens. Default: greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the most likely tokens with this probability; 0 is unset.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1, tokens already in the text become less likely.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Subtracted once from the logits of each generated token.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="Subtracted from a token's logit each time it was generated.")] = None,
    random_seed: Annotated[int | None, typer.Option(help="The same seed gives the same tokens.")] = None,
    end_id: Annotated[int | None, typer.Option(help="Token id that ends the answer; -1 for none.")] = None,
    pad_id: Annotated[int | None, typer.Option(help="Token id that pads shorter beams.")] = None,
    stop_words: Annotated[list[str], typer.Option(help="A word that ends the answer. Repeatable.")] = [],  # noqa: B006
    bad_words: Annotated[list[str], typer.Option(help="A word that is never generated. Repeatable.")] = [],  # noqa: B006
    embedding_bias_words: Annotated[list[str], typer.Option(help="A word whose logits are changed. Repeatable.")] = [],  # noqa: B006
    embedding_bias_weights: Annotated[
        list[float], typer.Option(help="What is added to the logits, one for each of --embedding-bias-words.")
    ] = [],  # noqa: B006
    exclude_input_in_output: Annotated[bool, typer.Option(help="Leave the prompt out of an answer that does not stream.")] = False,
    return_log_probs: Annotated[bool, typer.Option(help="Request log probabilities.")] = False,
    request_id: Annotated[str, typer.Option(help="Request id; the server returns it.")] = "",
    stop_after_ms: Annotated[int, typer.Option(help="Stop the request after this time in milliseconds; 0 for never.")] = 0,
    stop_via_request_cancel: Annotated[bool, typer.Option(help="Stop by cancelling the stream, not by the model's stop input.")] = False,
    input_tokens_csv: Annotated[Path | None, typer.Option(help="A file of token ids, for the model tensorrt_llm.")] = None,
    expected_outputs: Annotated[str | None, typer.Option(help="Fail unless the answer is this text.")] = None,
) -> None:
    """Send one request to a Triton server (Stoker or a real one) and print the answer.

    Examples:

      stoker client "Once upon a time" -S

      stoker client --protocol http --url localhost:8000 --output-len 20 "Once upon a time"

      stoker client --model-name tensorrt_llm --input-tokens-csv ids.csv -o 8
    """
    takes_token_ids = model_name == "tensorrt_llm"
    if takes_token_ids and input_tokens_csv is None:
        raise ConfigError("tensorrt_llm takes token ids.", cure="Name a file of them with --input-tokens-csv.")
    if protocol not in ("grpc", "http"):
        raise ConfigError(f"--protocol {protocol} is refused.", cure="Use grpc or http.")
    if protocol == "http" and (streaming or stop_after_ms):
        raise ConfigError("over http this client does not stream.", cure="Use --protocol grpc to stream and to stop.")
    if stop_after_ms and not request_id:
        request_id = "1"
    values: dict[str, Any] = {
        "max_tokens": output_len, "stream": streaming or None, "beam_width": beam_width if beam_width > 1 else None,
        "num_return_sequences": num_return_sequences if num_return_sequences > 1 else None, "temperature": temperature, "top_k": top_k,
        "top_p": top_p, "repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty, "random_seed": random_seed, "end_id": end_id, "pad_id": pad_id,
        "stop_words": stop_words or None, "bad_words": bad_words or None, "embedding_bias_words": embedding_bias_words or None,
        "embedding_bias_weights": embedding_bias_weights or None, "exclude_input_in_output": exclude_input_in_output or None,
        "return_log_probs": return_log_probs or None,
    }  # fmt: skip
    values |= _read_token_ids(input_tokens_csv) if input_tokens_csv is not None else {"text_input": text or DEFAULT_PROMPT}
    inputs = {_TOKEN_INPUTS.get(name, name) if takes_token_ids else name: value for name, value in values.items() if value is not None}
    connection = _Connection(protocol, url or f"localhost:{GRPC_PORT if protocol == 'grpc' else HTTP_PORT}")
    answer = connection.request(
        model_name, inputs, request_id, stop_after_ms=stop_after_ms, by_cancel=stop_via_request_cancel, accumulated=overwrite_output_text
    )
    if expected_outputs is not None and answer != expected_outputs:
        raise StokerError(f"the answer is {answer!r}, not {expected_outputs!r}.")


# Input of the ensemble: input of tensorrt_llm, where the names differ.
_TOKEN_INPUTS = {
    "max_tokens": "request_output_len", "stream": "streaming", "top_k": "runtime_top_k", "top_p": "runtime_top_p",
}  # fmt: skip
# Inputs that tensorrt_llm requires also of a stop request.
_REQUIRED_INPUTS = ("input_ids", "input_lengths", "request_output_len")


def _read_token_ids(file: Path) -> dict[str, Any]:
    """The inputs input_ids and input_lengths from a file of token ids, separated by commas or line breaks. Raises ConfigError."""
    try:
        ids = [int(item) for item in file.read_text().replace("\n", ",").split(",") if item.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}.", cure="Write token ids with commas between them.") from None
    return {"input_ids": ids, "input_lengths": len(ids)}


class _Connection:
    """A connection by tritonclient, which prints the server's answers. It sends the API key in STOKER_API_KEY."""

    def __init__(self, protocol: str, url: str) -> None:
        from stoker.cli.clients.triton import import_tritonclient, input_tensors, key_headers

        self._input_tensors = input_tensors
        self._tritonclient = import_tritonclient(protocol)
        self._client = self._tritonclient.InferenceServerClient(url)
        self._streams = protocol == "grpc"
        self._protocol, self._url = protocol, url
        self._headers = key_headers()

    def request(
        self, model: str, values: dict[str, Any], request_id: str, *, stop_after_ms: int, by_cancel: bool, accumulated: bool
    ) -> str:  # fmt: skip
        """Send the request, print the answers, and return the text of the first one.

        `accumulated`: each response contains the text of the responses before it. Raises UnavailableError when no server answers,
        ConfigError when the model cannot be stopped, and StokerError with the server's message.
        """
        from tritonclient.utils import InferenceServerException

        from stoker.cli.clients.triton import check_server, no_server

        inputs = self._input_tensors(self._tritonclient, values)
        # A response that does not stream contains the whole text.
        accumulated = accumulated or not values.get("stream", values.get("streaming"))
        answers = Answers(max(values.get("beam_width", 1), values.get("num_return_sequences", 1)), accumulated=accumulated)
        try:
            check_server(self._client, self._url, self._protocol)
            if stop_after_ms and not by_cancel:
                self._check_stop_input(model)
            if self._streams:
                self._stream(model, inputs, values, request_id, stop_after_ms, by_cancel, answers)
            else:
                answers.add(self._client.infer(model, inputs, request_id=request_id, headers=self._headers))
                typer.echo()
                answers.finish()
        except InferenceServerException as error:
            if not (stop_after_ms and "CANCELLED" in str(error).upper()):
                raise StokerError(f"the server answered: {error.message()}") from None
        except OSError as error:
            raise no_server(self._url, self._protocol, error.strerror or str(error)) from None
        finally:
            self._client.close()
        return answers.text

    def _check_stop_input(self, model: str) -> None:
        """Raise ConfigError if the model has no input that stops a request."""
        metadata = self._client.get_model_metadata(model, headers=self._headers)
        if "stop" not in {tensor.name for tensor in metadata.inputs}:
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
            inputs = self._input_tensors(self._tritonclient, required | {"stop": True})
            self._client.async_stream_infer(model, inputs, request_id=request_id)
