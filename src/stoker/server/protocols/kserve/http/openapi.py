"""The operations of KServe v2 with Triton's extensions for /openapi.json."""

from __future__ import annotations

from stoker.base.fields.json_schema import Schema
from stoker.server.operation import (
    BOOLEAN,
    INTEGER,
    JSON_TYPE,
    NUMBER,
    OBJECT,
    STRING,
    TEXT_TYPE,
    Operation,
    list_of,
    map_of,
    one_of,
    record,
)

MODEL = "/v2/models/{model}"
VERSIONED = f"{MODEL}/versions/{{version}}"
ERROR = record({"error": STRING}, "TritonError")

_PARAMETERS: Schema = map_of(one_of(STRING, NUMBER, BOOLEAN))
_SHAPE: Schema = list_of(INTEGER)
_TENSOR_METADATA = record({"name": STRING, "datatype": STRING, "shape": _SHAPE}, "TensorMetadata")
_METADATA = record(
    {
        "name": STRING,
        "versions": list_of(STRING),
        "platform": STRING,
        "inputs": list_of(_TENSOR_METADATA),
        "outputs": list_of(_TENSOR_METADATA),
    },
    "ModelMetadata",
)
_CONFIG_TENSOR = record({"name": STRING, "data_type": STRING, "dims": _SHAPE}, "ConfigTensor", extra=True)
_CONFIG = record(
    {
        "name": STRING,
        "platform": STRING,
        "backend": STRING,
        "max_batch_size": INTEGER,
        "input": list_of(_CONFIG_TENSOR),
        "output": list_of(_CONFIG_TENSOR),
        "parameters": map_of(record({"string_value": STRING})),
        "model_transaction_policy": record({"decoupled": BOOLEAN}),
    },
    "ModelConfig",
    extra=True,
)
_DURATION = record({"count": INTEGER, "ns": INTEGER}, "Duration")
_STATISTICS = record(
    {
        "name": STRING,
        "version": STRING,
        "last_inference": INTEGER,
        "inference_count": INTEGER,
        "execution_count": INTEGER,
        "inference_stats": map_of(_DURATION),
        "response_stats": OBJECT,
        "batch_stats": list_of(OBJECT),
        "memory_usage": list_of(OBJECT),
    },
    "ModelStatistics",
)
_ALL_STATISTICS = record({"model_stats": list_of(_STATISTICS)})
_TENSOR = {"name": STRING, "shape": _SHAPE, "datatype": STRING, "parameters?": _PARAMETERS}
_INFER = record(
    {
        "id?": one_of(STRING, INTEGER),
        "parameters?": _PARAMETERS,
        "inputs": list_of(record({**_TENSOR, "data?": {"type": "array"}}, "InferInput", extra=True)),
        "outputs?": list_of(record({"name": STRING, "parameters?": _PARAMETERS}, "RequestedOutput", extra=True)),
    },
    "InferRequest",
    extra=True,
)
_INFERRED = record(
    {
        "id?": STRING,
        "model_name": STRING,
        "model_version": STRING,
        "parameters?": _PARAMETERS,
        "outputs": list_of(record({**_TENSOR, "data?": {"type": "array"}}, "InferOutput")),
    },
    "InferResponse",
)
_VALUE: Schema = one_of(STRING, NUMBER, BOOLEAN, {"type": "array"})
_GENERATE = record({"id?": one_of(STRING, INTEGER), "parameters?": OBJECT, "text_input?": _VALUE}, "GenerateRequest", extra=True)
_GENERATED = record({"id?": STRING, "model_name": STRING, "model_version": STRING}, "GenerateResponse", extra=True)
_TRACE_SETTINGS = record(
    {
        "trace_level": list_of(STRING),
        "trace_rate": STRING,
        "trace_count": STRING,
        "log_frequency": STRING,
        "trace_file": STRING,
        "trace_mode": STRING,
    },
    "TraceSettings",
)
_LOG_MEMBERS = {
    "log_file": STRING,
    "log_info": BOOLEAN,
    "log_warning": BOOLEAN,
    "log_error": BOOLEAN,
    "log_verbose_level": {"type": "integer", "minimum": 0, "maximum": 4},
    "log_format": STRING,
}
_LOG_SETTINGS = record(_LOG_MEMBERS, "LogSettings")
_INDEX = list_of(record({"name": STRING, "version?": STRING, "state?": STRING, "reason?": STRING}, "RepositoryModel"))
_REGION = record(
    {"name": STRING, "key?": STRING, "offset?": INTEGER, "device_id?": INTEGER, "byte_size": INTEGER},
    "SharedMemoryRegion",
)


def _of_models() -> dict[tuple[str, str], Operation]:
    """The operations of a model, with and without its version."""
    operations: dict[tuple[str, str], Operation] = {}
    for base, suffix in ((MODEL, ""), (VERSIONED, " of a version")):
        operations |= {
            ("GET", base): Operation(summary=f"Inputs and outputs{suffix}", response=_METADATA),
            ("GET", f"{base}/ready"): Operation(summary=f"Readiness{suffix}: status 200 or 400", error_types=(TEXT_TYPE,)),
            ("GET", f"{base}/config"): Operation(summary=f"The model config{suffix}", response=_CONFIG),
            ("GET", f"{base}/stats"): Operation(summary=f"Counts and durations{suffix}", response=_ALL_STATISTICS),
            ("POST", f"{base}/infer"): Operation(
                summary=f"Inference{suffix} with tensors, as JSON or as bytes after the JSON",
                body=_INFER,
                response=_INFERRED,
                error_types=(JSON_TYPE, TEXT_TYPE),
            ),
            ("POST", f"{base}/generate"): Operation(
                summary=f"Generate{suffix} with inputs as JSON members: one response", body=_GENERATE, response=one_of(_GENERATED, ERROR)
            ),
            ("POST", f"{base}/generate_stream"): Operation(
                summary=f"Generate{suffix} with inputs as JSON members: events", body=_GENERATE, stream=one_of(_GENERATED, ERROR)
            ),
        }
    return operations


def _of_shared_memory() -> dict[tuple[str, str], Operation]:
    """The operations of the shared memory endpoints, by method and path."""
    operations: dict[tuple[str, str], Operation] = {}
    system = record({"key": STRING, "offset?": INTEGER, "byte_size": INTEGER}, "SystemRegion", extra=True)
    cuda = record({"raw_handle": record({"b64": STRING}, extra=True), "device_id": INTEGER, "byte_size": INTEGER}, "CudaRegion", extra=True)
    for kind, body in (("system", system), ("cuda", cuda)):
        base = f"/v2/{kind}sharedmemory"
        for path, regions in ((base, "all regions"), (f"{base}/region/{{region}}", "a region")):
            operations[("GET", f"{path}/status")] = Operation(summary=f"Status of {regions} of {kind} memory", response=list_of(_REGION))
            operations[("POST", f"{path}/unregister")] = Operation(summary=f"Unregister {regions} of {kind} memory")
        operations[("POST", f"{base}/region/{{region}}/register")] = Operation(summary=f"Register a region of {kind} memory", body=body)
    return operations


OPERATIONS = {
    ("GET", "/v2"): Operation(
        summary="Name, version and extensions of the server",
        response=record({"name": STRING, "version": STRING, "extensions": list_of(STRING)}, "ServerMetadata"),
    ),
    ("GET", "/v2/health/live"): Operation(summary="Liveness: status 200"),
    ("GET", "/v2/health/ready"): Operation(summary="Readiness: status 200 or 503"),
    ("GET", "/v2/models/stats"): Operation(summary="Counts and durations of all models", response=_ALL_STATISTICS),
    ("POST", "/v2/repository/index"): Operation(
        summary="The models of the repository", body=record({"ready?": BOOLEAN}, extra=True), body_required=False, response=_INDEX
    ),
    ("POST", "/v2/repository/models/{model}/load"): Operation(
        summary="Load a model", body=record({"parameters?": OBJECT}, extra=True), body_required=False
    ),
    ("POST", "/v2/repository/models/{model}/unload"): Operation(
        summary="Unload a model", body=record({"parameters?": OBJECT}, extra=True), body_required=False
    ),
    ("GET", "/v2/logging"): Operation(summary="Log settings", response=_LOG_SETTINGS),
    ("POST", "/v2/logging"): Operation(
        summary="Change log settings", body=record({f"{name}?": schema for name, schema in _LOG_MEMBERS.items()}), response=_LOG_SETTINGS
    ),
    **{("GET", f"{base}/trace/setting"): Operation(summary="Trace settings", response=_TRACE_SETTINGS) for base in ("/v2", MODEL)},
    **{
        ("POST", f"{base}/trace/setting"): Operation(
            summary="Change trace settings; null removes a change", body=OBJECT, response=_TRACE_SETTINGS
        )
        for base in ("/v2", MODEL)
    },
    **_of_models(),
    **_of_shared_memory(),
}
