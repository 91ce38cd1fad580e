"""A smoke test of an installation: every command's help, a build, and one request over each protocol. Used by `scripts/bounds.py`.

    python scripts/smoke.py

It needs the extras `grpc`, `guided` and `s3`, and no network: the model is a random Llama with a byte-level tokenizer.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / area) for area in ("builder", "server")]
MODEL = "tiny"
PROMPT, TOKENS = "the quick brown fox", 6


def post(url: str, body: dict[str, Any]) -> Any:
    with urllib.request.urlopen(json_request(url, body), timeout=60) as response:
        return json.load(response)


def json_request(url: str, body: dict[str, Any]) -> urllib.request.Request:
    return urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})


def check_help() -> None:
    from stoker.cli.commands import COMMANDS

    for words in ([], *([command.name] for command in COMMANDS)):
        ran = subprocess.run([sys.executable, "-m", "stoker", *words, "--help"], capture_output=True, text=True, check=True)
        assert "Usage: stoker" in ran.stdout, ran.stdout


def check_openai(url: str) -> None:
    answer = post(f"{url}/v1/completions", {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS})
    assert answer["usage"]["completion_tokens"] > 0, answer
    chat = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS}
    assert post(f"{url}/v1/chat/completions", chat)["choices"][0]["message"]["role"] == "assistant"
    request = json_request(f"{url}/v1/chat/completions", chat | {"stream": True})
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.read().endswith(b"data: [DONE]\n\n")


def check_guided(url: str) -> None:
    schema = {"type": "object", "properties": {"size": {"enum": ["S", "M"]}}, "required": ["size"], "additionalProperties": False}
    answer_format = {"type": "json_schema", "json_schema": {"name": "size", "strict": True, "schema": schema}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 60, "response_format": answer_format}
    answer = post(f"{url}/v1/chat/completions", body)
    assert json.loads(answer["choices"][0]["message"]["content"])["size"] in ("S", "M"), answer


def check_kserve(url: str) -> None:
    answer = post(f"{url}/v2/models/{MODEL}/generate", {"text_input": PROMPT, "max_tokens": TOKENS})
    assert "text_output" in answer, answer


def check_sagemaker(url: str) -> None:
    answer = post(f"{url}/invocations", {"inputs": PROMPT, "parameters": {"max_new_tokens": TOKENS}})
    assert "generated_text" in json.dumps(answer), answer


def check_truss(url: str) -> None:
    assert post(f"{url}/v1/models/model:predict", {"prompt": PROMPT, "max_tokens": TOKENS, "stream": False}), "no answer"


def check_grpc(port: int) -> None:
    import numpy as np
    import tritonclient.grpc as client

    text, count = client.InferInput("text_input", [1, 1], "BYTES"), client.InferInput("max_tokens", [1, 1], "INT32")
    text.set_data_from_numpy(np.array([[PROMPT.encode()]], object))
    count.set_data_from_numpy(np.array([[TOKENS]], np.int32))
    with client.InferenceServerClient(f"127.0.0.1:{port}") as server:
        assert server.infer(MODEL, [text, count]).as_numpy("text_output") is not None


def check_s3_client() -> None:
    import boto3

    assert boto3.client("s3", region_name="us-east-1", aws_access_key_id="none", aws_secret_access_key="none")


def check_kernel() -> None:
    """One kernel compiled for sm_90, where Triton is installed."""
    import torch

    from stoker.kernels.triton import norm
    from stoker.kernels.triton.aot.compiler import collecting, compile_jobs

    x, weight = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((4, 64), (64,)))
    with collecting(90) as jobs:
        norm.norm(x, weight, None, 1e-5, "rms")
    assert jobs
    with tempfile.TemporaryDirectory() as cache:
        compile_jobs(list(jobs.values()), Path(cache), 90, 1)


def run(name: str, check: Callable[..., None], *args: Any) -> bool:
    try:
        check(*args)
    except Exception as error:
        detail = error.read().decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else ""
        print(f"FAILED {name}: {type(error).__name__}: {error} {detail}", flush=True)
        return False
    print(f"passed {name}", flush=True)
    return True


def main() -> int:
    import tiny
    from free_ports import free_port

    from stoker.base.config import Limits
    from stoker.builder.build import build
    from stoker.builder.config import BuildConfig
    from stoker.cli.server_process import running_server

    results = [run("help of all commands", check_help), run("S3 client", check_s3_client), run("a kernel for sm_90", check_kernel)]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = tiny.save(tiny.model(), Path(folder) / "checkpoint")
        limits = Limits(max_batch_size=8, max_input_len=180, max_output_len=64, max_num_tokens=128, tokens_per_block=16)
        engine = build(checkpoint, Path(folder) / MODEL, BuildConfig(device="cpu", limits=limits), verify="auto").path
        port = free_port()
        with running_server(engine, ["--model-name", MODEL, "--grpc-port", str(port)]) as url:
            checks = {
                "OpenAI": check_openai,
                "guided": check_guided,
                "KServe": check_kserve,
                "SageMaker": check_sagemaker,
                "Truss": check_truss,
            }
            results += [run(name, check, url) for name, check in checks.items()]
            results.append(run("gRPC", check_grpc, port))
    return results.count(False)


if __name__ == "__main__":
    sys.exit(main())
