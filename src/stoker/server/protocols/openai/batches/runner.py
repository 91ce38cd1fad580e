"""Runs batches in the background: checks the lines, executes them, and stores the results as files."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

from stoker.base.errors import StokerError
from stoker.base.logging import get_logger
from stoker.frontend.repository import ModelRepository
from stoker.server.errors import AuthenticationError, describe
from stoker.server.protocols.openai.batches.execution import Handlers, execute_lines, num_concurrent
from stoker.server.protocols.openai.batches.files import FileStore
from stoker.server.protocols.openai.batches.lines import (
    BatchLine,
    BatchLinesError,
    LineError,
    finished_ids,
    read_batch_lines,
    read_results,
    unanswered_result,
)
from stoker.server.protocols.openai.batches.records import ENDED, BatchFolder, BatchRecords
from stoker.server.protocols.openai.responses.store import unix_time
from stoker.server.tenants.accepted_keys import AcceptedKeys
from stoker.server.tenants.tenants import act_as

log = get_logger(__name__)

MAX_RUNNING = 4  # batches that execute at the same time per frontend process; others wait
SAVE_S = 1.0  # how often the counts of a running batch are written


class BatchRunner:
    """The batches that this process runs. A batch that another process left unfinished is continued by `resume`."""

    def __init__(
        self, records: BatchRecords, files: FileStore, handlers: Handlers, repository: ModelRepository, keys: AcceptedKeys
    ) -> None:
        self._records = records
        self._files = files
        self._handlers = handlers
        self._repository = repository
        self._keys = keys
        self._running = asyncio.Semaphore(MAX_RUNNING)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, batch_id: str) -> None:
        """Run a batch, unless another process runs it."""
        task = asyncio.create_task(self._run(batch_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def resume(self) -> None:
        """Run all batches that have not ended."""
        for batch in self._records.list():
            if batch["status"] not in ENDED:
                self.start(batch["id"])

    def stop(self) -> None:
        """Cancel the tasks. Their batches remain unfinished and can be resumed."""
        for task in list(self._tasks):
            task.cancel()

    async def _run(self, batch_id: str) -> None:
        """Run a batch once the previous one has ended. Does nothing if another process runs it."""
        async with self._running:
            folder = self._records.folder(batch_id)
            if not folder.acquire():
                return
            try:
                batch = folder.read()
                if batch["status"] not in ENDED:
                    self._act_as_creator(batch)
                    await _Execution(batch, folder, self._files, self._handlers, self._repository).run()
            except Exception as error:
                failure = describe(error)
                log.error("batch %s failed: %r", batch_id, error, exc_info=None if failure.status < 500 else error)
                folder.write({**folder.read(), **_failed([LineError(failure.code, failure.message, 0)])})
            finally:
                folder.release()

    def _act_as_creator(self, batch: dict[str, Any]) -> None:
        """This task, and the requests that it runs, use the key with which the batch was created. Raises AuthenticationError."""
        name = batch.get("key_name")
        tenant = None if name is None else self._keys.named(name)
        if name is not None and tenant is None:
            raise AuthenticationError(f"the API key {name} of the batch does not exist any more.")
        act_as(tenant)


class _Execution:
    """One run of a batch, from its present state to its end."""

    def __init__(
        self, batch: dict[str, Any], folder: BatchFolder, files: FileStore, handlers: Handlers, repository: ModelRepository
    ) -> None:
        self._batch = batch
        self._folder = folder
        self._files = files
        self._handlers = handlers
        self._repository = repository

    async def run(self) -> None:
        """Check and run the requests, and store the results. A batch with invalid lines fails."""
        try:
            lines = await asyncio.to_thread(self._read_lines)
        except BatchLinesError as error:
            self._save(_failed(error.errors))
            return
        except StokerError as error:
            self._save(_failed([LineError(error.code, error.message, 0)]))
            return
        succeeded, refused = await asyncio.to_thread(lambda: (finished_ids(self._folder.output), finished_ids(self._folder.errors)))
        done, failed = succeeded | refused, len(refused)
        self._counts = {"total": len(lines), "completed": len(done) - failed, "failed": failed}
        started = self._batch["in_progress_at"] or unix_time()
        self._save({"status": "in_progress", "in_progress_at": started, "request_counts": self._counts})
        unanswered = await self._execute([line for line in lines if line.custom_id not in done])
        await asyncio.to_thread(self._finish, unanswered)

    def _read_lines(self) -> list[BatchLine]:
        """The requests of the input file. Raises StokerError."""
        return read_batch_lines(self._files.content(self._batch["input_file_id"]), (self._batch["endpoint"],))

    async def _execute(self, lines: list[BatchLine]) -> list[BatchLine]:
        """Append the results of `lines` to the files. Returns those without a result because the batch was cancelled or has expired."""
        left = {line.custom_id: line for line in lines}
        concurrent = num_concurrent(self._repository.service(self._repository.first()).info.limits.max_batch_size)
        saved = time.monotonic()
        with self._folder.output.open("ab") as output, self._folder.errors.open("ab") as errors:
            executed = execute_lines(lines, self._handlers, concurrent=concurrent, ends_early=self._ends_early)
            async with aclosing(executed) as results:
                async for result in results:
                    file = output if result.succeeded else errors
                    file.write(result.encode())
                    file.flush()
                    self._counts["completed" if result.succeeded else "failed"] += 1
                    del left[result.custom_id]
                    if time.monotonic() - saved > SAVE_S:
                        self._save({"request_counts": self._counts})
                        saved = time.monotonic()
        return list(left.values())

    def _ends_early(self) -> bool:
        """Whether the batch is cancelled or its time is over."""
        return self._folder.is_cancelled or unix_time() >= self._batch["expires_at"]

    def _finish(self, unanswered: list[BatchLine]) -> None:
        """Store the results as files and set the last status."""
        status = "completed" if not unanswered else "cancelled" if self._folder.is_cancelled else "expired"
        self._save({"status": "finalizing", "finalizing_at": unix_time(), "request_counts": self._counts})
        if status == "expired":
            with self._folder.errors.open("ab") as errors:
                for line in unanswered:
                    errors.write(unanswered_result(line, "batch_expired", "The completion window has passed.").encode())
            self._counts["failed"] += len(unanswered)
        usage = _usage(self._folder.output)
        names = {"output_file_id": self._folder.output, "error_file_id": self._folder.errors}
        files = {name: self._store(path) for name, path in names.items()}
        cancelling = {"cancelling_at": self._folder.read()["cancelling_at"]} if status == "cancelled" else {}
        self._save({"status": status, f"{status}_at": unix_time(), "request_counts": self._counts, "usage": usage, **files, **cancelling})

    def _store(self, path: Path) -> str | None:
        """The id of the file that `path` becomes; None if it is empty."""
        if not path.exists() or not path.stat().st_size:
            return None
        name = f"{self._batch['id']}_{path.name}"
        return str(self._files.move(path, name, self._batch.get("output_expires_after_s"))["id"])

    def _save(self, changes: dict[str, Any]) -> None:
        """Change members of the batch and write it."""
        self._batch |= changes
        self._folder.write(self._batch)


def _failed(errors: list[LineError]) -> dict[str, Any]:
    """The members of a batch that failed because of these lines."""
    data = [{"code": error.code, "message": error.message, "line": error.line or None, "param": error.param} for error in errors]
    return {"status": "failed", "failed_at": unix_time(), "errors": {"object": "list", "data": data}}


def _usage(path: Path) -> dict[str, Any]:
    """The usage of a batch: the sums over its results."""
    prompt = answer = cached = reasoning = 0
    for result in read_results(path):
        usage = result["response"]["body"].get("usage") or {}
        prompt += usage.get("prompt_tokens", usage.get("input_tokens", 0))
        answer += usage.get("completion_tokens", usage.get("output_tokens", 0))
        cached += usage.get("prompt_tokens_details", usage.get("input_tokens_details", {})).get("cached_tokens", 0)
        reasoning += usage.get("output_tokens_details", {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": answer,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": prompt + answer,
    }
