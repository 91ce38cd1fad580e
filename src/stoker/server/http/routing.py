"""Routing: the target of a method and path."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from stoker.server.errors import MethodError, RouteError
from stoker.server.http.library import compile_path

MAX_CACHED = 256  # cached results

T = TypeVar("T")


class Routes(Generic[T]):
    """Targets by method and path, in Starlette's syntax: /v2/models/{model}, {name:path}. The first match is used."""

    def __init__(self, targets: Iterable[tuple[str, str, T]]) -> None:
        self._patterns: list[tuple[Any, Any, dict[str, T]]] = []
        methods_of: dict[str, dict[str, T]] = {}
        for method, path, target in targets:
            if path not in methods_of:
                pattern, _, convertors = compile_path(path)
                methods_of[path] = {}
                self._patterns.append((pattern, convertors, methods_of[path]))
            for routed_method in (method, "HEAD") if method == "GET" else (method,):
                methods_of[path].setdefault(routed_method, target)
        self._cache: dict[tuple[str, str], tuple[T, dict[str, Any]]] = {}

    def find(self, method: str, path: str) -> tuple[T, dict[str, Any]]:
        """The target and the path's parameters. Raises RouteError, or MethodError with the allowed methods."""
        result = self._cache.get((method, path))
        if result is None:
            result = self._search(method, path)
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            self._cache[method, path] = result
        return result

    def _search(self, method: str, path: str) -> tuple[T, dict[str, Any]]:
        """The target and the path parameters.

        Raises RouteError for an unknown path, MethodError if the path exists for other methods only.
        """
        allowed: list[str] = []
        for pattern, convertors, methods in self._patterns:
            if (match := pattern.match(path)) is None:
                continue
            if method in methods:
                return methods[method], {name: convertors[name].convert(value) for name, value in match.groupdict().items()}
            allowed += methods
        if allowed:
            raise MethodError(method, list(dict.fromkeys(allowed)))
        raise RouteError(path)
