"""`stoker client`: a request to a Triton server, with the options of the clients of tensorrtllm_backend.

These are inflight_batcher_llm_client.py, end_to_end_grpc_client.py and tools/gpt/client.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from stoker.base.config import check_range
from stoker.base.errors import ConfigError, StokerError, reason_of

DEFAULT_PROMPT = "Born in north-east France, Soyer trained as a"  # the reference client's
GRPC_PORT, HTTP_PORT = 8001, 8000
MAX_CONNECTIONS = 1024
TOKENIZER_TYPES = ("auto", "t5", "llama")

# Inputs of the ensemble: names in tensorrt_llm, where they differ.
_TOKEN_INPUTS = {
    "max_tokens": "request_output_len", "stream": "streaming", "top_k": "runtime_top_k", "top_p": "runtime_top_p",
}  # fmt: skip


def client(
    prompt: Annotated[str | None, typer.Argument(help="The prompt. Default: the reference client's.", metavar="TEXT")] = None,
    text: Annotated[str | None, typer.Option("--text", "-t", help="The prompt, instead of the argument.")] = None,
    url: Annotated[str | None, typer.Option("--url", "-u", help="host:port. Default: localhost:8001, or localhost:8000 for HTTP.")] = None,
    protocol: Annotated[str, typer.Option("--protocol", "-i", help="grpc or http.")] = "grpc",
    model_name: Annotated[
        str | None,
        typer.Option(
            help="ensemble or tensorrt_llm_bls for text, tensorrt_llm for token ids. With --tokenizer-dir, the default is tensorrt_llm."
        ),
    ] = None,
    tokenizer_dir: Annotated[
        Path | None,
        typer.Option("--tokenizer-dir", "--tokenizer_dir", help="Tokenize here, and send token ids. A folder with tokenizer.json."),
    ] = None,
    tokenizer_type: Annotated[
        str, typer.Option("--tokenizer-type", "--tokenizer_type", help="auto, t5 or llama; the type is read from the files.")
    ] = "auto",
    concurrency: Annotated[int, typer.Option("--concurrency", "-c", help="Connections of the HTTP client. A request uses one.")] = 1,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print the messages of the client library.")] = False,
    output_len: Annotated[
        int, typer.Option("--output-len", "--output_len", "--request-output-len", "-o", help="Maximum number of new tokens.")
    ] = 100,
    streaming: Annotated[bool, typer.Option("--streaming", "-S", help="Print the answer as it is generated.")] = False,
    overwrite_output_text: Annotated[
        bool, typer.Option(help="Each response contains all text so far (accumulate_tokens); print only what is new.")
    ] = False,
    beam_width: Annotated[
        int, typer.Option("--beam-width", "--beam_width", "-beam", "-b", help="Number of beams. Above 1, the answer does not stream.")
    ] = 1,
    num_return_sequences: Annotated[int, typer.Option(help="Number of answers.")] = 1,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; requires --top-k or --top-p.")] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", "--topk", "-topk", help="Sample from the k most likely tokens. Default: greedy.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", "--topp", "-topp", help="Sample from the most likely tokens with this probability; 0 is unset."),
    ] = None,
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

    Options have the names that the clients of tensorrtllm_backend use.

    Examples:

      stoker client "Once upon a time" -S

      stoker client --protocol http --url localhost:8000 --output-len 20 "Once upon a time"

      stoker client --model-name tensorrt_llm --input-tokens-csv ids.csv -o 8

      stoker client --tokenizer_dir gpt2 --text "Once upon a time" --output_len 10
    """
    from stoker.cli.clients.connection import TritonConnection

    model = model_name or ("tensorrt_llm" if tokenizer_dir else "ensemble")
    prompt = _prompt(prompt, text)
    takes_token_ids = model == "tensorrt_llm"
    _check_prompt_source(model, tokenizer_dir, input_tokens_csv)
    if tokenizer_type not in TOKENIZER_TYPES:
        raise ConfigError(f"--tokenizer-type {tokenizer_type} is refused.", cure=f"Use {', '.join(TOKENIZER_TYPES)}.")
    check_range("concurrency", concurrency, 1, MAX_CONNECTIONS)
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
    tokenizer = _tokenizer(tokenizer_dir)
    if tokenizer is not None:
        values |= tokenizer.inputs(prompt, values)
    else:
        values |= {"text_input": prompt} if input_tokens_csv is None else _read_token_ids(input_tokens_csv)
    inputs = {_TOKEN_INPUTS.get(name, name) if takes_token_ids else name: value for name, value in values.items() if value is not None}
    address = f"localhost:{GRPC_PORT if protocol == 'grpc' else HTTP_PORT}" if url is None else url
    connection = TritonConnection(protocol, address, connections=concurrency, verbose=verbose)
    answer = connection.request(
        model, inputs, request_id, stop_after_ms=stop_after_ms, by_cancel=stop_via_request_cancel, accumulated=overwrite_output_text,
        decode=None if tokenizer is None else tokenizer.decode,
    )  # fmt: skip
    if expected_outputs is not None and answer != expected_outputs:
        raise StokerError(f"the answer is {answer!r}, not {expected_outputs!r}.")


def _prompt(argument: str | None, option: str | None) -> str:
    """The prompt of the argument or of the option. Raises ConfigError if both are given."""
    if argument is not None and option is not None:
        raise ConfigError("the prompt is given twice.", cure="Use the argument or --text.")
    return argument or option or DEFAULT_PROMPT


def _check_prompt_source(model: str, tokenizer_dir: Path | None, csv: Path | None) -> None:
    """Raise ConfigError unless the model and the source of the prompt fit together."""
    if tokenizer_dir is not None and csv is not None:
        raise ConfigError("--tokenizer-dir and --input-tokens-csv are both given.", cure="Use one of them.")
    if model == "tensorrt_llm" and tokenizer_dir is None and csv is None:
        raise ConfigError("tensorrt_llm takes token ids.", cure="Name a file of them with --input-tokens-csv, or add --tokenizer-dir.")
    if model != "tensorrt_llm" and tokenizer_dir is not None:
        raise ConfigError(f"{model} takes text.", cure="Leave out --tokenizer-dir, or use --model-name tensorrt_llm.")


def _read_token_ids(file: Path) -> dict[str, Any]:
    """The inputs input_ids and input_lengths from a file of token ids, separated by commas or line breaks. Raises ConfigError."""
    try:
        ids = [int(item) for item in file.read_text().replace("\n", ",").split(",") if item.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {reason_of(error)}.", cure="Write token ids with commas between them.") from None
    return {"input_ids": ids, "input_lengths": len(ids)}


class LocalTokenizer:
    """Tokenizes the prompt and decodes the answer in this process, for the model tensorrt_llm."""

    def __init__(self, folder: Path) -> None:
        from stoker.frontend.tokenizer import Tokenizer

        self._tokenizer = Tokenizer.load(folder)

    def inputs(self, prompt: str, values: dict[str, Any]) -> dict[str, Any]:
        """input_ids and input_lengths, and the ids of the tokenizer for end_id and pad_id if `values` have none."""
        ids = self._tokenizer.encode(prompt)
        end = next(iter(self._tokenizer.end_ids), None) if values["end_id"] is None else values["end_id"]
        pad = end if values["pad_id"] is None else values["pad_id"]
        return {"input_ids": ids, "input_lengths": len(ids), "end_id": end, "pad_id": pad}

    def decode(self, ids: list[int]) -> str:
        """The text of ids, without padding and special tokens."""
        return self._tokenizer.decode([token for token in ids if token >= 0])


def _tokenizer(folder: Path | None) -> LocalTokenizer | None:
    """The tokenizer in a folder; None without one."""
    return None if folder is None else LocalTokenizer(folder)
