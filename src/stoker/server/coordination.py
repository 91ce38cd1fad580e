"""Coordination of the frontends of one server: values that all of them have, and actions that one process runs for all.

A frontend changes a value by an action. The action returns when every frontend has applied the change, so that the next request sees it,
whichever frontend reads it. The actions run in the supervisor (`processes.coordinator`), or in this process if it is the only one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from stoker.base.logging import LogLine, recent_lines

Values: TypeAlias = dict[str, Any]  # by name; None in a change removes the value
Apply: TypeAlias = Callable[[Values], Awaitable[None]]
Action: TypeAlias = Callable[..., Awaitable[Any]]

PUT, SET, REMOVE, SIGNAL, LOG = "put", "set", "remove", "signal", "log"  # the actions that every server has


class Coordination(ABC):
    """The view of one frontend. Use it from one event loop only."""

    def __init__(self) -> None:
        self._values: Values = {}
        self._appliers: list[Apply] = []

    @property
    def values(self) -> Mapping[str, Any]:
        """The values of this server by name. Names of one kind have a common prefix."""
        return self._values

    def on_change(self, apply: Apply) -> None:
        """Call `apply` with each change. An action that causes a change returns when `apply` has returned in all frontends."""
        self._appliers.append(apply)

    @abstractmethod
    async def call(self, action: str, *arguments: Any) -> Any:
        """Run an action and return its result.

        Raises UnavailableError if the process that runs actions has ended, or the action fails there.
        """

    async def put(self, name: str, value: Any) -> bool:
        """Add a value. Returns whether it was added: False if the name has a value."""
        return bool(await self.call(PUT, name, value))

    async def set(self, name: str, value: Any) -> None:
        """Add a value, or replace the one that the name has."""
        await self.call(SET, name, value)

    async def remove(self, prefix: str) -> None:
        """Remove all values whose names begin with `prefix`."""
        await self.call(REMOVE, prefix)

    async def signal(self, name: str, value: Any) -> None:
        """Call the functions of `on_change` in all frontends with {name: value}. The value is not kept."""
        await self.call(SIGNAL, name, value)

    async def log(self, after_s: float) -> list[LogLine]:
        """The newest log lines of the process that runs the actions, logged after `after_s` (seconds since 1970)."""
        lines: list[LogLine] = await self.call(LOG, after_s)
        return lines

    @abstractmethod
    async def close(self) -> None:
        """End the connection to the process that runs actions, if there is one."""

    async def apply(self, changes: Values) -> None:
        """Apply changes in this process."""
        for name, value in changes.items():
            if value is None:
                self._values.pop(name, None)
            else:
                self._values[name] = value
        for applier in self._appliers:
            await applier(changes)


class Coordinator(Coordination):
    """Runs the actions. It is the whole coordination of a process without a supervisor."""

    def __init__(self) -> None:
        super().__init__()
        self.actions: dict[str, Action] = {PUT: self._put, SET: self._set, REMOVE: self._remove, SIGNAL: self._signal, LOG: self._log}

    async def call(self, action: str, *arguments: Any) -> Any:
        """Run the action in this process and return its result. Raises what the action raises."""
        return await self.actions[action](*arguments)

    async def close(self) -> None:
        return None

    async def publish(self, changes: Values) -> None:
        """Apply changes in all frontends. Returns when all have applied them."""
        await self.apply(changes)

    async def _put(self, name: str, value: Any) -> bool:
        """The action `put`: set a value that does not exist yet. False if it exists."""
        if name in self._values:
            return False
        await self.publish({name: value})
        return True

    async def _set(self, name: str, value: Any) -> None:
        """The action `set`: set a value, also if it exists."""
        await self.publish({name: value})

    async def _signal(self, name: str, value: Any) -> None:
        """The action `signal`: set a value and remove it again. Frontends see the change, and no value remains."""
        await self.publish({name: value})
        await self.publish({name: None})

    async def _log(self, after_s: float) -> list[LogLine]:
        """The action `log`: the newest log lines of this process."""
        return recent_lines(after_s)

    async def _remove(self, prefix: str) -> None:
        """The action `remove`: remove all values whose names start with `prefix`."""
        await self.publish({name: None for name in self._values if name.startswith(prefix)})
