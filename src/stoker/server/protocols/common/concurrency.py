"""Running several coroutines at the same time, without leaving any behind after an error."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def gather(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order. The first error cancels the other coroutines and is then raised."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
