"""Faults of the machine: full disks, stepped clocks, descriptors and memory that run out, and 10,000 connections."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from chaos.server import get
from chaos.world import Skipped, World, fault

DISK_MIB = 64  # each frontend has files of 2 MiB for its counters
SPARE_DESCRIPTORS = 6
SPARE_MEMORY = 24 << 20
NUM_CONNECTIONS = 10_000
CLOCK_STEPS_S = (3600.0, -3600.0, 86400.0 * 400, -86400.0 * 30, 1.0, 0.0)


def mount_disk(folder: Path) -> None:
    """Mount an empty tmpfs of DISK_MIB at the folder. Raises Skipped if this process may not."""
    folder.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        raise Skipped(f"no small file system can be mounted: {mounted.stderr.strip()}")


def unmount_disk(folder: Path) -> None:
    """Undo `mount_disk`."""
    subprocess.run(["umount", "-l", folder], check=True)


@fault("the disk is full")
async def fill_disk(world: World) -> None:
    if world.disk is None:
        raise Skipped(world.disk_reason)
    filler = world.disk / "filler"
    try:
        with filler.open("wb", buffering=0) as file:
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * 65536)
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * 512)
        await asyncio.sleep(world.seconds(1, 4))
    finally:
        filler.unlink()


@fault("the clock is stepped")
async def step_clock(world: World) -> None:
    if not world.clock.exists():
        raise Skipped("there is no C compiler for the library that changes the clock")
    for _ in range(3):
        set_clock(world.clock, world.random.choice(CLOCK_STEPS_S))
        await asyncio.sleep(world.seconds(0.3, 1))


def set_clock(file: Path, offset_s: float) -> None:
    """Change the wall clock of the server."""
    with file.open("r+b") as opened:
        opened.write(struct.pack("d", offset_s))


@contextlib.contextmanager
def limited(pid: int, kind: int, soft: int) -> Iterator[None]:
    """The process has this soft limit inside the block."""
    before = resource.prlimit(pid, kind)
    try:
        resource.prlimit(pid, kind, (soft, before[1]))
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, kind, before)


@fault("a frontend has no descriptors left")
async def exhaust_descriptors(world: World) -> None:
    pid = world.one("frontend")
    highest = max(int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir())
    with limited(pid, resource.RLIMIT_NOFILE, highest + 1 + world.random.randrange(SPARE_DESCRIPTORS)):
        await asyncio.sleep(world.seconds(1, 4))


@fault("the executor has no descriptors left")
async def exhaust_executor_descriptors(world: World) -> None:
    pid = world.one("executor")
    highest = max(int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir())
    with limited(pid, resource.RLIMIT_NOFILE, highest + 1):
        await asyncio.sleep(world.seconds(1, 3))


@fault("a frontend has no memory left", replaces=True, cuts=True)
async def exhaust_memory(world: World) -> None:
    from chaos.process_faults import until_ready

    pid = world.one("frontend")
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    with limited(pid, resource.RLIMIT_AS, int(status["VmSize"].split()[0]) * 1024 + world.random.randrange(SPARE_MEMORY)):
        await asyncio.sleep(world.seconds(1, 4))
    await until_ready(world)


@fault("10,000 connections", replaces=True)
async def many_connections(world: World) -> None:
    """Open the connections, send a request over each, read the answers, and close them. Each answer is accounted for."""
    own = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (own[1], own[1]))
    number = min(NUM_CONNECTIONS, own[1] - 2000 if own[1] > 0 else NUM_CONNECTIONS)
    if number < NUM_CONNECTIONS:
        world.skipped["10,000 connections"] = f"the limit of descriptors, {own[1]}, allows {number} connections"
    opened: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    at_once = asyncio.Semaphore(256)

    async def connect() -> None:
        async with at_once:
            started = time.monotonic()
            try:
                async with asyncio.timeout(60):
                    opened.append(await asyncio.open_connection(world.server.host, world.server.port, limit=2048))
            except (OSError, TimeoutError) as error:
                world.ledger.add("connections", "lost", (started, time.monotonic()), repr(error))

    async def use(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with at_once:
            started, answer = time.monotonic(), b""
            try:
                async with asyncio.timeout(60):
                    writer.write(b"GET /health/live HTTP/1.1\r\nHost: chaos\r\n\r\n")
                    answer = await reader.readuntil(b"\r\n\r\n")
            except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                world.ledger.add("connections", "cut", (started, time.monotonic()), repr(error))
                return
            is_right = answer.startswith(b"HTTP/1.1 200 ")
            world.ledger.add("connections", "same" if is_right else "wrong", (started, time.monotonic()), answer.decode())

    await asyncio.gather(*(connect() for _ in range(number)))
    try:
        await asyncio.gather(*(use(*pair) for pair in opened))
        body = await get(world.server.host, world.server.port, "/health/live", ok_is_enough=True)
        if not body:
            raise OSError(errno.ETIMEDOUT, "health does not answer beside 10,000 connections")
    finally:
        for _, writer in opened:
            writer.transport.abort()
    await asyncio.sleep(0)


def build_clock(folder: Path) -> dict[str, str]:
    """Compile the library that changes the wall clock; returns the environment that loads it. Raises Skipped without a compiler."""
    library, file = folder / "clock.so", folder / "clock"
    try:
        source = Path(__file__).with_name("clock.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Skipped(f"the library that changes the clock cannot be compiled: {error}") from None
    file.write_bytes(struct.pack("d", 0.0))
    return {"LD_PRELOAD": os.fspath(library), "CHAOS_CLOCK": os.fspath(file)}
