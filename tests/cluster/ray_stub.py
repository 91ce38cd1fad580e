"""`stoker serve` for tests and measurements of Ray: the real server with a stub service, whose steps take 20 ms and have up to 4 sequences.

PYTHONPATH=tests/server:tests/frontend python ray_stub.py serve --config FILE --stop-at-eof
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import yaml
from scripted_service import ScriptedService, make_context

from stoker.base.types import Delta
from stoker.frontend.service import GenerationRequest
from stoker.runtime.request import ExecutorStats
from stoker.server.application import make_app
from stoker.server.processes.child import end_at_eof
from stoker.server.processes.frontend import HttpServer, http_config
from stoker.server.protocols.kserve.grpc.server import make_grpc_server

STEP_S = 0.02
MAX_ROWS = 4


class SteppingService(ScriptedService):
    """Each of up to MAX_ROWS sequences gets a token every STEP_S seconds; further sequences wait."""

    def __init__(self, name: str) -> None:
        super().__init__("Hello there " * 50, name=name, max_input_len=1 << 14, max_output_len=600, max_batch_size=MAX_ROWS)
        self._rows = asyncio.Semaphore(MAX_ROWS)
        self.num_requests = 0

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[list[Delta], None]:
        self.num_requests += 1
        try:
            async with self._rows:
                async for batch in super().stream(request):
                    await asyncio.sleep(STEP_S)
                    yield batch
        finally:
            self.num_requests -= 1

    async def stats(self) -> ExecutorStats:
        running = min(self.num_requests, MAX_ROWS)
        return ExecutorStats(
            num_running=running, num_waiting=self.num_requests - running, num_blocks=MAX_ROWS, num_free_blocks=MAX_ROWS - running,
            max_batch_size=MAX_ROWS,
        )  # fmt: skip


async def main() -> None:
    options = yaml.safe_load(Path(sys.argv[3]).read_text())
    grpc_port = options.get("grpc-port")
    context = await make_context(
        SteppingService(options["model-name"]), grpc_port=grpc_port, drain_timeout_s=options["drain-timeout-s"], log_requests="none"
    )
    grpc_server = make_grpc_server(context, f"{options['host']}:{grpc_port}")
    await grpc_server.start()
    server = HttpServer(http_config(make_app(context), context.settings))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, lambda: setattr(server, "should_exit", True))
    end_at_eof()
    listener = socket.create_server((options["host"], options["port"]))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.002)
    print(f"{options['model-name']} is served at http://{options['host']}:{options['port']} (ready after 0.1 s)", flush=True)
    await serving
    await grpc_server.stop(1)


if __name__ == "__main__":
    asyncio.run(main())
