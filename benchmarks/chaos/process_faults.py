"""Faults of processes: killed and stopped frontends, executors, ranks, renderers and grammar compilers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

from chaos.world import World, fault

READY_S = 60.0  # limit for the server to be ready again


async def until_ready(world: World) -> None:
    """Return when the server is ready. Raises RuntimeError after READY_S, because a client would find it broken."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(READY_S):
            while not await world.server.is_ready():
                if world.server.process.poll() is not None:
                    break
                await asyncio.sleep(0.1)
            else:
                return
    raise RuntimeError(f"the server was not ready {READY_S:.0f} s after a fault; its status is {world.server.process.poll()}")


async def kill(world: World, role: str) -> None:
    """Kill one process with this role, and wait until another one runs."""
    if not world.may_kill("executor" if role == "rank" else role):
        return
    pid = world.one(role)
    before = set(world.server.pids(role))
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(READY_S):
            while len(set(world.server.pids(role)) - {pid}) < len(before):
                await asyncio.sleep(0.1)
    await until_ready(world)


async def suspend(world: World, role: str, seconds: float) -> None:
    """Stop one process with SIGSTOP for some seconds."""
    pid = world.one(role)
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    await until_ready(world)


@fault("a frontend is killed", role="frontend", replaces=True, cuts=True)
async def kill_frontend(world: World) -> None:
    await kill(world, "frontend")


@fault("a frontend is stopped")
async def stop_frontend(world: World) -> None:
    await suspend(world, "frontend", world.seconds(1, 5))


@fault("the executor is stopped")
async def stop_executor(world: World) -> None:
    await suspend(world, "executor", world.seconds(0.5, 3))


@fault("the executor is stopped longer than its timeout", replaces=True)
async def stop_executor_long(world: World) -> None:
    if not world.may_kill("executor"):  # the supervisor may end it
        return
    await suspend(world, "executor", world.step_timeout_s * 1.5)


@fault("a renderer is killed", role="renderer", replaces=True)
async def kill_renderer(world: World) -> None:
    os.kill(world.one("renderer"), signal.SIGKILL)
    await asyncio.sleep(world.seconds(0.5, 2))


@fault("a renderer is stopped", role="renderer")
async def stop_renderer(world: World) -> None:
    await suspend(world, "renderer", world.seconds(1, 3))


@fault("the grammar compiler is killed", role="compiler", replaces=True)
async def kill_compiler(world: World) -> None:
    os.kill(world.one("compiler"), signal.SIGKILL)
    await asyncio.sleep(world.seconds(0.5, 2))


@fault("a rank is stopped", role="rank")
async def stop_rank(world: World) -> None:
    await suspend(world, "rank", world.seconds(0.5, 3))


@fault("the executor is killed", replaces=True)
async def kill_executor(world: World) -> None:
    await kill(world, "executor")


@fault("a rank is killed", role="rank", replaces=True)
async def kill_rank(world: World) -> None:
    await kill(world, "rank")
