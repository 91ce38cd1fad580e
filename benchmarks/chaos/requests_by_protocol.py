"""The kinds of requests that the chaos test sends: for each protocol, how a case becomes a request, and how to read answers and errors.

A case is a prompt with a number of new tokens and, for the protocols that have one, a seed. Readers are strict: an answer without the mark
of its end, or an error without a message in the format of the protocol, raises FormatError.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, NamedTuple

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    "while",
    "seven",
    "wizards",
    "pack",
    "my",
    "box",
    "with",
    "five",
    "dozen",
    "liquor",
    "jugs",
]


class Case(NamedTuple):
    """One prompt and its sampling. `seed` None: greedy."""

    number: int
    prompt: str
    max_tokens: int
    seed: int | None


class FormatError(Exception):
    """An answer or error that its protocol does not allow."""


class Refused(Exception):
    """The server refused the request, or ended it with an error, with this reason."""


class Kind(NamedTuple):
    """One way to send a case. `read` returns the text of a whole body; for a stream, the text and whether the stream is complete."""

    name: str
    path: str
    body: Callable[[Case], dict[str, Any]]
    read: Callable[[bytes], tuple[str, bool]]
    error: Callable[[bytes], str]  # the message of an error body
    seeded: bool = True


def make_cases(random: Random, count: int) -> list[Case]:
    """Random prompts of 4 to 18 words. Every second case is sampled with a seed."""
    cases = []
    for number in range(count):
        prompt = " ".join(random.choices(WORDS, k=random.randint(4, 18)))
        cases.append(Case(number, prompt, random.choice((8, 16, 32, 64)), random.randrange(1 << 31) if number % 2 else None))
    return cases


def sampled(case: Case, name: str = "seed", **greedy: Any) -> dict[str, Any]:
    """The sampling fields of a case: `greedy` for a greedy one."""
    return {"temperature": 0.9, name: case.seed} if case.seed is not None else greedy or {"temperature": 0}


def chat(case: Case) -> list[dict[str, str]]:
    return [{"role": "user", "content": case.prompt}]


# Bodies.


def _openai(case: Case, **fields: Any) -> dict[str, Any]:
    return {"max_tokens": case.max_tokens, **sampled(case), **fields}


def _ollama(case: Case, **fields: Any) -> dict[str, Any]:
    return {"options": {"num_predict": case.max_tokens, **sampled(case)}, **fields}


def _kserve(case: Case, **fields: Any) -> dict[str, Any]:
    sampling = {"temperature": 0.9, "top_k": 0, "top_p": 1.0, "random_seed": case.seed} if case.seed is not None else {"top_k": 1}
    return {"text_input": case.prompt, "max_tokens": case.max_tokens, **sampling, **fields}


def _sagemaker(case: Case, **fields: Any) -> dict[str, Any]:
    sampling = {"do_sample": True, "temperature": 0.9, "seed": case.seed} if case.seed is not None else {"do_sample": False}
    return {"inputs": case.prompt, "parameters": {"max_new_tokens": case.max_tokens, **sampling}, **fields}


def _truss(case: Case, **fields: Any) -> dict[str, Any]:
    sampling = {"temperature": 0.9, "random_seed": case.seed} if case.seed is not None else {"top_k": 1}
    return {"prompt": case.prompt, "max_tokens": case.max_tokens, **sampling, **fields}


# Readers.


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        raise FormatError(f"no JSON: {body[:200]!r}") from None


def whole(pick: Callable[[Any], str]) -> Callable[[bytes], tuple[str, bool]]:
    """The reader of a JSON body whose text `pick` returns."""

    def read(body: bytes) -> tuple[str, bool]:
        value = _json(body)
        try:
            return pick(value), True
        except (KeyError, IndexError, TypeError):
            raise FormatError(f"an answer without its text: {body[:300]!r}") from None

    return read


def _events(body: bytes) -> Iterator[Any]:
    """The data of complete server-sent events; the string "[DONE]" as it is."""
    *blocks, _ = body.split(b"\n\n")
    for block in blocks:
        data = [line[6:] for line in block.split(b"\n") if line.startswith(b"data: ")]
        if len(data) != 1:
            raise FormatError(f"an event without data: {block[:200]!r}")
        yield "[DONE]" if data[0] == b"[DONE]" else _json(data[0])


def _lines(body: bytes) -> Iterator[Any]:
    """The objects of complete lines."""
    *lines, _ = body.split(b"\n")
    for line in lines:
        yield _json(line)


def streamed(
    split: Callable[[bytes], Iterator[Any]], pick: Callable[[Any], str], is_end: Callable[[Any], bool], error: Callable[[Any], str | None]
) -> Callable[[bytes], tuple[str, bool]]:
    """The reader of a stream. Raises Refused for an error in it."""

    def read(body: bytes) -> tuple[str, bool]:
        text, ended = [], False
        for item in split(body):
            if isinstance(item, dict) and (message := error(item)) is not None:
                raise Refused(message)
            if ended:
                raise FormatError(f"more after the end: {item}")
            ended = is_end(item)
            text.append(pick(item) or "" if isinstance(item, dict) else "")
        return "".join(text), ended

    return read


def _error_object(value: Any) -> str | None:
    """The message of {"error": {"message": ...}}; None if there is no error."""
    if "error" not in value:
        return None
    found = value["error"]
    if not isinstance(found, dict) or not isinstance(found.get("message"), str) or not found["message"]:
        raise FormatError(f"an error without a message: {value}")
    return found["message"]


def _error_text(value: Any) -> str | None:
    """The message of {"error": "..."}; None if there is no error."""
    if "error" not in value:
        return None
    if not isinstance(value["error"], str) or not value["error"]:
        raise FormatError(f"an error without a message: {value}")
    return value["error"]


def required(error: Callable[[Any], str | None]) -> Callable[[bytes], str]:
    """The reader of an error body. It raises FormatError if the body has no message."""

    def read(body: bytes) -> str:
        value = _json(body)
        if not isinstance(value, dict) or (message := error(value)) is None:
            raise FormatError(f"no error in {value}")
        return message

    return read


def _event_error(body: bytes) -> str:
    """The message of an error that Triton sends as an event."""
    return required(_error_text)(body.removeprefix(b"data: ").removesuffix(b"\n\n"))


def _anthropic_error(value: Any) -> str | None:
    if value.get("type") != "error":
        return None
    return _error_object(value)


def _responses_error(value: Any) -> str | None:
    """The message of an event of the Responses API that reports a failure."""
    match value.get("type"):
        case "error":
            return str(value["message"])
        case "response.failed":
            return str(value["response"]["error"]["message"])
    return None


def _responses_text(value: Any) -> str:
    return "".join(part["text"] for item in value["output"] for part in item.get("content") or ())


def _truss_text(body: bytes) -> tuple[str, bool]:
    """A stream of plain text has no mark of its end except that of HTTP. Its last chunk is a JSON object if the sequence failed."""
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(body)
    at = text.rfind('{"status": "error", "message": ')
    if at >= 0:
        raise Refused(str(_json(text[at:].encode())["message"]))
    return text, True


def _sagemaker_error(value: Any) -> str | None:
    """The message of LMI's errors: {"error": ..., "code": ...} of an inference, {"message": ..., "code": ...} of the container."""
    return str(value["message"]) if value.get("message") and "code" in value else _error_text(value)


def _delta(value: Any) -> str:
    choices = value.get("choices")
    return choices[0]["delta"].get("content") or "" if choices else ""


def _generated(value: Any) -> str:
    return str(value["token"]["text"]) if "token" in value else ""


def _is_done(item: Any) -> bool:
    return item == "[DONE]"


OPENAI_STREAM = (_is_done, _error_object)
HTTP_KINDS = (
    Kind("completions", "/v1/completions", lambda case: _openai(case, prompt=case.prompt),
         whole(lambda v: v["choices"][0]["text"]), required(_error_object)),
    Kind("completions stream", "/v1/completions", lambda case: _openai(case, prompt=case.prompt, stream=True),
         streamed(_events, lambda v: v["choices"][0]["text"], *OPENAI_STREAM), required(_error_object)),
    Kind("guided", "/v1/completions", lambda case: _openai(case, prompt=case.prompt, guided_regex=f"[a-z]{{{3 + case.number}}} [0-9]{{2}}"),
         whole(lambda v: v["choices"][0]["text"]), required(_error_object)),
    Kind("chat", "/v1/chat/completions", lambda case: _openai(case, messages=chat(case)),
         whole(lambda v: v["choices"][0]["message"]["content"]), required(_error_object)),
    Kind("chat stream", "/v1/chat/completions", lambda case: _openai(case, messages=chat(case), stream=True),
         streamed(_events, _delta, *OPENAI_STREAM), required(_error_object)),
    Kind("responses", "/v1/responses", lambda case: {"input": case.prompt, "max_output_tokens": case.max_tokens, "temperature": 0},
         whole(_responses_text), required(_error_object), False),
    Kind("responses stream", "/v1/responses",
         lambda case: {"input": case.prompt, "max_output_tokens": case.max_tokens, "temperature": 0, "stream": True},
         streamed(_events, lambda v: v["delta"] if v["type"] == "response.output_text.delta" else "",
                  lambda v: v["type"] in ("response.completed", "response.incomplete"), _responses_error),
         required(_error_object), False),
    Kind("messages", "/v1/messages", lambda case: _openai(case, messages=chat(case)),
         whole(lambda v: "".join(part["text"] for part in v["content"])), required(_anthropic_error)),
    Kind("messages stream", "/v1/messages", lambda case: _openai(case, messages=chat(case), stream=True),
         streamed(_events, lambda v: v["delta"]["text"] if v["type"] == "content_block_delta" else "",
                  lambda v: v["type"] == "message_stop", _anthropic_error),
         required(_anthropic_error)),
    Kind("ollama generate", "/api/generate", lambda case: _ollama(case, prompt=case.prompt, stream=False),
         whole(lambda v: v["response"]), required(_error_text)),
    Kind("ollama chat stream", "/api/chat", lambda case: _ollama(case, messages=chat(case)),
         streamed(_lines, lambda v: v["message"]["content"], lambda v: v["done"], _error_text), required(_error_text)),
    Kind("kserve generate", "/v2/models/ensemble/generate", _kserve, whole(lambda v: v["text_output"]), required(_error_text)),
    Kind("kserve generate_stream", "/v2/models/ensemble/generate_stream", lambda case: _kserve(case, stream=True),
         streamed(_events, lambda v: v["text_output"], lambda v: "finish_reason" in v, _error_text), _event_error),
    Kind("sagemaker", "/invocations", _sagemaker, whole(lambda v: v["generated_text"]), required(_sagemaker_error)),
    Kind("sagemaker stream", "/invocations", lambda case: _sagemaker(case, stream=True),
         streamed(_lines, _generated, lambda v: "generated_text" in v, _sagemaker_error), required(_sagemaker_error)),
    Kind("truss", "/v1/models/model:predict", lambda case: _truss(case, stream=False),
         whole(lambda v: v["text"]), required(_error_text)),
    Kind("truss stream", "/v1/models/model:predict", _truss, _truss_text, required(_error_text)),
)  # fmt: skip
