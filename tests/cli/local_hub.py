"""A stand-in for the Hugging Face hub on the loopback interface: serves folders as model repositories of one commit."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "a" * 40


class Handler(BaseHTTPRequestHandler):
    """The routes of the hub that snapshot_download calls."""

    server: LocalHub

    def do_GET(self) -> None:
        self.server.requested.append(self.path)
        if self.path.endswith(".safetensors") and self.command == "GET":
            self.server.weights_may_be_sent.wait(50)
        status, headers, body = self._reply(self.path.partition("?")[0])
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body)), "Content-Type": "application/json"} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def _reply(self, path: str) -> tuple[int, dict[str, str], bytes]:
        for repository, folder in self.server.repositories.items():
            files = {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
            if path.startswith(f"/api/models/{repository}/tree/"):
                return 200, {}, json.dumps([self._entry(name, data) for name, data in files.items()]).encode()
            if path.partition("/revision/")[0] == f"/api/models/{repository}":
                siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
                return 200, {}, json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode()
            name = path.removeprefix(f"/{repository}/resolve/{COMMIT}/")
            if name in files:
                return 200, {"ETag": f'"{hashlib.sha1(files[name]).hexdigest()}"', "X-Repo-Commit": COMMIT}, files[name]
        return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"

    @staticmethod
    def _entry(name: str, data: bytes) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

    def log_message(self, *args: Any) -> None:
        """Print nothing."""


class LocalHub(ThreadingHTTPServer):
    """`repositories`: ORG/NAME → folder. `requested`: paths. While `weights_may_be_sent` is not set, weights wait."""

    def __init__(self, repositories: dict[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories = repositories
        self.requested: list[str] = []
        self.weights_may_be_sent = threading.Event()
        self.weights_may_be_sent.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def environment(self, cache: Path) -> dict[str, str]:
        """Variables with which huggingface_hub uses this hub and an empty cache."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}


@contextmanager
def local_hub(repositories: dict[str, Path]) -> Iterator[LocalHub]:
    """A running hub."""
    hub = LocalHub(repositories)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
