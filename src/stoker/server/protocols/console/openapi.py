"""The routes of the console for /openapi.json."""

from __future__ import annotations

from stoker.server.operation import INTEGER, NUMBER, OBJECT, STRING, Operation, list_of, map_of, nullable, record

ERROR = record({"error": STRING}, "ConsoleError")

_HISTOGRAM = record({"bounds_s": list_of(NUMBER), "counts": list_of(INTEGER)})
_SERVER = record(
    {"version": STRING, "protocols": list_of(STRING), "model_control": STRING, "drain_timeout_s": NUMBER}, "ConsoleServer"
)  # fmt: skip
_LIVE = record(
    {
        "time_s": NUMBER,
        "model": STRING,
        "models": list_of(record({"name": STRING, "version": STRING, "state": STRING, "reason": STRING})),
        "unavailable": nullable(STRING),
        "state": nullable(OBJECT),
        "steps": list_of({"type": "array"}),
        "row_sets": list_of(list_of(INTEGER)),
        "names": map_of(STRING),
        "latency": map_of(_HISTOGRAM),
    },
    "ConsoleLive",
)
_ENGINE = record({"name": STRING, "memory": map_of(INTEGER), "device": STRING}, "ConsoleEngine", extra=True)
_LINE = record({"time_s": NUMBER, "level": STRING, "logger": STRING, "text": STRING, "pid": INTEGER, "process": STRING}, "ConsoleLine")

OPERATIONS = {
    ("GET", "/"): Operation(summary="The web console", response=STRING, response_type="text/html"),
    ("GET", "/console"): Operation(summary="The web console", response=STRING, response_type="text/html"),
    ("GET", "/console/{name}"): Operation(summary="A file of the web console", response=STRING, response_type="text/javascript"),
    ("GET", "/console/api/server"): Operation(summary="What the console can offer", response=_SERVER),
    ("GET", "/console/api/live"): Operation(
        summary="Queue, rows, KV blocks, latencies and steps",
        query={"first_step": {"type": "integer", "minimum": 0}, "detail": {"enum": [0, 1]}},
        response=_LIVE,
    ),
    ("GET", "/console/api/engine"): Operation(summary="The engine card", response=_ENGINE),
    ("GET", "/console/api/log"): Operation(
        summary="Recent lines of the log", query={"after": {"type": "number", "minimum": 0}}, response=record({"lines": list_of(_LINE)})
    ),
}
