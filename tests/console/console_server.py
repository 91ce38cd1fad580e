"""A server with the real frontend and executor, whose device is a stub that generates a scripted answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from small_tokenizers import small
from stub_runner import INFO, StubRunner, stub_executor

from stoker.frontend.generation import GenerationService
from stoker.frontend.repository import ModelRepository
from stoker.frontend.service import Service
from stoker.frontend.tokenizer import Tokenizer
from stoker.runtime.transport.in_process import InProcessClient, InProcessMailbox
from stoker.server.metrics.frontend import FrontendMetrics
from stoker.server.metrics.metered import MeteredClient, MeteredService
from stoker.server.processes.tasks import EXECUTOR, ExecutorPlace
from stoker.server.protocol import Context
from stoker.server.settings import ServerSettings

NAME = "tiny-chat"
ANSWER = "The quick brown fox jumps over the lazy dog. Ünïcödé and 你好世界."
TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
ENGINE = {
    "format_version": 3,
    "stoker_version": "0.1.0",
    "model": {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 1000,
        "hidden_size": 576,
        "max_positions": 1024,
        "layers": [{"count": 30}, {"layer": {}}],
    },
    "recipe": {
        "default": {"format": "int4", "group_size": 128},
        "overrides": {"head": {"format": "dense"}},
        "kv_cache": "int8",
        "name": "INT4_AWQ",
    },
    "limits": {"max_batch_size": 8, "max_input_len": 512, "max_total_len": None},
    "dtype": "bfloat16",
    "mapping": {"tensor_parallel": 1, "pipeline_parallel": 1, "expert_parallel": False},
    "target": {"device": "cuda", "compute_capability": "9.0"},
    "weights": "files",
    "checkpoint": {"name": "tiny/chat", "fingerprint": "0cf791acd18e16135a608b4086073188"},
    "files": {"rank0.safetensors": {"size": 81264640, "sha256": "00"}, "tokenizer.json": {"size": 1563270, "sha256": "00"}},
    "checks": {
        "accuracy": {
            "perplexity_before": 12.25,
            "perplexity_after": 12.5,
            "increase": 0.0204,
            "greedy_agreement": 0.97,
            "tokens": 1024,
            "skipped": "",
        },
        "greedy": {"skipped": "the quantization changes tokens"},
    },
}


def make_tokenizer() -> Tokenizer:
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    return Tokenizer(small("byte_level"), config, {"eos_token_id": [2]})


@contextlib.asynccontextmanager
async def console_context(folder: Path, *, answer: str = ANSWER, step_s: float = 0.0, **settings: Any) -> AsyncIterator[Context]:
    """The context of a server whose model is loaded, with `shared["runner"]`. `folder` becomes its engine directory."""
    (folder / "config.json").write_text(json.dumps(ENGINE))
    tokenizer = make_tokenizer()
    ids = tokenizer.encode(answer, add_special_tokens=False)
    mailbox = InProcessMailbox(INFO)
    runner = StubRunner(ids, 2, step_s)
    thread = threading.Thread(target=stub_executor(mailbox, runner).run, daemon=True)
    thread.start()
    counts, repository = FrontendMetrics(), ModelRepository()
    client = InProcessClient(mailbox)

    async def load() -> Service:
        return MeteredService(GenerationService(NAME, tokenizer, MeteredClient(client, NAME, counts)), counts)

    async def unload(service: Service) -> None: ...

    repository.register(NAME, load, unload)
    await repository.load(NAME)
    context = Context(repository, ServerSettings(**settings), counts)
    context.shared["runner"] = runner
    await context.coordination.put(EXECUTOR, ExecutorPlace("ipc://none", str(folder), str(folder)))
    try:
        yield context
    finally:
        client.shutdown(drain=False)
        await asyncio.to_thread(thread.join, 20)
        await client.close()
        assert not thread.is_alive()
