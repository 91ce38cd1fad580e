"""The model repository: names, versions and states."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.base.errors import EngineError, NotFoundError, UnavailableError
from stoker.frontend.repository import ModelRepository, ModelState


def repository(error: Exception | None = None) -> tuple[ModelRepository, SimpleNamespace]:
    hooks = SimpleNamespace(gate=asyncio.Event(), loads=0, unloaded=[])

    async def load() -> Any:
        hooks.loads += 1
        await hooks.gate.wait()
        if error:
            raise error
        return SimpleNamespace(ready=True)

    async def unload(service: Any) -> None:
        await hooks.gate.wait()
        hooks.unloaded.append(service)

    models = ModelRepository()
    models.register("llama", load, unload)
    models.register("llama", load, unload, version="10")
    models.register("llama", load, unload, version="9")
    return models, hooks


async def test_life_of_a_model() -> None:
    models, hooks = repository()
    with pytest.raises(UnavailableError, match=r"'llama' is unavailable: not loaded"):
        models.service("llama")
    loading = asyncio.create_task(models.load("llama"))
    await asyncio.sleep(0)
    assert models.find("llama").state is ModelState.LOADING
    with pytest.raises(UnavailableError, match="is loading"):
        models.service("llama")
    await models.load("llama")
    hooks.gate.set()
    await loading
    assert hooks.loads == 1
    service: Any = models.service("llama")
    assert not models.ready
    await models.load("llama", "1")
    await models.load("llama", "9")
    assert models.ready
    service.ready = False
    with pytest.raises(UnavailableError, match="does not answer"):
        models.service("llama")
    hooks.gate.clear()
    unloading = asyncio.create_task(models.unload("llama"))
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError, match="is draining"):
        models.service("llama")
    with pytest.raises(UnavailableError, match="draining"):
        await models.load("llama")
    hooks.gate.set()
    await unloading
    assert hooks.unloaded == [service]
    assert (models.find("llama").state, models.find("llama").reason) == (ModelState.UNAVAILABLE, "unloaded")


async def test_highest_version_by_number() -> None:
    models, _ = repository()
    assert models.find("llama").version == "10"
    assert models.find("llama", "9").version == "9"
    assert [model.version for model in models.models()] == ["1", "10", "9"]


async def test_failed_load_is_the_reason_of_the_state() -> None:
    models, hooks = repository(EngineError("rank0.safetensors is damaged."))
    hooks.gate.set()
    with pytest.raises(EngineError):
        await models.load("llama")
    with pytest.raises(UnavailableError, match="damaged"):
        models.service("llama")


async def test_unknown_names() -> None:
    models, _ = repository()
    with pytest.raises(NotFoundError, match="Use one of: llama"):
        models.service("lama")
    with pytest.raises(NotFoundError, match=r"no version '7'.*1, 10, 9"):
        models.find("llama", "7")
    with pytest.raises(ValueError, match="twice"):
        models.register("llama", None, None)  # type: ignore[arg-type]
