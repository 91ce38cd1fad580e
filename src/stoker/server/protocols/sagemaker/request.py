"""A body of /invocations: which schema it is, checked, and what it asks of the service."""

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
from stoker.server.http.request_context import decode_json
from stoker.server.protocols.common.guides import read_guide
from stoker.server.protocols.sagemaker import parameters
from stoker.server.protocols.sagemaker.errors import PayloadError, shown
from stoker.server.protocols.sagemaker.options import LMIOptions
from stoker.server.settings import ServerSettings

MAX_NEW_TOKENS = 30  # LMI's default
STREAMS = ("jsonlines", "sse", "3p_stream")
_DIRECT = parameters.TABLE.targets()
_SAMPLED = {"temperature": 0.8, "top_k": 5, "top_p": 0.85}  # where do_sample=true leaves them unset
_BODY = ("inputs", "parameters", "stream", "model", "adapters", "output_formatter")


class Asked(msgspec.Struct, kw_only=True):
    """A checked request; more than one of `inputs` only with a dynamic batch. `requests` are what the service is asked, one an input."""

    inputs: list[str]
    requests: list[GenerationRequest]
    formatter: str
    details: bool
    prefill: bool
    num_top: int
    full_text: bool
    num_choices: int  # in the answer; best_of may generate more
    several: bool  # n or best_of was above 1
    seed: int | None

    @property
    def stream(self) -> bool:
        return self.formatter in STREAMS


def read_object(data: bytes, options: LMIOptions) -> dict[str, Any]:
    """The body as an object. Raises PayloadError as the DJL server words it."""
    begin = opening(options)
    try:
        body = decode_json(data)
    except BodyError as error:
        raise PayloadError(f"{begin}{_python_says(data) or error.message}") from None
    if not isinstance(body, dict) or not any(name in body for name in _schemas(options)):
        if options.dialect == "async":
            raise PayloadError(f"{begin}invalid payload. must contain prompt, inputs, or messages")
        told = "Invalid request payload. Request payload should be a json object specifying the 'inputs' field."
        raise PayloadError(f"{begin}{told} Received payload {shown(body)}")
    return body


def opening(options: LMIOptions) -> str:
    if options.dialect == "async":
        return "Input parsing failed: "
    return "Input Parsing failed. Ensure that the request payload is valid. "


def _schemas(options: LMIOptions) -> tuple[str, ...]:
    return ("inputs", "messages", "prompt") if options.dialect == "async" else ("inputs", "messages")


def _python_says(data: bytes) -> str:
    """What Python's own parser says of a body that is not JSON; empty where it finds nothing wrong (NaN)."""
    try:
        json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        return str(error)
    return ""


async def read(body: dict[str, Any], service: Service, settings: ServerSettings, options: LMIOptions) -> Asked:
    """The {"inputs", "parameters"} schema. Raises PayloadError for its shape, RequestError for a value."""
    inputs = _inputs(body, options)
    given = body.get("parameters")
    if given is not None and not isinstance(given, dict):
        told = "Invalid request payload. 'parameters' must be provided as an object of key-value pairs."
        raise PayloadError(f"{opening(options)}{told} Received payload {shown(body)}")
    for name, value in body.items():
        if name not in _BODY:
            raise RequestError(name[:80], value, f"beside inputs there are {', '.join(_BODY[1:])} only", cure="Leave it out.")
    if body.get("adapters"):
        raise RequestError("adapters", body["adapters"], "there are no adapters", cure="Leave it out.")
    beside = {name: body[name] for name in ("output_formatter",) if name in body}
    values = parameters.TABLE.check({**beside, **(given or {})}, prefix="parameters.")
    stream = _stream(body)
    asked = _asked(inputs, values, stream, options)
    params = sampling(values, service, settings, tokens=asked.stream or asked.details or asked.several)
    if asked.stream and (asked.several or params.beam_width > 1):
        name = next(name for name in ("num_beams", "best_of", "n") if values.get(name, 1) > 1)
        raise RequestError(f"parameters.{name}", values[name], "several answers are not streamed", cure="Ask without stream.")
    asked.requests = [await _request(text, params, values, service, settings) for text in inputs]
    return asked


def _stream(body: dict[str, Any]) -> bool:
    if body.get("stream") is None:
        return False
    try:
        return Flag().check(body["stream"])
    except InvalidValueError as error:
        raise error.request_error("stream") from None


def _inputs(body: dict[str, Any], options: LMIOptions) -> list[str]:
    inputs = body["inputs"]
    told = f"{opening(options)}Invalid request payload."
    if isinstance(inputs, list) and (not options.rolling_batch or (options.dialect == "async" and len(inputs) == 1)):
        most = 1 if options.rolling_batch else options.batch_size
        if not 0 < len(inputs) <= most or not all(isinstance(text, str) and text for text in inputs):
            raise PayloadError(f"{told} The 'inputs' field must be a list of 1 to {most} strings that are not empty.")
        return inputs
    if not isinstance(inputs, str):
        raise PayloadError(f"{told} The 'inputs' field must be a string. Received type {type(inputs)}")
    if not inputs:
        raise PayloadError(f"{told} The 'inputs' field does not contain any content. Received payload {shown(body)}")
    return [inputs]


def _asked(inputs: list[str], values: dict[str, Any], stream: bool, options: LMIOptions) -> Asked:
    formatter = values.get("output_formatter") or (options.output_formatter or "").removesuffix("_chat")
    if not formatter:
        formatter = ("sse" if options.tgi_compat else "jsonlines") if stream else "json"
    count = values.get("n", 1)
    best_of = values.get("best_of", count)
    if best_of < count:
        raise RequestError("parameters.best_of", best_of, f"it must be at least n={count}")
    details = values.get("details", options.tgi_compat)
    return Asked(
        inputs=inputs,
        requests=[],
        formatter=formatter,
        details=details,
        prefill=details and values.get("decoder_input_details", False),
        num_top=values.get("top_n_tokens", 0) if details else 0,
        full_text=values.get("return_full_text", False) and options.dialect != "0.26",
        num_choices=count,
        several=max(count, best_of) > 1,
        seed=values.get("seed"),
    )


async def _request(text: str, params: SamplingParams, values: dict[str, Any], service: Service, settings: ServerSettings) -> Any:
    special = values.get("add_special_tokens", settings.add_special_tokens)
    ids = await encode_prompt(service, text, add_special_tokens=special, truncate_prompt_tokens=values.get("truncate"))
    return GenerationRequest(
        request_id=uuid.uuid4().hex,
        prompt=ids,
        params=params,
        timeout_s=values.get("request_timeout", settings.request_timeout_s),
    )


def sampling(values: dict[str, Any], service: Service, settings: ServerSettings, *, tokens: bool) -> SamplingParams:
    """SamplingParams of checked parameters; `tokens`: their log-probabilities will be shown."""
    given: dict[str, Any] = {"max_tokens": settings.default_max_tokens or MAX_NEW_TOKENS, "min_tokens": 0}
    given["skip_special_tokens"] = settings.skip_special_tokens
    given |= {param: values[name] for name, param in _DIRECT.items() if name in values}
    given |= _sampled(values)
    given["n"] = max(values.get("n", 1), values.get("best_of", 1))
    given["stop"] = tuple(dict.fromkeys((*values.get("stop", ()), *values.get("stop_sequences", ()))))
    given["bad_words"] = bad_word_ids("parameters.bad_sequences", values.get("bad_sequences", ()), service)
    given["guide"] = read_guide(values)
    if tokens:
        given["logprobs"] = values.get("top_n_tokens", 0) if values.get("details", True) else 0
    if values.get("decoder_input_details") and values.get("details", True):
        given["prompt_logprobs"] = 0
    return SamplingParams(**given)


def _sampled(values: dict[str, Any]) -> dict[str, Any]:
    """temperature, top_k and top_p, or greedy."""
    asked = values.get("do_sample", any(name in values for name in _SAMPLED))
    if not asked or values.get("num_beams", 1) > 1:
        return {"temperature": 0.0}
    unset = _SAMPLED if values.get("do_sample") else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    chosen = {name: values.get(name, default) for name, default in unset.items()}
    return {"temperature": chosen["temperature"], "top_k": max(0, chosen["top_k"]), "top_p": chosen["top_p"] or 1.0}
