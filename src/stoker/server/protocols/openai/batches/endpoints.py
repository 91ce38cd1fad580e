"""The endpoints of files and batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from stoker.base.errors import RequestError
from stoker.server.http.form_data import FormPart, read_form
from stoker.server.http.json_body import INLINE_BYTES
from stoker.server.http.request_context import RequestContext
from stoker.server.protocol import Context, Endpoint
from stoker.server.protocols.openai import response_json as wire
from stoker.server.protocols.openai.batches.execution import Handlers
from stoker.server.protocols.openai.batches.fields import PURPOSES, TABLE
from stoker.server.protocols.openai.batches.files import MAX_FILES, FileStore, read_expiry
from stoker.server.protocols.openai.batches.records import ENDED, BatchRecords
from stoker.server.protocols.openai.batches.runner import BatchRunner
from stoker.server.protocols.openai.lists import list_page, read_query
from stoker.server.protocols.openai.responses.request import MAX_METADATA
from stoker.server.tenants.accepted_keys import AcceptedKeys
from stoker.server.tenants.tenants import current_tenant

CONTENT_TYPE = b"application/octet-stream"
_FORM_FIELDS = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")


class Batches:
    """The endpoints below /v1/files and /v1/batches. `handlers` are those of the routes that a batch may use."""

    def __init__(self, context: Context, handlers: Handlers) -> None:
        self._context = context
        self._handlers = handlers
        context.background.append(self._resume)

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("POST", "/v1/files", self.upload),
            Endpoint("GET", "/v1/files", self.list_files),
            Endpoint("GET", "/v1/files/{file_id}", self.file),
            Endpoint("DELETE", "/v1/files/{file_id}", self.delete_file),
            Endpoint("GET", "/v1/files/{file_id}/content", self.content),
            Endpoint("POST", "/v1/batches", self.create),
            Endpoint("GET", "/v1/batches", self.list_batches),
            Endpoint("GET", "/v1/batches/{batch_id}", self.batch),
            Endpoint("POST", "/v1/batches/{batch_id}/cancel", self.cancel),
        ]

    async def upload(self, http: RequestContext) -> None:
        """POST /v1/files: store a file. Raises RequestError for unknown fields, and FilesFullError."""
        self._context.default_service()  # while the model loads, a temporary directory is not the one of the server
        form = await http.compute(read_form, http.headers.get(b"content-type", b""), await http.body())
        for name in form:
            if name not in _FORM_FIELDS:
                raise RequestError(name, form[name].data, "there is no such field", cure=f"Use {', '.join(_FORM_FIELDS)}.")
        if "file" not in form:
            raise RequestError("file", None, "it is missing")
        purpose = form["purpose"].text("purpose") if "purpose" in form else None
        if purpose not in PURPOSES:
            raise RequestError("purpose", purpose, f"it must be {' or '.join(PURPOSES)}")
        expiry = _form_expiry(form)
        part = form["file"]
        file = await asyncio.to_thread(self._files.add, part.data, part.filename or "file", purpose, expiry)
        await http.respond(200, wire.encode(file))

    async def list_files(self, http: RequestContext) -> None:
        """GET /v1/files: a page of files, with this purpose if the query names one."""
        query = read_query(http)
        files = [file for file in await asyncio.to_thread(self._files.list) if query.get("purpose") in (None, file["purpose"])]
        await http.respond(200, wire.encode(list_page(files, query, max_limit=MAX_FILES, default=MAX_FILES)))

    async def file(self, http: RequestContext) -> None:
        """GET /v1/files/{file_id}."""
        await http.respond(200, wire.encode(self._files.get(http.path["file_id"])))

    async def delete_file(self, http: RequestContext) -> None:
        """DELETE /v1/files/{file_id}."""
        self._files.delete(http.path["file_id"])
        await http.respond(200, wire.encode({"id": http.path["file_id"], "object": "file", "deleted": True}))

    async def content(self, http: RequestContext) -> None:
        """GET /v1/files/{file_id}/content."""
        data = await asyncio.to_thread(self._files.content, http.path["file_id"])
        await http.respond(200, data, CONTENT_TYPE)

    async def create(self, http: RequestContext) -> None:
        """Create a batch and run it in the background. Its lines are checked there, and errors are part of the batch."""
        values = TABLE.check(await http.json(max_bytes=INLINE_BYTES))
        for name in ("input_file_id", "endpoint", "completion_window"):
            if name not in values:
                raise RequestError(name, None, "it is missing")
        if len(values.get("metadata", {})) > MAX_METADATA:
            raise RequestError("metadata", values["metadata"], f"it has more than {MAX_METADATA} entries")
        expires = values.pop("output_expires_after", None)
        expiry = read_expiry(expires.get("anchor"), expires.get("seconds"), "output_expires_after") if expires is not None else None
        service = self._context.default_service()
        if self._files.get(values["input_file_id"])["purpose"] != "batch":
            raise RequestError("input_file_id", values["input_file_id"], "the purpose of the file is not batch")
        tenant = current_tenant()
        own = {"model": service.model_name, "output_expires_after_s": expiry, "key_name": None if tenant is None else tenant.name}
        batch = await asyncio.to_thread(self._records.create, **{"metadata": None, **values, **own})
        self._runner.start(batch["id"])
        await http.respond(200, wire.encode(_public(batch)))

    async def list_batches(self, http: RequestContext) -> None:
        """GET /v1/batches: a page of batches."""
        page = list_page(await asyncio.to_thread(self._records.list), read_query(http))
        await http.respond(200, wire.encode({**page, "data": [_public(batch) for batch in page["data"]]}))

    async def batch(self, http: RequestContext) -> None:
        """GET /v1/batches/{batch_id}."""
        await http.respond(200, wire.encode(_public(self._records.folder(http.path["batch_id"]).read())))

    async def cancel(self, http: RequestContext) -> None:
        """Cancel a batch. The results so far are stored, and requests in flight are cancelled."""
        folder = self._records.folder(http.path["batch_id"])
        if (batch := folder.read())["status"] in ENDED:
            raise RequestError("batch_id", batch["id"], f"the batch is {batch['status']}")
        folder.cancel()
        await http.respond(200, wire.encode(_public(folder.read())))

    def _resume(self) -> Callable[[], None]:
        """Continue unfinished batches of an earlier server."""
        self._runner.resume()
        return self._runner.stop

    @property
    def _files(self) -> FileStore:
        return self._open()[0]

    @property
    def _records(self) -> BatchRecords:
        return self._open()[1]

    @property
    def _runner(self) -> BatchRunner:
        return self._open()[2]

    def _open(self) -> tuple[FileStore, BatchRecords, BatchRunner]:
        """The files, the batches and their runner, which the first use opens."""
        shared = self._context.shared
        if "batches" not in shared:
            path = self._context.state_directory().path
            files = FileStore(path / "files", self._context.settings.max_stored_bytes)
            records = BatchRecords(path / "batches")
            keys = AcceptedKeys.of(self._context)
            shared["batches"] = (files, records, BatchRunner(records, files, self._handlers, self._context.repository, keys))
        opened: tuple[FileStore, BatchRecords, BatchRunner] = shared["batches"]
        return opened


_OWN = ("output_expires_after_s", "key_name")  # members that clients do not receive


def _public(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch without the members that only Stoker uses."""
    return {name: value for name, value in batch.items() if name not in _OWN}


def _form_expiry(form: dict[str, FormPart]) -> int | None:
    """How many seconds the file is kept, from expires_after[…]. None: without end. Raises RequestError."""
    names = ("expires_after[anchor]", "expires_after[seconds]")
    if not any(name in form for name in names):
        return None
    anchor, seconds = (form[name].text(name) if name in form else None for name in names)
    return read_expiry(anchor, seconds, "expires_after")
