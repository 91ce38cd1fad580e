"""Requests to a Triton server through tritonclient: input tensors from plain values, and batches of random token ids."""

from __future__ import annotations

import http.client
import importlib
import re
from contextlib import closing
from typing import Any

import numpy as np

from stoker.base import env
from stoker.base.config import check_range
from stoker.base.errors import ConfigError, DependencyError, StokerError, UnavailableError
from stoker.server.protocols.kserve.model_config import Tensor
from stoker.server.protocols.kserve.model_config import tensors as declared_tensors
from stoker.server.protocols.kserve.tensors.dtypes import DTYPES, kserve_name, text_array

FIRST_TOKEN_ID = 3  # smaller ids are special tokens in most vocabularies
MAX_COUNT = 1 << 20
CONNECT_TIMEOUT_S = 10.0
_END_ID, _PAD_ID = 2, 0
_ADDRESS = re.compile(r"(?:\[[0-9a-fA-F:.%]+\]|[^\s:/\[\]]+):(\d{1,5})", re.ASCII)

_RENAMED = {"min_length": "min_tokens", "random_seed": "seed"}  # in release 1.x
_INPUTS: dict[str, Tensor] = {
    tensor.name: tensor for kind in ("tensorrt_llm", "tensorrt_llm_bls", "ensemble") for tensor in declared_tensors(kind)[0]
}


def import_tritonclient(protocol: str) -> Any:
    """The module tritonclient.grpc or tritonclient.http. Raises DependencyError when it is not installed."""
    try:
        return importlib.import_module(f"tritonclient.{protocol}")
    except ImportError:
        raise DependencyError("tritonclient", "this command", "grpc") from None


def check_address(url: str) -> None:
    """Raise ConfigError unless `url` is host:port, without a scheme or path."""
    match = _ADDRESS.fullmatch(url)
    if match is None or not 0 < int(match[1]) < 1 << 16:
        raise ConfigError(f"url={url!r} is refused.", cure="Use host:port, such as localhost:8001.")


def check_server(client: Any, url: str, protocol: str) -> None:
    """Raise UnavailableError if no Triton server answers a tritonclient at its address."""
    from tritonclient.utils import InferenceServerException

    is_grpc = protocol == "grpc"
    try:
        client.is_server_live(**({"client_timeout": CONNECT_TIMEOUT_S} if is_grpc else {}))
    except (OSError, http.client.HTTPException) as error:
        raise no_server(url, protocol, error) from None
    except InferenceServerException as error:
        if not is_grpc or error.status() in ("StatusCode.UNAVAILABLE", "StatusCode.DEADLINE_EXCEEDED"):
            raise no_server(url, protocol) from None


def no_server(url: str, protocol: str, error: Exception | None = None) -> UnavailableError:
    """The error for an address at which no server of `protocol` answers. A port of the other protocol is recognized."""
    if protocol == "grpc" and _answers_http(url):
        cure = "Name the server's gRPC port (Triton's is 8001, Stoker's that of --grpc-port), or use stoker client --protocol http."
        return UnavailableError(f"{url} is an HTTP port.", cure=cure)
    if protocol == "http" and _answers_grpc(url):
        return UnavailableError(f"{url} is a gRPC port.", cure="Name the server's HTTP port, or use stoker client --protocol grpc.")
    port = "--grpc-port 8001" if protocol == "grpc" else "--port 8000"
    reason = getattr(error, "strerror", None) or str(error or f"no {protocol} server listens there")
    return UnavailableError(f"{url} does not answer: {reason}.", cure=f"Start it: stoker serve MODEL {port}, or correct --url.")


def _answers_http(url: str) -> bool:
    """Whether an HTTP server answers at an address host:port."""
    try:
        connection = http.client.HTTPConnection(url, timeout=CONNECT_TIMEOUT_S)
        with closing(connection):
            connection.request("GET", "/v2/health/live")
            connection.getresponse()
    except (OSError, ValueError, http.client.HTTPException):
        return False
    return True


def _answers_grpc(url: str) -> bool:
    """Whether a gRPC server answers at an address host:port. False if the client library is not installed."""
    try:
        tritonclient = import_tritonclient("grpc")
    except DependencyError:
        return False
    from tritonclient.utils import InferenceServerException

    try:
        with tritonclient.InferenceServerClient(url) as client:
            client.is_server_live(client_timeout=CONNECT_TIMEOUT_S)
    except InferenceServerException as error:
        return error.status() not in ("StatusCode.UNAVAILABLE", "StatusCode.DEADLINE_EXCEEDED", None)
    return True


def key_headers() -> dict[str, str] | None:
    """The header with the API key in STOKER_API_KEY, or None without a key."""
    key = env.api_key()
    return None if key is None else {"authorization": f"Bearer {key}"}


def declared_inputs(client: Any, model: str, headers: dict[str, str] | None) -> dict[str, str]:
    """Name → data type of the inputs in the metadata of a model. Raises InferenceServerException for an unknown model."""
    metadata = client.get_model_metadata(model, headers=headers)
    if isinstance(metadata, dict):
        return {tensor["name"]: tensor["datatype"] for tensor in metadata["inputs"]}
    return {tensor.name: tensor.datatype for tensor in metadata.inputs}


def input_tensors(tritonclient: Any, values: dict[str, Any], dtypes: dict[str, str]) -> list[Any]:
    """InferInput objects of shape [1, number of values] for one request.

    `dtypes` are those of the inputs that the model declares. Release 1.x has other names for two inputs, and 0.5 has unsigned numbers.
    """
    inputs = []
    for given, value in values.items():
        renamed = _RENAMED.get(given, given)
        name = renamed if given not in dtypes and renamed in dtypes else given
        dtype = dtypes.get(name) or kserve_name(_INPUTS[name].dtype)
        items = value if isinstance(value, list) else [value]
        shape = (1, len(items))
        array = text_array([item.encode() for item in items], shape) if dtype == "BYTES" else np.array([items], DTYPES[dtype])
        inputs.append(_infer_input(tritonclient, name, dtype, array))
    return inputs


def random_token_inputs(
    tritonclient: Any,
    *,
    batch_size: int,
    start_len: int,
    output_len: int,
    vocab_size: int,
    beam_width: int = 1,
    top_k: int = 1,
    top_p: float = 0.0,
) -> list[Any]:
    """The inputs of `batch_size` prompts of `start_len` random tokens for the tensorrt_llm model. Raises ConfigError for a bad size."""
    check_sizes(start_len, output_len, vocab_size, batch_size=batch_size)
    ids = np.random.default_rng(0).integers(FIRST_TOKEN_ID, vocab_size, (batch_size, start_len), np.int32)
    scalars: dict[str, tuple[float, type[np.generic]]] = {
        "input_lengths": (start_len, np.int32), "request_output_len": (output_len, np.int32), "end_id": (_END_ID, np.int32),
        "pad_id": (_PAD_ID, np.int32), "runtime_top_k": (top_k, np.int32), "runtime_top_p": (top_p, np.float32),
        "beam_width": (beam_width, np.int32),
    }  # fmt: skip
    columns = {name: np.full((batch_size, 1), value, dtype) for name, (value, dtype) in scalars.items()}
    return [
        _infer_input(tritonclient, name, "FP32" if array.dtype == np.float32 else "INT32", array)
        for name, array in {"input_ids": ids, **columns}.items()
    ]


def check_sizes(start_len: int, output_len: int, vocab_size: int, **counts: int) -> None:
    """Raise ConfigError for a length, vocabulary size or count from which no random request can be made."""
    for name, value in {**counts, "start_len": start_len, "output_len": output_len}.items():
        check_range(name, value, 1, MAX_COUNT)
    check_range("vocab_size", vocab_size, FIRST_TOKEN_ID + 1, 1 << 31)


def infer(client: Any, model: str, inputs: list[Any]) -> Any:
    """Call `client.infer` with the API key in STOKER_API_KEY. An error of the server is raised as StokerError with its message."""
    from tritonclient.utils import InferenceServerException

    try:
        return client.infer(model, inputs, headers=key_headers())
    except InferenceServerException as error:
        raise StokerError(f"the server answered: {error.message()}") from None


def _infer_input(tritonclient: Any, name: str, dtype: str, array: Any) -> Any:
    """An `InferInput` with the content of a numpy array.

    `tritonclient` is tritonclient.http or .grpc; `dtype` is Triton's name, such as INT32.
    """
    tensor = tritonclient.InferInput(name, list(array.shape), dtype)
    tensor.set_data_from_numpy(array)
    return tensor
