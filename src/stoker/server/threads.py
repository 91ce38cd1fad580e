"""Moves long computations out of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

LONG_TOKENS = 4096  # processing this many tokens one by one takes about 2 ms
Result = TypeVar("Result")


async def compute(function: Callable[..., Result], *args: Any, long: bool) -> Result:
    """`function(*args)`. If it is `long`, it runs in a thread, so that other requests of this process continue.

    The calls inside `function` must release the interpreter lock, or end soon.
    """
    return await asyncio.to_thread(function, *args) if long else function(*args)
