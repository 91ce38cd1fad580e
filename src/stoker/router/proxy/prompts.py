"""Reads from a request what its route depends on: the prompt, the model, the session and the tenant.

With a tokenizer, the request passes through the same code as in a replica: its protocol checks it, renders the chat template and
tokenizes. Where a replica would send the token request to its executor, the router keeps it, so that the block hashes are those of the
replica for every protocol. Without a tokenizer, or for a request that this code rejects, hashes of the request's text are used.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec

from stoker.base.errors import UnavailableError
from stoker.base.logging import get_logger
from stoker.base.profile_query import ProfileResult
from stoker.frontend.generation import GenerationService
from stoker.frontend.repository import ModelRepository
from stoker.frontend.service import Service
from stoker.frontend.tokenizer import Tokenizer
from stoker.router.core.prefix import NO_PREFIX, PromptPrefix, text_prefix, token_prefix
from stoker.runtime.client import ExecutorClient, ExecutorInfo
from stoker.runtime.live_state import LiveState
from stoker.runtime.request import ExecutorStats, SequenceOutput, TokenRequest
from stoker.server.application import make_app
from stoker.server.http.internal_request import drop, receiver
from stoker.server.metrics.frontend import FrontendMetrics
from stoker.server.protocol import Context
from stoker.server.replica_report import ReplicaReport
from stoker.server.settings import ServerSettings

log = get_logger(__name__)

# Members of JSON bodies that contain prompts, in the order in which prompts contain them.
TEXT_FIELDS = ("system", "instructions", "tools", "messages", "prompt", "input", "inputs", "text_input", "instances")

_captured: contextvars.ContextVar[asyncio.Future[TokenRequest]] = contextvars.ContextVar("captured")


class CapturingClient(ExecutorClient):
    """Takes the place of the connection to an executor. `generate` passes the request to the router and yields nothing."""

    def __init__(self, info: ExecutorInfo) -> None:
        self.info = info

    async def generate(self, request: TokenRequest) -> AsyncGenerator[list[SequenceOutput], None]:
        future = _captured.get()
        if not future.done():
            future.set_result(request)
        await asyncio.Event().wait()  # until the router cancels the handler
        yield []

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """Does nothing: there is no executor."""

    async def stats(self) -> ExecutorStats:
        return ExecutorStats()

    async def live(self, *, detail: bool = False, first_step: int | None = None, log_after_s: float | None = None) -> LiveState:
        raise UnavailableError("a router has no executor.")

    async def profile(self, num_steps: int, time_s: float) -> ProfileResult:
        raise UnavailableError("a router has no executor.")

    async def recovery(self) -> None:
        """Return at once: requests are always accepted."""

    def pause(self, paused: bool) -> None:
        """Does nothing: there is no executor."""

    @property
    def alive(self) -> bool:
        """Always True, so that requests are not refused."""
        return True

    def end_requests(self, error: UnavailableError) -> None:
        """Does nothing: there is no executor."""

    async def close(self) -> None:
        """Does nothing: there is no connection."""


class PromptReader:
    """Tokenizes requests with the tokenizer in `directory`, as a replica with `report` does."""

    def __init__(self, tokenizer: Tokenizer, report: ReplicaReport, timeout_s: float) -> None:
        assert report.info is not None
        self.tokens_per_block = report.tokens_per_block
        self._timeout_s = timeout_s
        self._services = [GenerationService(name, tokenizer, CapturingClient(report.info)) for name in report.models]
        settings = ServerSettings(
            protocols=report.protocols,
            add_special_tokens=report.add_special_tokens,
            tool_parser=report.tool_parser,
            reasoning_parser=report.reasoning_parser,
            max_request_bytes=1 << 32,
            log_requests="none",  # the router logs the request itself
        )
        self._repository = ModelRepository()
        for service in self._services:
            self._repository.register(service.model_name, _loader(service), _unload)
        self._context = Context(self._repository, settings, FrontendMetrics())
        self._app: Any = None

    @classmethod
    async def create(cls, directory: str, report: ReplicaReport, timeout_s: float) -> PromptReader:
        """Load the tokenizer in another thread, and the protocols."""
        reader = cls(await asyncio.to_thread(Tokenizer.load, Path(directory)), report, timeout_s)
        for service in reader._services:
            await reader._repository.load(service.model_name)
        reader._app = make_app(reader._context)
        return reader

    async def read(self, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes) -> PromptPrefix | None:
        """The prefix of the request's prompt; None if the request has none, is invalid, or takes too long."""
        scope = {
            "type": "http", "method": method, "path": path, "query_string": b"", "headers": headers, "extensions": {},
        }  # fmt: skip
        future: asyncio.Future[TokenRequest] = asyncio.get_running_loop().create_future()
        _captured.set(future)
        task = asyncio.create_task(self._app(scope, receiver(body), drop))
        try:
            await asyncio.wait({task, future}, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()
            task.add_done_callback(_retrieve)
        if not future.done():
            return None
        request = future.result()
        root = request.cache_salt if request.adapter < 0 else (request.adapter, request.cache_salt)
        return token_prefix(request.prompt_ids, self.tokens_per_block, root)

    async def close(self) -> None:
        """End the process that renders chat templates."""
        for service in self._services:
            await service.close()


def json_prefix(body: dict[str, Any], tokens_per_block: int) -> PromptPrefix:
    """The prefix of a JSON request without a tokenizer: of its token ids, or else of its text."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and all(type(token) is int and 0 <= token < 1 << 31 for token in prompt) and tokens_per_block:
        return token_prefix(prompt, tokens_per_block, _text(body.get("cache_salt")))
    parts: list[str] = []
    for name in TEXT_FIELDS:
        if name in body:
            _collect(body[name], parts)
    return text_prefix("\n".join(parts), f"{_text(body.get('model'))} {_text(body.get('cache_salt'))}") if parts else NO_PREFIX


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body; empty for anything else."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def session_of(body: dict[str, Any], header: str) -> str:
    """The session: the header's value, or OpenAI's prompt_cache_key or user, or Anthropic's metadata.user_id."""
    metadata = body.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    return header or _text(body.get("prompt_cache_key")) or _text(body.get("user")) or _text(user)


def tenant_of(headers: dict[bytes, bytes], name: str) -> str:
    """The tenant: the value of the header `name`, or else a digest of the API key; empty without either."""
    if value := headers.get(name.encode(), b""):
        return value.decode("latin-1")
    key = headers.get(b"authorization", b"") or headers.get(b"x-api-key", b"")
    return hashlib.sha256(key).hexdigest()[:16] if key else ""


def _collect(value: Any, parts: list[str]) -> None:
    """Append all strings in a JSON value, in order."""
    if isinstance(value, str):
        parts.append(value)
    elif isinstance(value, dict):
        for member in value.values():
            _collect(member, parts)
    elif isinstance(value, list):
        for member in value:
            _collect(member, parts)


def _text(value: Any) -> str:
    """`value` if it is text, otherwise empty."""
    return value if isinstance(value, str) else ""


def _loader(service: Service) -> Any:
    async def load() -> Service:
        """The service, which exists already."""
        return service

    return load


async def _unload(service: Service) -> None:
    """Does nothing: `PromptReader.close` closes the services."""


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Read the exception of a handler that was cancelled, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()
