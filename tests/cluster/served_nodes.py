"""`stoker serve` on several hosts of a Network, and requests to it."""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from pathlib import Path
from subprocess import Popen
from typing import Any

from hosts import Host, Network

TOKEN = "a shared secret of the tests"
PROMPTS = ["the quick brown fox", "lazy dog the", "jumps over the lazy dog the quick brown fox jumps over", "a"]
MAX_TOKENS = 24


class ServedNodes:
    """One server over several hosts. Node N runs on host N."""

    def __init__(self, network: Network, folder: Path, port: int = 8000) -> None:
        self.network, self.folder, self.port = network, folder, port
        self.processes: dict[int, Popen[bytes]] = {}

    def start(self, rank: int, engine: Path, *options: str, token: str = TOKEN, nnodes: int | None = None) -> Popen[bytes]:
        """Start a node."""
        hosts = self.network.hosts
        rendezvous = f"{hosts[0].address}:{self.port + 1000}"
        command = [
            sys.executable, "-m", "stoker", "serve", str(engine), "--nnodes", str(nnodes or len(hosts)), "--node-rank", str(rank),
            "--rendezvous", rendezvous, "--host", "0.0.0.0", "--port", str(self.port), "--num-threads", "1", "--drain-timeout-s", "20",
            *options,
        ]  # fmt: skip
        self.processes[rank] = hosts[rank].start(command, self.log_file(rank), STOKER_CLUSTER_TOKEN=token, OMP_NUM_THREADS="1")
        return self.processes[rank]

    def start_all(self, engine: Path, *options: str) -> None:
        """Start all nodes, and wait until node 0 serves."""
        for rank in range(len(self.network.hosts)):
            self.start(rank, engine, *options)
        self.wait_until_served()

    def log_file(self, rank: int) -> Path:
        return self.folder / f"{self.port}-node{rank}.log"

    def log(self, rank: int) -> str:
        return self.log_file(rank).read_text()

    def wait_for(self, rank: int, text: str, timeout_s: float = 100) -> None:
        """Wait until a node has logged `text`. Fails if node 0 ends."""
        deadline = time.monotonic() + timeout_s
        while text not in self.log(rank):
            assert time.monotonic() < deadline and self.processes[0].poll() is None, self.all_logs()
            time.sleep(0.05)

    def wait_until_served(self) -> None:
        self.wait_for(0, "is served at")

    def all_logs(self) -> str:
        return "\n".join(f"--- node {rank}\n{self.log(rank)}" for rank in self.processes)

    def post(self, body: dict[str, Any], timeout_s: float = 30) -> dict[str, Any]:
        """Send a request from the host of node 0."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with self.host.entered(), urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return dict(json.load(answer))

    def complete(self, max_tokens: int = MAX_TOKENS) -> list[str]:
        """The greedy completions of PROMPTS."""
        name = "engine"
        body = {"model": name, "prompt": PROMPTS, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return [choice["text"] for choice in sorted(self.post(body)["choices"], key=lambda choice: int(choice["index"]))]

    @property
    def host(self) -> Host:
        return self.network.hosts[0]
