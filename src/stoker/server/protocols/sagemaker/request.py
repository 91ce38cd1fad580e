"""The body of an /invocations request: its schema, its checks, and its conversion to GenerationRequests."""

from __future__ import annotations

import json
import uuid
from typing import Any

import msgspec

from stoker.base.errors import RequestError
from stoker.base.fields.errors import InvalidValueError
from stoker.base.fields.values import Flag
from stoker.base.types import GenerationRequest, SamplingParams
from stoker.frontend.bad_words import bad_word_ids
from stoker.frontend.prompts import encode_prompt
from stoker.frontend.service import Service
from stoker.server.errors import BodyError
from stoker.server.http.json_body import INLINE_BYTES, decode_json
from stoker.server.protocols.common.guides import read_guide
from stoker.server.protocols.sagemaker import parameters
from stoker.server.protocols.sagemaker.errors import PayloadError, shown
from stoker.server.protocols.sagemaker.options import LMIOptions
from stoker.server.settings import ServerSettings

MAX_NEW_TOKENS = 30  # LMI's default
STREAMS = ("jsonlines", "sse", "3p_stream")
_DIRECT = parameters.TABLE.targets()  # parameter → SamplingParams field
_SAMPLED = {"temperature": 0.8, "top_k": 5, "top_p": 0.85}  # defaults with do_sample=true
_BODY = ("inputs", "parameters", "stream", "model", "adapters", "output_formatter")


class InvocationCall(msgspec.Struct, kw_only=True):
    """A checked request. `requests` has one GenerationRequest per input; there are several inputs only with dynamic batching."""

    inputs: list[str]
    requests: list[GenerationRequest]
    formatter: str
    details: bool
    prompt_details: bool  # details.prefill lists the tokens of the prompt
    num_top_tokens: int
    full_text: bool  # generated_text starts with the prompt
    num_choices: int  # in the response; best_of may generate more
    multiple: bool  # n or best_of is above 1
    seed: int | None

    @property
    def stream(self) -> bool:
        """Whether the response is streamed."""
        return self.formatter in STREAMS


def read_object(data: bytes, options: LMIOptions) -> dict[str, Any]:
    """The body as a JSON object. Raises PayloadError with the DJL server's text."""
    prefix = error_prefix(options)
    try:
        body = decode_json(data)
    except BodyError as error:
        message = _python_message(data) if len(data) <= INLINE_BYTES else ""
        raise PayloadError(f"{prefix}{message or error.message}") from None
    if not isinstance(body, dict) or not any(name in body for name in _schemas(options)):
        if options.dialect == "async":
            raise PayloadError(f"{prefix}invalid payload. must contain prompt, inputs, or messages")
        text = "Invalid request payload. Request payload should be a json object specifying the 'inputs' field."
        raise PayloadError(f"{prefix}{text} Received payload {shown(body)}")
    return body


def error_prefix(options: LMIOptions) -> str:
    """The beginning of error messages in the dialect."""
    if options.dialect == "async":
        return "Input parsing failed: "
    return "Input Parsing failed. Ensure that the request payload is valid. "


def _schemas(options: LMIOptions) -> tuple[str, ...]:
    """The members that decide which schema a body has."""
    return ("inputs", "messages", "prompt") if options.dialect == "async" else ("inputs", "messages")


def _python_message(data: bytes) -> str:
    """The message of Python's json module for a body that is not standard JSON; empty if it accepts the body (NaN)."""
    try:
        json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        return str(error)
    return ""


async def read_invocation_call(body: dict[str, Any], service: Service, settings: ServerSettings, options: LMIOptions) -> InvocationCall:
    """Check a body of the schema {"inputs", "parameters"}. Raises PayloadError for its structure and RequestError for a value."""
    inputs = _inputs(body, options)
    nested = body.get("parameters")
    if nested is not None and not isinstance(nested, dict):
        text = "Invalid request payload. 'parameters' must be provided as an object of key-value pairs."
        raise PayloadError(f"{error_prefix(options)}{text} Received payload {shown(body)}")
    for name, value in body.items():
        if name not in _BODY:
            raise RequestError(name[:80], value, f"besides inputs, a body contains only {', '.join(_BODY[1:])}", cure="Leave it out.")
    if body.get("adapters"):
        raise RequestError("adapters", body["adapters"], "there are no adapters", cure="Leave it out.")
    outer = {name: body[name] for name in ("output_formatter",) if name in body}
    values = parameters.TABLE.check({**outer, **(nested or {})}, prefix="parameters.")
    stream = _stream(body)
    call = _call_without_requests(inputs, values, stream, options)
    params = sampling(values, service, settings, tokens=call.stream or call.details or call.multiple)
    if call.stream and (call.multiple or params.beam_width > 1):
        name = next(name for name in ("num_beams", "best_of", "n") if values.get(name, 1) > 1)
        raise RequestError(f"parameters.{name}", values[name], "only one answer can be streamed", cure="Set stream=false.")
    call.requests = [await _request(text, params, values, service, settings) for text in inputs]
    return call


def _stream(body: dict[str, Any]) -> bool:
    """The member `stream`, by default false. Raises RequestError if it is not a boolean."""
    if body.get("stream") is None:
        return False
    try:
        return Flag().check(body["stream"])
    except InvalidValueError as error:
        raise error.request_error("stream") from None


def _inputs(body: dict[str, Any], options: LMIOptions) -> list[str]:
    """The inputs of a body. Raises PayloadError."""
    inputs = body["inputs"]
    prefix = f"{error_prefix(options)}Invalid request payload."
    if isinstance(inputs, list) and (not options.rolling_batch or (options.dialect == "async" and len(inputs) == 1)):
        max_inputs = 1 if options.rolling_batch else options.batch_size
        if not 0 < len(inputs) <= max_inputs or not all(isinstance(text, str) and text for text in inputs):
            raise PayloadError(f"{prefix} The 'inputs' field must be a list of 1 to {max_inputs} strings that are not empty.")
        return inputs
    if not isinstance(inputs, str):
        raise PayloadError(f"{prefix} The 'inputs' field must be a string. Received type {type(inputs)}")
    if not inputs:
        raise PayloadError(f"{prefix} The 'inputs' field does not contain any content. Received payload {shown(body)}")
    return [inputs]


def _call_without_requests(inputs: list[str], values: dict[str, Any], stream: bool, options: LMIOptions) -> InvocationCall:
    """The call with everything except its GenerationRequests. Raises RequestError."""
    formatter = values.get("output_formatter") or (options.output_formatter or "").removesuffix("_chat")
    if not formatter:
        formatter = ("sse" if options.tgi_compat else "jsonlines") if stream else "json"
    count = values.get("n", 1)
    best_of = values.get("best_of", count)
    if best_of < count:
        raise RequestError("parameters.best_of", best_of, f"it must be at least n={count}")
    details = values.get("details", options.tgi_compat)
    return InvocationCall(
        inputs=inputs,
        requests=[],
        formatter=formatter,
        details=details,
        prompt_details=details and values.get("decoder_input_details", False),
        num_top_tokens=values.get("top_n_tokens", 0) if details else 0,
        full_text=values.get("return_full_text", False) and options.dialect != "0.26",
        num_choices=count,
        multiple=max(count, best_of) > 1,
        seed=values.get("seed"),
    )


async def _request(
    text: str, params: SamplingParams, values: dict[str, Any], service: Service, settings: ServerSettings
) -> GenerationRequest:
    """The request for one input, tokenized. `values` are the checked parameters. Raises RequestError."""
    special = values.get("add_special_tokens", settings.add_special_tokens)
    ids = await encode_prompt(service, text, add_special_tokens=special, truncate_prompt_tokens=values.get("truncate"))
    return GenerationRequest(
        request_id=uuid.uuid4().hex,
        prompt=ids,
        params=params,
        timeout_s=values.get("request_timeout", settings.request_timeout_s),
    )


def sampling(values: dict[str, Any], service: Service, settings: ServerSettings, *, tokens: bool) -> SamplingParams:
    """SamplingParams of checked parameters. With `tokens`, the response contains the log-probabilities of tokens."""
    params: dict[str, Any] = {"max_tokens": settings.default_max_tokens or MAX_NEW_TOKENS, "min_tokens": 0}
    params["skip_special_tokens"] = settings.skip_special_tokens
    params |= {param: values[name] for name, param in _DIRECT.items() if name in values}
    params |= _token_choice(values)
    params["n"] = max(values.get("n", 1), values.get("best_of", 1))
    params["stop"] = tuple(dict.fromkeys((*values.get("stop", ()), *values.get("stop_sequences", ()))))
    params["bad_words"] = bad_word_ids("parameters.bad_sequences", values.get("bad_sequences", ()), service)
    params["guide"] = read_guide(values)
    if tokens:
        params["logprobs"] = values.get("top_n_tokens", 0) if values.get("details", True) else 0
    if values.get("decoder_input_details") and values.get("details", True):
        params["prompt_logprobs"] = 0
    return SamplingParams(**params)


def _token_choice(values: dict[str, Any]) -> dict[str, Any]:
    """temperature, top_k and top_p. Decoding is greedy without do_sample or one of the three, and for beam search."""
    enabled = values.get("do_sample", any(name in values for name in _SAMPLED))
    if not enabled or values.get("num_beams", 1) > 1:
        return {"temperature": 0.0}
    unset = _SAMPLED if values.get("do_sample") else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    chosen = {name: values.get(name, default) for name, default in unset.items()}
    return {"temperature": chosen["temperature"], "top_k": max(0, chosen["top_k"]), "top_p": chosen["top_p"] or 1.0}
