"""`stoker client`: ask a Triton server, as inflight_batcher_llm_client.py and end_to_end_grpc_client.py do."""

from __future__ import annotations

import queue
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from stoker.base.errors import ConfigError, StokerError, UnavailableError

TEXT = "Born in north-east France, Soyer trained as a"


def client(
    text: Annotated[str | None, typer.Argument(help="The prompt. Default: the reference client's.")] = None,
    url: Annotated[str | None, typer.Option("--url", "-u", help="host:port. Default: localhost:8001, over HTTP 8000.")] = None,
    protocol: Annotated[str, typer.Option("--protocol", "-i", help="grpc or http.")] = "grpc",
    model_name: Annotated[str, typer.Option(help="ensemble, tensorrt_llm_bls, or tensorrt_llm for token ids.")] = "ensemble",
    output_len: Annotated[int, typer.Option("--output-len", "--request-output-len", "-o", help="New tokens.")] = 100,
    streaming: Annotated[bool, typer.Option("--streaming", "-S", help="Show the answer as it comes.")] = False,
    overwrite_output_text: Annotated[bool, typer.Option(help="Responses hold all text so far (accumulate_tokens).")] = False,
    beam_width: Annotated[int, typer.Option("--beam-width", "-b", help="Beams; above 1 the answer comes whole.")] = 1,
    num_return_sequences: Annotated[int, typer.Option(help="Answers for the prompt.")] = 1,
    temperature: Annotated[float | None, typer.Option(help="Has an effect with --top-k or --top-p.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Default: greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="0 counts as unset.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1 discourages tokens that were there.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Subtracted once for each token that was generated.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="Subtracted each time a token was generated.")] = None,
    random_seed: Annotated[int | None, typer.Option(help="The same seed gives the same tokens.")] = None,
    end_id: Annotated[int | None, typer.Option(help="-1: none.")] = None,
    pad_id: Annotated[int | None, typer.Option(help="Fills up shorter beams.")] = None,
    stop_words: Annotated[list[str], typer.Option(help="May be repeated.")] = [],  # noqa: B006
    bad_words: Annotated[list[str], typer.Option(help="May be repeated.")] = [],  # noqa: B006
    embedding_bias_words: Annotated[list[str], typer.Option(help="May be repeated.")] = [],  # noqa: B006
    embedding_bias_weights: Annotated[list[float], typer.Option(help="One for each word.")] = [],  # noqa: B006
    exclude_input_in_output: Annotated[bool, typer.Option(help="A whole answer leaves the prompt out.")] = False,
    return_log_probs: Annotated[bool, typer.Option(help="Ask for log-probabilities.")] = False,
    request_id: Annotated[str, typer.Option(help="Echoed by the server.")] = "",
    stop_after_ms: Annotated[int, typer.Option(help="Stop the request so long after its start; 0: never.")] = 0,
    stop_via_request_cancel: Annotated[bool, typer.Option(help="Stop by leaving the stream instead of the stop tensor.")] = False,
    input_tokens_csv: Annotated[Path | None, typer.Option(help="Token ids instead of a text, for tensorrt_llm.")] = None,
    expected_outputs: Annotated[str | None, typer.Option(help="Fail unless the whole answer is this text.")] = None,
) -> None:
    """Ask a Triton server (Stoker or a real one) and print the answer.

    Examples:

      stoker client "Once upon a time" -S

      stoker client --protocol http --url localhost:8000 --output-len 20 "Once upon a time"

      stoker client --model-name tensorrt_llm --input-tokens-csv ids.csv -o 8
    """
    tokens = model_name == "tensorrt_llm"
    if tokens and input_tokens_csv is None:
        raise ConfigError("tensorrt_llm takes token ids.", cure="Name a file of them with --input-tokens-csv.")
    if protocol not in ("grpc", "http"):
        raise ConfigError(f"--protocol {protocol} is refused.", cure="Use grpc or http.")
    if protocol == "http" and (streaming or stop_after_ms):
        raise ConfigError("over http this client asks for whole answers.", cure="Use --protocol grpc to stream and to stop.")
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
    values |= _ids(input_tokens_csv) if input_tokens_csv is not None else {"text_input": text or TEXT}
    asked = {_TOKEN_NAMES.get(name, name) if tokens else name: value for name, value in values.items() if value is not None}
    answer = _Asking(protocol, url or f"localhost:{8001 if protocol == 'grpc' else 8000}").ask(
        model_name, asked, request_id, stop_after_ms=stop_after_ms, by_cancel=stop_via_request_cancel, overwrite=overwrite_output_text
    )
    if expected_outputs is not None and answer != expected_outputs:
        raise StokerError(f"the answer is {answer!r}, not {expected_outputs!r}.")


_TOKEN_NAMES = {
    "max_tokens": "request_output_len", "stream": "streaming", "top_k": "runtime_top_k", "top_p": "runtime_top_p",
}  # fmt: skip


def _ids(file: Path) -> dict[str, Any]:
    try:
        ids = [int(item) for item in file.read_text().replace("\n", ",").split(",") if item.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}.", cure="Write token ids with commas between them.") from None
    return {"input_ids": ids, "input_lengths": len(ids)}


class _Asking:
    def __init__(self, protocol: str, url: str) -> None:
        from stoker.cli.triton_client import module, tensors

        self._tensors = tensors
        self._module = module(protocol)
        self._client = self._module.InferenceServerClient(url)
        self._grpc = protocol == "grpc"
        self._url = url

    def ask(self, model: str, values: dict[str, Any], request_id: str, *, stop_after_ms: int, by_cancel: bool, overwrite: bool) -> str:
        """Print the answer as it comes; the whole of it is returned."""
        from tritonclient.utils import InferenceServerException

        inputs = self._tensors(self._module, values)
        try:
            if not self._grpc:
                shown = self._show(self._client.infer(model, inputs, request_id=request_id), "", overwrite=True)
                typer.echo()
                return shown
            return self._stream(model, inputs, values, request_id, stop_after_ms, by_cancel, overwrite)
        except InferenceServerException as error:
            if stop_after_ms and "CANCELLED" in str(error).upper():
                return ""
            raise StokerError(f"the server answered: {error.message()}") from None
        except OSError as error:
            raise UnavailableError(f"{self._url} does not answer: {error.strerror or error}.", cure="Start it: stoker launch.") from None
        finally:
            self._client.close()

    def _stream(
        self, model: str, inputs: Any, values: dict[str, Any], request_id: str, stop_ms: int, by_cancel: bool, overwrite: bool
    ) -> str:
        answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client.start_stream(lambda result, error: answers.put((result, error)))
        started = time.perf_counter()
        self._client.async_stream_infer(model, inputs, request_id=request_id, enable_empty_final_response=True)
        timer = threading.Timer(stop_ms / 1000, self._stop, (model, values, request_id, by_cancel))
        if stop_ms:
            timer.start()
        shown = ""
        try:
            while True:
                result, error = answers.get(timeout=3600)
                if error is not None:
                    raise error
                response = result.get_response()
                if response.outputs:
                    shown = self._show(result, shown, overwrite=overwrite or not values.get("stream", values.get("streaming")))
                if response.parameters["triton_final_response"].bool_param:
                    break
        finally:
            timer.cancel()
            self._client.stop_stream()
        typer.echo(f"\n[INFO] Latency: {(time.perf_counter() - started) * 1e3:.3f} ms")
        return shown

    def _stop(self, model: str, values: dict[str, Any], request_id: str, by_cancel: bool) -> None:
        if by_cancel:
            self._client.stop_stream(cancel_requests=True)
        else:
            kept = {name: values[name] for name in ("input_ids", "input_lengths", "request_output_len") if name in values}
            self._client.async_stream_infer(model, self._tensors(self._module, kept | {"stop": True}), request_id=request_id)

    def _show(self, result: Any, shown: str, *, overwrite: bool) -> str:
        """Print what a response adds; every beam and sequence of a whole answer on a line of its own."""
        texts = result.as_numpy("text_output")
        if texts is None:
            ids = result.as_numpy("output_ids")
            typer.echo("\n".join(",".join(map(str, row)) for row in ids.reshape(-1, ids.shape[-1]).tolist()))
            return shown
        found = [item.decode() if isinstance(item, bytes) else item for item in texts.flat]
        if len(found) > 1:
            typer.echo("\n".join(f"{at}: {item}" for at, item in enumerate(found)))
            return found[0]
        whole = found[0] if overwrite else shown + found[0]
        typer.echo(whole.removeprefix(shown), nl=False)
        return whole
