"""Stored responses: a SQLite database in the state directory, which all frontend processes share. Its size is bounded."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from stoker.base.errors import NotFoundError
from stoker.server.errors import StorageError
from stoker.server.state_directory import StateDirectory

Args = ParamSpec("Args")
Result = TypeVar("Result")

FILE = "responses.sqlite"
UNFINISHED = ("queued", "in_progress")
BUSY_TIMEOUT_S = 10.0  # for a transaction of another process
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL, status TEXT NOT NULL, size INTEGER NOT NULL,
    body BLOB NOT NULL, input BLOB NOT NULL, context BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS total (size INTEGER NOT NULL);
INSERT INTO total SELECT 0 WHERE NOT EXISTS (SELECT * FROM total);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON responses BEGIN UPDATE total SET size = size + new.size; END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON responses BEGIN UPDATE total SET size = size - old.size; END;
CREATE TRIGGER IF NOT EXISTS changed AFTER UPDATE ON responses BEGIN UPDATE total SET size = size + new.size - old.size; END;
"""


class UnknownResponseError(NotFoundError):
    """No stored response has this id."""

    code = "response_not_found"

    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"there is no stored response {response_id[:80]!r}.",
            cure="It was deleted, was created with store=false, or was evicted because newer ones fill --max-stored-bytes.",
        )


class StoredResponse(msgspec.Struct):
    """One record. `input` holds the items of the response's own input, `context` all items of the conversation before it."""

    body: dict[str, Any]
    input: list[dict[str, Any]]
    context: list[dict[str, Any]]
    owner: str = ""

    @property
    def status(self) -> str:
        """The status of the response: completed, incomplete, queued, in_progress, cancelled or failed."""
        return str(self.body["status"])


class ResponseStore:
    """Responses by id. When they exceed `max_bytes`, the oldest ones are deleted."""

    def __init__(self, state: StateDirectory, max_bytes: int) -> None:
        self._state = state
        self._max_bytes = max_bytes
        os.close(os.open(state.path / FILE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))  # SQLite's own files get the same permissions
        self._database = sqlite3.connect(state.path / FILE, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=OFF")  # survives the end of the server, not a crash of the machine
        self._database.executescript(_SCHEMA)

    def put(self, response: StoredResponse) -> None:
        """Add a response, or replace the one with its id."""
        body, own, context = (msgspec.json.encode(part) for part in (response.body, response.input, response.context))
        size = len(body) + len(own) + len(context)
        row = (response.body["id"], self._state.owner, response.status, size, body, own, context)
        with self._transaction():
            self._database.execute(
                "INSERT INTO responses (id, owner, status, size, body, input, context) VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) "
                "DO UPDATE SET owner = excluded.owner, status = excluded.status, size = excluded.size, body = excluded.body",
                row,
            )
            self._evict()

    def finish(self, body: dict[str, Any]) -> bool:
        """Replace the body of an unfinished response. Returns False if it was cancelled, deleted or evicted in the meantime."""
        encoded = msgspec.json.encode(body)
        with self._transaction():
            row = self._database.execute("SELECT status, input, context FROM responses WHERE id = ?", (body["id"],)).fetchone()
            if row is None or row[0] not in UNFINISHED:
                return False
            self._database.execute(
                "UPDATE responses SET status = ?, body = ?, size = ? WHERE id = ?",
                (body["status"], encoded, len(encoded) + len(row[1]) + len(row[2]), body["id"]),
            )
            self._evict()
        return True

    def get(self, response_id: str) -> StoredResponse:
        """The stored response. If its process ended before it was complete, its status is failed. Raises UnknownResponseError."""
        query = "SELECT body, input, context, owner FROM responses WHERE id = ?"
        row = self._database.execute(query, (response_id,)).fetchone()
        if row is None:
            raise UnknownResponseError(response_id)
        body, own, context = (msgspec.json.decode(part) for part in row[:3])
        found = StoredResponse(body, own, context, row[3])
        if found.status in UNFINISHED and not self._state.is_running(found.owner):
            found.body |= {"status": "failed", "error": {"code": "server_error", "message": "The server ended before the response did."}}
            self.finish(found.body)
        return found

    def is_unfinished(self, response_id: str) -> bool:
        """Whether the response is queued or in progress, as opposed to ended, cancelled or deleted."""
        row = self._database.execute("SELECT status FROM responses WHERE id = ?", (response_id,)).fetchone()
        return row is not None and row[0] in UNFINISHED

    def delete(self, response_id: str) -> None:
        """Delete a response. Raises UnknownResponseError."""
        with self._transaction():
            if not self._database.execute("DELETE FROM responses WHERE id = ?", (response_id,)).rowcount:
                raise UnknownResponseError(response_id)

    def _evict(self) -> None:
        """Delete the oldest responses until the rest fits, except for the newest one."""
        while self._database.execute("SELECT size FROM total").fetchone()[0] > self._max_bytes:
            oldest = (
                "DELETE FROM responses WHERE number = (SELECT min(number) FROM responses) AND number < (SELECT max(number) FROM responses)"
            )
            if not self._database.execute(oldest).rowcount:
                return

    def _transaction(self) -> _Transaction:
        """A context manager for one transaction of the database."""
        return _Transaction(self._database)


class StoreThread:
    """A store that is used in a thread of its own. Its calls may wait for the disk, and for a transaction of another process."""

    def __init__(self, state: Callable[[], StateDirectory], max_bytes: int) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="stored-responses")
        self._state = state
        self._max_bytes = max_bytes
        self._store: ResponseStore | None = None

    async def call(self, function: Callable[Concatenate[ResponseStore, Args], Result], *args: Args.args, **kwargs: Args.kwargs) -> Result:
        """The result of a method of ResponseStore. The first call opens the store. Raises the errors of the method, ConfigError, and
        StorageError if the database cannot be written.
        """

        def run() -> Result:
            """Call the method in the thread of the store."""
            try:
                return function(self._opened(), *args, **kwargs)
            except sqlite3.OperationalError as error:
                raise StorageError(self._state().path / FILE, error) from None

        return await asyncio.get_running_loop().run_in_executor(self._executor, run)

    def _opened(self) -> ResponseStore:
        """The store."""
        if self._store is None:
            self._store = ResponseStore(self._state(), self._max_bytes)
        return self._store


class _Transaction:
    """BEGIN IMMEDIATE … COMMIT, or ROLLBACK after an exception, that of COMMIT included."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def __enter__(self) -> None:
        self._database.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._database.execute("COMMIT")
        finally:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")


def unix_time() -> int:
    """Seconds since 1970, as in OpenAI's objects."""
    return int(time.time())
