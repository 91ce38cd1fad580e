"""Faults of models: unloading and loading while requests run, and engines that are damaged when they are loaded."""

from __future__ import annotations

import asyncio

from chaos.engines import DAMAGES, damage
from chaos.process_faults import until_ready
from chaos.server import post
from chaos.world import Skipped, World, fault

LLM = "tensorrt_llm"


async def control(world: World, action: str) -> tuple[int, str]:
    """Load or unload the language model and, with an unload, those that depend on it."""
    parameters = {"parameters": {"unload_dependents": True}} if action == "unload" else {}
    name = LLM if action == "load" else "ensemble"
    return await post(world.server.host, world.server.port, f"/v2/repository/models/{name}/{action}", parameters)


async def load(world: World) -> None:
    """Load all models again. Raises RuntimeError if the server refuses."""
    for name in (LLM, "preprocessing", "postprocessing", "tensorrt_llm_bls", "ensemble"):
        status, text = await post(world.server.host, world.server.port, f"/v2/repository/models/{name}/load", {})
        if status != 200:
            raise RuntimeError(f"{name} could not be loaded again: {status} {text}")
    await until_ready(world)


@fault("the model is unloaded and loaded", replaces=True)
async def unload(world: World) -> None:
    status, text = await control(world, "unload")
    if status != 200:
        raise RuntimeError(f"the model could not be unloaded: {status} {text}")
    await asyncio.sleep(world.seconds(0.2, 1))
    await load(world)


@fault("a damaged engine is loaded", replaces=True)
async def load_damaged(world: World) -> None:
    """Loading must fail with a reason that names the engine's folder. Afterwards the undamaged engine is loaded."""
    if world.stub:
        raise Skipped("the stub executor reads no weights")
    kind = world.random.choice(DAMAGES)
    damaged = await asyncio.to_thread(damage, world.engine, world.folder / "damaged", kind, world.random)
    file = world.server.repository / LLM / "config.pbtxt"
    original = file.read_text()
    try:
        file.write_text(original.replace(str(world.engine), str(damaged)))
        status, text = await control(world, "load")
        if status == 200 or str(damaged) not in text:
            raise RuntimeError(f"an engine with {kind} was loaded with status {status}: {text}")
    finally:
        file.write_text(original)
    await load(world)
