"""Triton's trace extension: the trace settings of the server and of each model, which clients read and change in all frontends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.base.errors import ConfigError
from stoker.server.coordination import Coordination
from stoker.server.protocols.kserve.errors import TritonError

DEFAULTS: dict[str, Any] = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}
LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")
MODES = ("triton", "opentelemetry")
OF_SERVER = ""  # in place of a model's name
CHANGES = "triton trace settings"  # in the coordination: model, or OF_SERVER → the settings that clients have changed
MAX_COUNT = 1 << 31
_LOWEST = {"trace_rate": 1, "trace_count": -1, "log_frequency": 0}
_FIXED = {
    "trace_file": "trace file location can not be updated through network protocol",
    "trace_mode": "trace mode can not be updated through network protocol",
}


class TraceSettings:
    """The trace settings as this frontend has them. `start` are those of the server's command line."""

    def __init__(self, coordination: Coordination, start: Mapping[str, Any]) -> None:
        self._coordination = coordination
        self._start = DEFAULTS | dict(start)

    def values(self, model: str = OF_SERVER) -> dict[str, Any]:
        """The settings of a model: its own changes, then those of the server, then those of the start."""
        changes = self._changes()
        return self._start | changes.get(OF_SERVER, {}) | changes.get(model, {})

    @property
    def enabled(self) -> bool:
        """Whether requests of any model may be traced."""
        levels = [self._start["trace_level"], *(change["trace_level"] for change in self._changes().values() if "trace_level" in change)]
        return any(level != ["OFF"] for level in levels)

    async def change(self, requested: Mapping[str, Any], model: str = OF_SERVER) -> dict[str, Any]:
        """Change settings in all frontends, and return all of the model. None removes a change.

        Raises TritonError for an invalid setting, and then changes none.
        """
        changed = dict(self._changes().get(model, {}))
        for name, value in requested.items():
            if name not in DEFAULTS:
                raise TritonError(f"Unknown trace setting '{name[:80]}'. Known: {', '.join(DEFAULTS)}.")
            if name in _FIXED and value not in (None, self._start[name], [self._start[name]]):
                raise TritonError(_FIXED[name])
            if value is None:
                changed.pop(name, None)
            elif name not in _FIXED:
                changed[name] = check_setting(name, value)
        if changed.get("trace_level", ["OFF"]) != ["OFF"]:
            self._check_target()
        if requested:
            await self._coordination.set(CHANGES, self._changes() | {model: changed})
        return self.values(model)

    def _check_target(self) -> None:
        """Raise TritonError if there is no place to write traces to."""
        if self._start["trace_mode"] != "triton":
            raise TritonError("trace settings can not be updated in the mode opentelemetry")
        if not self._start["trace_file"]:
            raise TritonError(
                "trace_level can not be enabled: the server was started without a trace file (tritonserver --trace-config triton,file=FILE)"
            )

    def _changes(self) -> dict[str, dict[str, Any]]:
        """The changes of clients by model."""
        changes: dict[str, dict[str, Any]] = self._coordination.values.get(CHANGES, {})
        return changes


def check_setting(name: str, value: Any) -> Any:
    """The value of a setting in Triton's form: texts, and a list of texts for trace_level. Raises TritonError."""
    if name == "trace_level":
        levels = value if isinstance(value, list) else [value]
        if not levels or len(levels) > len(LEVELS) or any(level not in LEVELS for level in levels) or ("OFF" in levels and len(levels) > 1):
            raise TritonError(f"trace setting 'trace_level' must be OFF, or a list of {' and '.join(LEVELS[1:])}.")
        return list(dict.fromkeys(levels))
    text = value[0] if isinstance(value, list) and len(value) == 1 else value
    text = str(text) if type(text) is int else text
    if not isinstance(text, str) or not text.removeprefix("-").isdecimal() or not text.isascii() or len(text) > 11:
        raise TritonError(f"trace setting '{name}' must be a whole number.")
    if not _LOWEST[name] <= int(text) <= MAX_COUNT:
        raise TritonError(f"trace setting '{name}' must be from {_LOWEST[name]} to {MAX_COUNT}.")
    return str(int(text))


def read_trace_config(texts: list[str]) -> tuple[dict[str, Any], str | None]:
    """The trace settings of the options --trace-config, and the URL of the collector in the mode opentelemetry. Raises ConfigError."""
    settings: dict[str, Any] = {}
    url = None
    for text in texts:
        name, equals, value = text.partition("=")
        mode, comma, own = name.rpartition(",")
        if not equals or (comma and mode not in MODES):
            raise ConfigError(f"--trace-config={text!r} is refused.", cure="Use SETTING=VALUE, or MODE,SETTING=VALUE.")
        match mode, own:
            case "", "level":
                settings["trace_level"] = [*settings.get("trace_level", []), value]
            case "", "rate" | "count":
                settings[f"trace_{own}"] = value
            case "", "mode" if value in MODES:
                settings["trace_mode"] = value
            case "triton", "file" if value:
                settings["trace_file"] = value
            case "triton", "log-frequency":
                settings["log_frequency"] = value
            case "opentelemetry", "url" if value:
                url = value
            case _:
                known = "level, rate, count, mode=triton, mode=opentelemetry, triton,file, triton,log-frequency and opentelemetry,url"
                raise ConfigError(f"--trace-config={text!r} is refused.", cure=f"Use one of {known}.")
    try:
        settings |= {name: check_setting(name, settings[name]) for name in ("trace_level", *_LOWEST) if name in settings}
    except TritonError as error:
        raise ConfigError(f"--trace-config: {error}") from None
    if settings.get("trace_level", ["OFF"]) != ["OFF"]:
        if settings.get("trace_mode") == "opentelemetry" and url is None:
            raise ConfigError("--trace-config mode=opentelemetry has no collector.", cure="Add --trace-config opentelemetry,url=URL.")
        if settings.get("trace_mode") != "opentelemetry" and not settings.get("trace_file"):
            raise ConfigError("--trace-config has a level and no file.", cure="Add --trace-config triton,file=FILE.")
    return settings, url
