"""The environment variables of an LMI container, as keys of serving.properties.

OPTION_X sets option.x, ARGS_X and SERVING_X set x; other variables have a row below.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from collections.abc import Mapping as Environment

from stoker.deploy.collected_settings import FoundValue, invalid_value
from stoker.deploy.deployment import Origin
from stoker.deploy.lmi.keys import canonical_key

ORIGIN = Origin("environment")

# Environment variable → the key that it sets unless the file sets it.
ENVIRONMENT = {
    "HF_MODEL_ID": "option.model_id",
    "HF_REVISION": "option.revision",
    "HF_TASK": "option.task",
    "HF_MODEL_TRUST_REMOTE_CODE": "option.trust_remote_code",
    "HF_TRUST_REMOTE_CODE": "option.trust_remote_code",
    "TENSOR_PARALLEL_DEGREE": "option.tensor_parallel_degree",
    "PIPELINE_PARALLEL_DEGREE": "option.pipeline_parallel_degree",
    "MAX_BATCH_SIZE": "option.max_rolling_batch_size",
    "MAX_CONCURRENT_REQUESTS": "job_queue_size",
}

# Environment variable → the key that it sets even if the file sets it. SageMaker sets these variables in a container.
OVERRIDES = {
    "SAGEMAKER_STARTUP_TIMEOUT": "option.model_loading_timeout",
    "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": "option.predict_timeout",
    "SAGEMAKER_NUM_MODEL_WORKERS": "minWorkers",
    "SAGEMAKER_MAX_REQUEST_SIZE": "max_request_size",
    "SAGEMAKER_BIND_TO_PORT": "http_port",
    "SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT": "default_invocations_accept",
}

# Environment variable → the key that it sets unless anything else sets it.
FALLBACKS = {
    "MODEL_LOADING_TIMEOUT": "option.model_loading_timeout",
    "PREDICT_TIMEOUT": "option.predict_timeout",
    "DJL_ENTRY_POINT": "option.entryPoint",
}


def sagemaker_variables(environment: Environment[str, str]) -> Iterator[FoundValue]:
    """The variables of OVERRIDES, and the payload limit in MiB. Raises ConfigError when that is not a whole number."""
    for name, key in OVERRIDES.items():
        if environment.get(name):
            yield FoundValue(key, environment[name], ORIGIN, name)
    megabytes = environment.get("SAGEMAKER_MAX_PAYLOAD_IN_MB", "")
    if megabytes and not environment.get("SAGEMAKER_MAX_REQUEST_SIZE"):
        if not (megabytes.isascii() and megabytes.isdigit() and len(megabytes) < 7):
            limit = "it must be a whole number below 1000000"
            raise invalid_value(ORIGIN, "SAGEMAKER_MAX_PAYLOAD_IN_MB", megabytes, limit, "Correct the value.")
        yield FoundValue("max_request_size", str(int(megabytes) << 20), ORIGIN, "SAGEMAKER_MAX_PAYLOAD_IN_MB")


def named_variables(environment: Environment[str, str]) -> Iterator[FoundValue]:
    """The variables that have a row in ENVIRONMENT."""
    for name, key in ENVIRONMENT.items():
        if environment.get(name):
            yield FoundValue(key, environment[name], ORIGIN, name)


def option_variables(environment: Environment[str, str]) -> Iterator[FoundValue]:
    """The variables OPTION_X and ARGS_X, which set option.x. Empty values count as unset.

    An X of capitals, digits and _ is converted to lower case.
    """
    for name, value in environment.items():
        prefix = next((prefix for prefix in ("OPTION_", "ARGS_") if name.startswith(prefix) and name != prefix), None)
        if prefix and value:
            rest = name.removeprefix(prefix)
            rest = rest.lower() if re.fullmatch("[A-Z_0-9]+", rest) else rest
            yield FoundValue(canonical_key(f"option.{rest}"), value, ORIGIN, name)


def serving_variables(environment: Environment[str, str]) -> Iterator[FoundValue]:
    """The variables SERVING_X, which set x in lower case."""
    for name, value in environment.items():
        if name.startswith("SERVING_") and value and name != "SERVING_":
            yield FoundValue(canonical_key(name.removeprefix("SERVING_").lower()), value, ORIGIN, name)


def fallback_variables(environment: Environment[str, str]) -> Iterator[FoundValue]:
    """The time-outs and the handler that LMI's images set for all models."""
    for name, key in FALLBACKS.items():
        if environment.get(name):
            yield FoundValue(key, environment[name], ORIGIN, name)
