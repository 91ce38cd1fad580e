"""The field table of tritonserver's command line. `stoker tritonserver` has an option for each row."""

from __future__ import annotations

from typing import Any, Literal

from stoker.base.fields.table import FieldRow, FieldTable
from stoker.base.fields.values import Flag, Line, Text, ValueType, Whole, exactly

_BOOL = Flag({"true": True, "1": True, "false": False, "0": False})
_PORT, _SIZE, _ANY = Whole(0, 65535), Whole(0, 1 << 40), Text(1 << 16)

_OWN_MEMORY = "Stoker allocates its memory itself"
_OWN_THREADS = "the frontends are asynchronous; instance_group.count sets their number"
_NO_BACKENDS = "Stoker loads no backend libraries"
_GRPC = "Stoker has fixed values, which suit streams of tokens"
_KEYS = ("endpoints are not restricted one by one", "Serve with API keys: stoker serve REPOSITORY --api-keys FILE.")
_TLS = ("it protects gRPC only", "Use HTTPS and gRPC with TLS: stoker serve REPOSITORY --tls-certificate FILE --tls-key FILE.")


class ServerOption(FieldRow, frozen=True, kw_only=True):
    """One option of tritonserver. `argument` is "one" (it has a value), "many" (it may be repeated) or "flag" (it has no value)."""

    argument: Literal["one", "many", "flag"] = "one"


def _accepted(name: str, type: ValueType, meaning: str, target: str, **more: Any) -> ServerOption:
    """A row for an option that is used."""
    return ServerOption(name=name, status="accepted", type=type, meaning=meaning, target=target, **more)


def _no_effect(name: str, type: ValueType, reason: str, **more: Any) -> ServerOption:
    """A row for an option without effect."""
    return ServerOption(name=name, status="no effect", type=type, reason=reason, **more)


def _rejected(name: str, type: ValueType, reason: str, *harmless: Any, cure: str = "", **more: Any) -> ServerOption:
    """A row for an option that is not supported."""
    return ServerOption(name=name, status="rejected", type=type, reason=reason, harmless=harmless, alternative=cure, **more)


SERVER_OPTIONS = FieldTable(
    (
        _accepted("model-repository", Line(), "The model repository.", "repository", argument="many"),
        _accepted("model-store", Line(), "The same.", "repository", argument="many"),
        _accepted(
            "model-control-mode",
            exactly("none", "explicit"),
            "none: all models are loaded. explicit: those of --load-model are loaded, and clients may load and unload models.",
            "options.model_control",
        ),
        _accepted(
            "load-model",
            Line(),
            "With --model-control-mode=explicit: load this model at the start; * loads all.",
            "load_models",
            argument="many",
        ),
        _accepted(
            "strict-readiness", _BOOL, "false: the server is ready before its models are. Default: true.", "options.strict_readiness"
        ),
        _accepted("id", Line(), "The name of the server in its metadata. Default: triton.", "options.server_name"),
        _accepted(
            "exit-timeout-secs", Whole(0, 86400), "Seconds that requests in flight may take at the end. Default: 30.", "drain_timeout_s"
        ),
        _accepted("http-address", Line(), "Address to listen on. Default: 0.0.0.0.", "host"),
        _accepted("grpc-address", Line(), "The same; all addresses must be equal.", "host"),
        _accepted("metrics-address", Line(), "The same; all addresses must be equal.", "host"),
        _accepted("http-port", _PORT, "HTTP port; 0 chooses a free port. Default: 8000.", "http_port"),
        _accepted("grpc-port", _PORT, "gRPC port; 0 chooses a free port. Default: 8001.", "grpc_port"),
        _accepted("metrics-port", _PORT, "Metrics port; 0 chooses a free port. Default: 8002.", "metrics_port"),
        _accepted("allow-grpc", _BOOL, "false: no gRPC port.", "allow_grpc"),
        _accepted("allow-metrics", _BOOL, "false: no metrics port. The HTTP port has /metrics in any case.", "allow_metrics"),
        _accepted(
            "http-max-input-size", Whole(1 << 10, 1 << 32), "Maximum size of a request in bytes. Default: 16 MiB.", "max_request_bytes"
        ),
        _accepted(
            "shared-memory",
            Line(),
            "Stoker's own option. Shared memory that clients may register: a pattern of keys such as /input_*, or cuda:0. Default: none.",
            "shared_memory",
            argument="many",
        ),
        _accepted(
            "with-test-models",
            _BOOL,
            "Stoker's own option. Also serve the models of tritonclient's examples.",
            "test_models",
            argument="flag",
        ),
        _accepted("console", _BOOL, "Stoker's own option. Also serve the web console at /.", "console", argument="flag"),
        _accepted("log-verbose", Whole(0, 1 << 31), "Above 0: debug messages are logged, too.", "log_verbose"),
        _accepted("log-info", _BOOL, "false: only warnings and errors are logged.", "log_info"),
        _accepted("log-warning", _BOOL, "false, with --log-info=false: only errors are logged.", "log_warning"),
        _accepted("log-format", exactly("default", "ISO8601", "JSON"), "default, ISO8601 or JSON, which is Stoker's own.", "log_format"),
        _accepted("log-file", Line(), "Append the log to this file instead of writing it to standard error.", "log_file"),
        _rejected(
            "allow-http", _BOOL, "health checks and the repository API are on the HTTP port", True, cure="Choose another --http-port."
        ),
        _rejected("log-error", _BOOL, "errors are always logged", True),
        _accepted(
            "exit-on-error",
            _BOOL,
            "false: the server stays, not ready, if its executor cannot start, for example for lack of memory. Default: true.",
            "exit_on_error",
        ),
        _rejected("reuse-http-port", _BOOL, "several servers on one port are not supported", False, cure="Raise instance_group.count."),
        _rejected("reuse-grpc-port", _BOOL, "several servers on one port are not supported", False, cure="Raise instance_group.count."),
        _rejected("model-namespacing", _BOOL, "one repository is served", False),
        _rejected(
            "allow-sagemaker", _BOOL, "it is a protocol of stoker serve", False, cure="Use stoker serve REPOSITORY --protocol sagemaker."
        ),
        _rejected("allow-vertex-ai", _BOOL, "Vertex AI is not supported", False),
        _rejected("grpc-use-ssl", _BOOL, _TLS[0], False, cure=_TLS[1]),
        _rejected("grpc-use-ssl-mutual", _BOOL, _TLS[0], False, cure=_TLS[1]),
        _rejected("http-restricted-api", _ANY, _KEYS[0], cure=_KEYS[1], argument="many"),
        _rejected("grpc-restricted-protocol", _ANY, _KEYS[0], cure=_KEYS[1], argument="many"),
        _accepted(
            "trace-config",
            Line(),
            "Traces: level=TIMESTAMPS or TENSORS, rate=N, count=N, triton,file=FILE, triton,log-frequency=N, or mode=opentelemetry with "
            "opentelemetry,url=URL.",
            "trace_config",
            argument="many",
        ),
        _rejected("cache-config", _ANY, "responses are not cached", cure="Set enable_kv_cache_reuse in config.pbtxt.", argument="many"),
        _rejected("response-cache-byte-size", _SIZE, "responses are not cached", 0, cure="Set enable_kv_cache_reuse in config.pbtxt."),
        _rejected("rate-limit", _ANY, "the queue of tensorrt_llm bounds requests", "off", cure="Set max_queue_size in config.pbtxt."),
        _rejected("rate-limit-resource", _ANY, "the queue of tensorrt_llm bounds requests", cure="Set max_queue_size.", argument="many"),
        _no_effect("disable-auto-complete-config", _BOOL, "a config.pbtxt is never completed", argument="flag"),
        _no_effect("strict-model-config", _BOOL, "a config.pbtxt is never completed"),
        _no_effect("backend-config", _ANY, _NO_BACKENDS, argument="many"),
        _no_effect("backend-directory", _ANY, _NO_BACKENDS),
        _no_effect("repoagent-directory", _ANY, _NO_BACKENDS),
        _no_effect("cache-directory", _ANY, _NO_BACKENDS),
        _no_effect("host-policy", _ANY, "gpu_device_ids selects the devices", argument="many"),
        _no_effect("min-supported-compute-capability", _ANY, "an engine states the device that it was built for"),
        _no_effect("pinned-memory-pool-byte-size", _SIZE, _OWN_MEMORY),
        _no_effect("cuda-memory-pool-byte-size", _ANY, _OWN_MEMORY, argument="many"),
        _no_effect("cuda-virtual-address-size", _ANY, _OWN_MEMORY, argument="many"),
        _no_effect("enable-peer-access", _BOOL, "ranks use peer memory where it is faster"),
        _no_effect("model-load-gpu-limit", _ANY, "kv_cache_free_gpu_mem_fraction bounds the memory", argument="many"),
        _no_effect("model-load-thread-count", _SIZE, "one engine is loaded"),
        _no_effect("model-load-retry-count", _SIZE, "one engine is loaded"),
        _no_effect("buffer-manager-thread-count", _SIZE, _OWN_THREADS),
        _no_effect("http-thread-count", _SIZE, _OWN_THREADS),
        _no_effect("http-header-forward-pattern", _ANY, "the models use no headers"),
        _no_effect("grpc-header-forward-pattern", _ANY, "the models use no headers"),
        _no_effect("grpc-infer-thread-count", _SIZE, _OWN_THREADS),
        _no_effect("grpc-infer-allocation-pool-size", _SIZE, _OWN_MEMORY),
        _no_effect("grpc-max-response-pool-size", _SIZE, _OWN_MEMORY),
        _no_effect("grpc-infer-response-compression-level", _ANY, "clients choose the compression"),
        _no_effect("grpc-keepalive-time", _SIZE, _GRPC),
        _no_effect("grpc-keepalive-timeout", _SIZE, _GRPC),
        _no_effect("grpc-keepalive-permit-without-calls", _BOOL, _GRPC),
        _no_effect("grpc-http2-max-pings-without-data", _SIZE, _GRPC),
        _no_effect("grpc-http2-min-recv-ping-interval-without-data", _SIZE, _GRPC),
        _no_effect("grpc-http2-max-ping-strikes", _SIZE, _GRPC),
        _no_effect("grpc-max-connection-age", _SIZE, _GRPC),
        _no_effect("grpc-max-connection-age-grace", _SIZE, _GRPC),
        _no_effect("repository-poll-secs", _SIZE, "the repository is not polled"),
        _no_effect("allow-gpu-metrics", _BOOL, "memory is in the metrics of the engine; use DCGM for the GPU's own"),
        _no_effect("allow-cpu-metrics", _BOOL, "use the node exporter for metrics of the machine"),
        _no_effect("metrics-interval-ms", _SIZE, "metrics are read when they are requested"),
        _no_effect("metrics-config", _ANY, "all metrics are exported", argument="many"),
        _no_effect("grpc-server-cert", _ANY, "it is used with --grpc-use-ssl only"),
        _no_effect("grpc-server-key", _ANY, "it is used with --grpc-use-ssl only"),
        _no_effect("grpc-root-cert", _ANY, "it is used with --grpc-use-ssl only"),
    ),
    noun="option",
)
