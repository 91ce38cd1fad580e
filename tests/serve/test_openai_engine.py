"""The OpenAI API with a real engine and the openai client: HTTPS, API keys, CORS, grammars, tools, log-probabilities."""

from __future__ import annotations

import datetime
import ipaddress
import json
import re
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from stoker.base.config import RuntimeConfig
from stoker.base.errors import ConfigError
from stoker.cli.server_process import running_server
from stoker.server.processes.supervisor import serve
from stoker.server.settings import ServerSettings

PARAMETERS = pytest.mark.compatibility(
    protocol="OpenAI", client="openai", feature="n, seed, echo, log-probabilities, logit_bias, stop, usage"
)
GUIDED = pytest.mark.compatibility(protocol="OpenAI", client="openai", feature="guided decoding, response_format, forced tool calls")

KEY = "an-api-key"
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["S", "M"]}}, "required": ["ok", "size"]}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"unit": {"enum": ["C", "F"]}},
                "required": ["unit"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "heating")
]
USER = [{"role": "user", "content": "hello"}]


def certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .sign(key, hashes.SHA256())
    )
    pem, secret = folder / "cert.pem", folder / "key.pem"
    pem.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    kind = serialization.PrivateFormat.PKCS8
    secret.write_bytes(key.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption()))
    return pem, secret


@pytest.fixture(scope="module")
def web(tiny_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ssl.SSLContext]]:
    folder = tmp_path_factory.mktemp("tls")
    pem, secret = certificate(folder)
    (folder / "keys").write_text(f"{KEY}\n")
    options = [
        "--tls-certificate",
        str(pem),
        "--tls-key",
        str(secret),
        "--api-keys",
        str(folder / "keys"),
        "--cors-origin",
        "https://a.example",
        "--max-request-bytes",
        "5000",
        "--tool-parser",
        "hermes",
        "--model-name",
        "tiny",
        "--kv-cache-tokens",
        "4096",
    ]
    with running_server(tiny_engine, options) as url:
        yield url, ssl.create_default_context(cafile=str(pem))


@pytest.fixture
def client(web: tuple[str, ssl.SSLContext]) -> Iterator[openai.OpenAI]:
    url, trust = web
    assert url.startswith("https://")
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, http_client=httpx.Client(verify=trust)) as connected:
        yield connected


@pytest.fixture
def http(web: tuple[str, ssl.SSLContext]) -> Iterator[httpx.Client]:
    url, trust = web
    with httpx.Client(base_url=url, verify=trust, headers={"authorization": f"Bearer {KEY}"}) as connected:
        yield connected


def complete(client: openai.OpenAI, **values: Any) -> Any:
    return client.completions.create(**{"model": "tiny", "prompt": "the quick brown fox", "max_tokens": 8, "temperature": 0} | values)


def chat(client: openai.OpenAI, **values: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": USER, "max_tokens": 60, "temperature": 1, "seed": 3} | values)


GUIDES: dict[str, tuple[dict[str, Any], str]] = {
    "guided_regex": ({"guided_regex": "[ab]{3}-[0-9]{2}"}, r"[ab]{3}-[0-9]{2}"),
    "regex": ({"regex": "(yes|no)"}, r"yes|no"),
    "guided_choice": ({"guided_choice": ["red", "green"]}, r"red|green"),
    "guided_grammar": ({"guided_grammar": 'root ::= "x=" [0-9] [0-9]'}, r"x=\d\d"),
    "ebnf": ({"ebnf": 'root ::= "y" | "z"'}, r"y|z"),
    "structured_outputs": ({"structured_outputs": {"regex": "q{4}"}}, r"qqqq"),
}


@pytest.mark.parametrize("name", GUIDES)
@GUIDED
def test_guided_decoding(name: str, client: openai.OpenAI) -> None:
    extra, pattern = GUIDES[name]
    answer = complete(client, extra_body=extra, max_tokens=40, temperature=1, seed=1).choices[0]
    assert re.fullmatch(pattern, answer.text), answer.text
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
@GUIDED
def test_json_schema(stream: bool, client: openai.OpenAI) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "size", "strict": True, "schema": SCHEMA}}
    values: dict[str, Any] = {"response_format": format, "temperature": 0.2, "max_tokens": 60}
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chat(client, stream=True, **values))
    else:
        text = chat(client, **values).choices[0].message.content
    found = json.loads(text)
    assert type(found["ok"]) is bool and found["size"] in ("S", "M")


@GUIDED
def test_json_object(client: openai.OpenAI) -> None:
    """The text begins with an object, even if it is incomplete."""
    text = chat(client, response_format={"type": "json_object"}, max_tokens=20).choices[0].message.content
    assert text.lstrip().startswith("{")


def test_an_invalid_guide_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"regex|guide") as caught:
        complete(client, extra_body={"guided_regex": "(unclosed"})
    assert caught.value.status_code == 400


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "heating"}}])
@GUIDED
def test_forced_tools(choice: Any, client: openai.OpenAI) -> None:
    message = chat(client, tools=TOOLS, tool_choice=choice, max_tokens=64, temperature=0.5).choices[0].message
    assert message.tool_calls, message
    call = message.tool_calls[0].function
    assert call.name in (("weather", "heating") if choice == "required" else ("heating",))
    assert json.loads(call.arguments) in ({"unit": "C"}, {"unit": "F"})


@PARAMETERS
def test_n_and_best_of(client: openai.OpenAI) -> None:
    values: dict[str, Any] = {"temperature": 1, "seed": 5, "logprobs": 0}
    choices = complete(client, n=3, **values).choices
    assert [choice.index for choice in choices] == [0, 1, 2]
    assert len({choice.text for choice in choices}) == 3
    (best,) = complete(client, best_of=3, n=1, **values).choices
    assert mean_score(best) == pytest.approx(max(map(mean_score, choices)), abs=1e-4)


def mean_score(choice: Any) -> float:
    scores = choice.logprobs.token_logprobs
    return sum(scores) / len(scores)


@PARAMETERS
def test_seeds_repeat(client: openai.OpenAI) -> None:
    one, two, other = (complete(client, temperature=1, seed=seed).choices[0].text for seed in (7, 7, 8))
    assert one == two != other


@PARAMETERS
def test_echo_logprobs_and_scoring(client: openai.OpenAI) -> None:
    echoed = complete(client, echo=True, logprobs=2, max_tokens=2).choices[0]
    assert echoed.text.startswith("the quick brown fox")
    assert echoed.logprobs.token_logprobs[0] is None and all(score <= 0 for score in echoed.logprobs.token_logprobs[1:])
    assert len(echoed.logprobs.tokens) == len(echoed.logprobs.text_offset) == len(echoed.logprobs.top_logprobs)
    scored = complete(client, echo=True, logprobs=0, max_tokens=0).choices[0]
    assert scored.text == "the quick brown fox"
    assert scored.logprobs.token_logprobs[1:] == pytest.approx(echoed.logprobs.token_logprobs[1 : len(scored.logprobs.tokens)], abs=1e-4)


@PARAMETERS
def test_logit_bias_and_stop(client: openai.OpenAI, http: httpx.Client) -> None:
    (token,) = http.post("/tokenize", json={"prompt": "z", "add_special_tokens": False}).json()["tokens"]
    assert complete(client, logit_bias={str(token): 100}).choices[0].text == "z" * 8
    stopped = complete(client, logit_bias={str(token): 100}, stop=["zzz"]).choices[0]
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("", "stop", "zzz")


@PARAMETERS
def test_usage_of_streams_and_of_the_cache(client: openai.OpenAI) -> None:
    prompt = "a prompt of some length that fills whole blocks: " * 2
    first, second = (complete(client, prompt=prompt).usage for _ in range(2))
    assert second.prompt_tokens_details.cached_tokens >= 64 > first.prompt_tokens_details.cached_tokens
    *chunks, last = list(complete(client, prompt=prompt, stream=True, stream_options={"include_usage": True}))
    assert all(chunk.usage is None for chunk in chunks)
    assert (last.choices, last.usage.completion_tokens, last.usage.prompt_tokens) == ([], 8, first.prompt_tokens)


def test_tokenize_and_detokenize(http: httpx.Client) -> None:
    result = http.post("/tokenize", json={"prompt": "grüße 🎉", "return_token_strs": True}).json()
    assert result["count"] == len(result["tokens"]) == len(result["token_strs"])
    plain = http.post("/tokenize", json={"prompt": "grüße 🎉", "add_special_tokens": False}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": plain}).json() == {"prompt": "grüße 🎉"}


def test_errors(client: openai.OpenAI, http: httpx.Client, web: tuple[str, ssl.SSLContext]) -> None:
    with pytest.raises(openai.BadRequestError, match="suffix") as caught:
        complete(client, suffix="end")
    assert caught.value.param == "suffix"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="another-key").models.list()
    large = http.post("/v1/completions", json={"prompt": "x" * 6000})
    assert large.status_code == 413 and "5000" in large.json()["error"]["message"]
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(web[0].replace("https", "http") + "/health/live")
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_certificates_that_cannot_be_used(tiny_engine: Path, tmp_path: Path) -> None:
    """The error is raised before anything starts."""
    pem, secret = certificate(tmp_path)
    (tmp_path / "other").mkdir()
    other = certificate(tmp_path / "other")[1]
    loaded = serialization.load_pem_private_key(secret.read_bytes(), None)
    locked = tmp_path / "locked.pem"
    kind = serialization.BestAvailableEncryption(b"password")
    locked.write_bytes(loaded.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, kind))
    for key, message in ((tmp_path / "none", "No such file"), (other, "MISMATCH"), (locked, "has a password"), (pem, "refused")):
        settings = ServerSettings(http_port=0, tls_certificate=str(pem), tls_key=str(key))
        with pytest.raises(ConfigError, match=message):
            serve(tiny_engine, RuntimeConfig(), settings)


def test_cors(http: httpx.Client) -> None:
    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    assert http.options("/v1/completions", headers=preflight).headers["access-control-allow-origin"] == "https://a.example"
    other = http.get("/v1/models", headers={"Origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers


LONG = "the quick brown fox " * 50
REGEX = {"guided_regex": "("}
BEAMS = {"use_beam_search": True, "temperature": 0}


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages", r"messages=.* is refused: it has \d+ tokens"),
        ("chat/completions", {"max_completion_tokens": 1000}, "max_completion_tokens", "max_completion_tokens=1000 is refused"),
        ("chat/completions", {"max_completion_tokens": 5, "min_tokens": 6}, "min_tokens", "it must be at most max_completion_tokens=5"),
        ("chat/completions", {"top_p": 0}, "top_p", "top_p=0 is refused"),
        ("chat/completions", {"guided_choice": []}, "guided_choice", r"guided_choice=\[\] is refused"),
        ("chat/completions", {"bad_words": [""]}, "bad_words[0]", r"bad_words\[0\]='' is refused"),
        ("chat/completions", {"ebnf": "x"}, "ebnf", "ebnf='x' is refused: grammar is not accepted"),
        (
            "chat/completions",
            {"guided_json": {"type": "xx"}},
            "guided_json",
            r"guided_json=\{'type': 'xx'\} is refused: json_schema is not",
        ),
        (
            "chat/completions",
            {"structured_outputs": {"regex": "("}},
            "structured_outputs.regex",
            r"structured_outputs\.regex='\(' is refused",
        ),
        (
            "chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nope"}}}},
            "response_format.json_schema",
            r"response_format\.json_schema=\{'name': .* is refused: json_schema is not accepted",
        ),
        (
            "chat/completions",
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "xx"}}}], "tool_choice": "required"},
            "tools",
            r"tools=\[.* is refused: json_schema is not accepted",
        ),
        ("completions", {"guided_regex": "a", "ignore_eos": True}, "guided_regex", "guided_regex='a' is refused: .* Unset ignore_eos"),
        ("completions", {**REGEX, "stream": True}, "guided_regex", r"guided_regex='\(' is refused"),
        ("completions", {**BEAMS, "n": 2}, "n", "n=2 is refused: the engine's max_beam_width is 1"),
        ("completions", {**BEAMS, "best_of": 2}, "best_of", "best_of=2 is refused: the engine's max_beam_width is 1"),
        ("completions", {"prompt": LONG}, "prompt", r"prompt=<str of length \d+> is refused: it has \d+ tokens"),
        ("completions", {"prompt": ["x", ""]}, "prompt[1]", r"prompt\[1\]='' is refused: it is empty"),
        ("completions", {"prompt": ["x", LONG], "stream": True}, "prompt[1]", r"prompt\[1\]=<str of length \d+> is refused"),
        ("completions", {"prompt": [[5], [6, 10**6]]}, "prompt[1]", r"prompt\[1\]=1000000 is refused: a token id is"),
    ],
)
def test_errors_name_what_the_client_sent(http: httpx.Client, path: str, fields: dict[str, Any], param: str, message: str) -> None:
    base = {"messages": USER} if path.startswith("chat") else {"prompt": "x"}
    answer = http.post(f"/v1/{path}", json={**base, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and re.match(f".*{message}", error["message"]), error
    assert not re.search(r"\b(guide\.|prompt_ids|beam_width=)", error["message"])


def test_errors_of_tokens_name_them(http: httpx.Client) -> None:
    error = http.post("/detokenize", json={"tokens": [10**6]}).json()["error"]
    assert error["param"] == "tokens" and error["message"].startswith("tokens=1000000 is refused")
