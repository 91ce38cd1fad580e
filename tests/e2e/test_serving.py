"""`stoker serve` as processes on loopback: concurrent streams, disconnecting clients, and the stop signal."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from stoker.cli import demo_requests
from stoker.cli.clients.http import events, post
from stoker.cli.clients.metrics import read_metrics
from stoker.cli.server_process import running_server

GOLDEN: dict[str, Any] = json.loads(Path(__file__).with_name("golden.json").read_text())
MODEL = "smollm2"


@pytest.fixture(scope="module")
def url(smollm2_engine: Path) -> Iterator[str]:
    with running_server(smollm2_engine, ["--model-name", MODEL, "--kv-cache-tokens", "4096"]) as found:
        yield found


async def chat(url: str, case: dict[str, Any]) -> str:
    answer = await demo_requests.stream_answer(
        url, MODEL, [{"role": "user", "content": case["message"]}], max_tokens=len(case["token_ids"])
    )
    assert answer.num_tokens == len(case["token_ids"])
    return answer.text


async def complete(url: str, case: dict[str, Any]) -> str:
    body = {"model": MODEL, "prompt": case["prompt"], "max_tokens": len(case["token_ids"]), "temperature": 0}
    return (await post(url, "/v1/completions", body))["choices"][0]["text"]


async def test_concurrent_streams_equal_transformers(url: str) -> None:
    """Chat streams and completions run concurrently. Joined streams and completions equal the golden texts."""
    chats, texts = GOLDEN["chats"], GOLDEN["texts"]
    answers = await asyncio.gather(*(chat(url, case) for case in chats), *(complete(url, case) for case in texts))
    assert answers == [case["text"] for case in chats + texts]


async def test_a_client_that_disconnects_frees_its_blocks(url: str) -> None:
    before = await read_metrics(url)
    body = {"model": MODEL, "prompt": "Count to a thousand:", "max_tokens": 512, "ignore_eos": True, "temperature": 0, "stream": True}
    async with aclosing(events(url, "/v1/completions", body)) as stream:
        await anext(stream)
        assert (await read_metrics(url))["num_used_blocks"] > 0
    async with asyncio.timeout(10):
        while (now := await read_metrics(url))["num_used_blocks"]:
            pass
    assert now["num_running"] == 0
    assert now["num_decode_tokens"] - before["num_decode_tokens"] < 50


async def test_the_batch_of_the_demo_runs_in_flight_and_reuses_its_prefix(url: str) -> None:
    batch = await demo_requests.request_batch(url, MODEL, ["What is in Rome?", "What is in Oslo?", "What is in Lima?"], max_tokens=12)
    assert all(answer.text and answer.first_s > 0 for answer in batch.answers)
    assert batch.after["num_reused_tokens"] - batch.before["num_reused_tokens"] >= 3 * 48  # whole blocks of the instructions
    assert 0 < batch.peak_blocks <= batch.after["num_blocks"]
    steps = batch.after["num_steps"] - batch.before["num_steps"]
    assert (batch.after["row_steps"] - batch.before["row_steps"]) / steps > 1.5
    out = Console(file=io.StringIO(), width=100)
    out.print(demo_requests.result_table(batch.answers[0], batch))
    assert "3 streams: prefix tokens reused" in out.file.getvalue()  # type: ignore[attr-defined]


def test_a_stop_signal_ends_every_process_with_status_0(tiny_engine: Path) -> None:
    server = subprocess.Popen(
        [sys.executable, "-m", "stoker", "serve", str(tiny_engine), "--port", "0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert server.stdout is not None
    assert "is served at http://127.0.0.1:" in server.stdout.readline()
    children = [int(pid) for pid in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()]
    assert len(children) == 2  # executor, frontend
    os.kill(server.pid, signal.SIGINT)
    _, log = server.communicate(timeout=30)
    assert server.returncode == 0
    assert "Traceback" not in log
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
