"""Keys of serving.properties that configure the model server: queue, batches, workers, addresses. They have no prefix `option.`."""

from __future__ import annotations

from stoker.base.fields.table import accepted, no_effect, rejected
from stoker.base.fields.values import Flag, Line, ListOf, Whole, names

ONE_COPY = "in-flight batching serves all requests with one copy of the model; there are no worker processes"
_JAVA_SERVER = "it is a setting of the Java server, which Stoker replaces"
_FLAG, _TEXT, _UNSIGNED = Flag(), Line(allow_empty=True), Whole(0)

SERVER_ROWS = (
    no_effect("engine", names("Python", "MPI", "DeepSpeed"), "Stoker is the engine"),
    accepted("job_queue_size", Whole(1, 1 << 24), "default 1000", "runtime.max_queue_size"),
    accepted("batch_size", Whole(1, 65536), "a value above 1 disables the rolling batch, as in LMI", "options.batch_size"),
    no_effect("max_batch_delay", Whole(0, 3_600_000), "requests are batched in flight and do not wait for others"),
    no_effect("max_idle_time", _UNSIGNED, ONE_COPY),
    no_effect("minWorkers", _UNSIGNED, ONE_COPY),
    no_effect("maxWorkers", _UNSIGNED, ONE_COPY),
    no_effect("min_workers", _UNSIGNED, ONE_COPY),
    no_effect("max_workers", _UNSIGNED, ONE_COPY),
    *(no_effect(f"{device}.{name}", _UNSIGNED, ONE_COPY) for device in ("gpu", "cpu") for name in ("minWorkers", "maxWorkers")),
    accepted("load_on_devices", _TEXT, "one index per rank, separated by ;, or *", "runtime.devices"),
    accepted("max_request_size", Whole(1 << 10, 1 << 32), "bytes; default 6553500", "server.max_request_bytes"),
    accepted("http_port", Whole(0, 65535), "a key of Stoker; default 8080", "server.http_port"),
    no_effect("default_invocations_accept", Line(), "the body of a request selects the response format, not Accept, as in LMI"),
    no_effect("max_response_size", _UNSIGNED, "responses are streamed and not stored in one buffer"),
    no_effect("log_model_metric", _FLAG, "metrics are always at /metrics"),
    no_effect("features", _TEXT, "it selects parts of the DJL image"),
    no_effect("load_models", _TEXT, "the folder on the command line is served"),
    no_effect("model_store", _TEXT, "the folder on the command line is served"),
    no_effect("number_of_netty_threads", _UNSIGNED, _JAVA_SERVER),
    no_effect("netty_client_threads", _UNSIGNED, _JAVA_SERVER),
    no_effect("prefer_direct_buffer", _FLAG, _JAVA_SERVER),
    no_effect("retry_count", _UNSIGNED, "a failed request does not affect others; there is no worker to restart"),
    no_effect("management_address", _TEXT, "all endpoints have one address"),
    no_effect("wait_model_loading", _FLAG, "the port answers while the model loads, and /ping reports when it is ready"),
    accepted(
        "cors_allowed_origin", ListOf(Line(), 64), "origins of web pages that may call, separated by commas, or *", "server.cors_origins"
    ),
    accepted("certificate_file", Line(), "a PEM file; with private_key_file, the server uses HTTPS", "server.tls_certificate"),
    accepted("private_key_file", Line(), "a PEM file with the key of certificate_file", "server.tls_key"),
    rejected("keystore", "Java key stores are not read", "", type=_TEXT, alternative="Set certificate_file and private_key_file."),
    no_effect("required_memory_mb", _UNSIGNED, "memory is estimated and checked before the load"),
    no_effect("reserved_memory_mb", _UNSIGNED, "memory is estimated and checked before the load"),
)
