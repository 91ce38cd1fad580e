"""The models of a Triton repository as plain data, from which metadata, configs and the validation of requests are derived."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from stoker.base.config import check_choice, check_range
from stoker.server.protocols.kserve.tensors.table import TENSORS, Dims, Era, TensorRow

KINDS = tuple(TENSORS)  # the five models of a repository; a model of any name has one of these kinds
CONTROL_MODES = ("none", "explicit")
DECODING_MODES = ("auto", "top_k", "top_p", "top_k_top_p", "beam_search")
MAX_BATCH_SIZE = 1 << 20
MAX_INSTANCES = 1 << 10
NO_QUEUE_LIMIT = 1 << 24  # Triton's max_queue_size 0: the largest value of RuntimeConfig


class Tensor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One declared tensor. `dims` do not include the batch axis."""

    name: str
    dtype: str  # STRING, INT32, UINT64, FP32, FP16, BOOL, …
    dims: Dims
    optional: bool = False
    ragged: bool = False  # allow_ragged_batch
    scalar: bool = False  # reshape: { shape: [ ] }
    role: str = ""  # its name in release 0.18: random_seed for seed

    @property
    def data_type(self) -> str:
        """The tensor's dtype as an enum name of model_config.proto, such as TYPE_INT32."""
        return f"TYPE_{self.dtype}"


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step of an ensemble: tensors of the model by name → tensors of the ensemble."""

    model_name: str
    model_version: int = -1
    input_map: dict[str, str] = {}
    output_map: dict[str, str] = {}


class QueuePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """dynamic_batching.default_queue_policy and other fields of dynamic_batching. Times are in microseconds, as in the file."""

    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_us: int = 0
    max_queue_size: int = 0  # 0: no limit
    timeout_us: int = 0  # default_timeout_microseconds: limit of the waiting time; 0: no limit
    allow_timeout_override: bool = False  # a request's `timeout` parameter may shorten it
    priority_levels: int = 0  # 0: requests have no priority
    default_priority_level: int = 0


class TritonModel(msgspec.Struct, frozen=True, kw_only=True):
    """One model directory."""

    name: str
    kind: str  # one of KINDS; "test" for a model that needs no engine
    platform: str = ""
    backend: str = ""
    max_batch_size: int = 0  # rows of one request; 0: tensors have no batch axis
    decoupled: bool = False  # a request may have any number of responses
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    instance_count: int = 1
    queue: QueuePolicy | None = None  # None: the file has no dynamic_batching
    steps: tuple[Step, ...] = ()  # of an ensemble
    parameters: dict[str, str] = {}  # as in the file

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, (*KINDS, "test"))
        check_range("max_batch_size", self.max_batch_size, 0, MAX_BATCH_SIZE)
        check_range("instance_count", self.instance_count, 1, MAX_INSTANCES)

    def input(self, name: str) -> Tensor | None:
        """The declared input with this name, if there is one."""
        return next((t for t in self.inputs if t.name == name), None)


class ModelStatus(msgspec.Struct, frozen=True):
    """The state of a model in the repository index: READY, LOADING, UNLOADING or UNAVAILABLE."""

    state: str = "READY"
    reason: str = ""


TRITON = "triton"  # the name of a Triton server in its metadata, which clients compare
UNLOADED = ModelStatus("UNAVAILABLE", "unloaded")


class TritonOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the KServe protocol, read from a Triton repository."""

    models: tuple[TritonModel, ...] = ()
    max_beam_width: int = 1  # maximum beam_width of a request
    decoding_mode: str = "auto"  # top_k ignores a request's top_p, top_p its top_k; the others use both. beam_width > 1 searches beams
    exclude_input_in_output: bool = False  # default of the input of this name: a whole answer does not contain the prompt
    normalize_log_probs: bool = True  # cum_log_probs are divided by the number of tokens
    accumulate_tokens: bool = False  # each streamed text_output of tensorrt_llm_bls contains all text so far
    unary: bool = False  # decoupled models also accept infer calls that do not stream; for engines without a repository
    model_control: str = "none"  # explicit: clients may load and unload models
    load_models: tuple[str, ...] = ("*",)  # explicit: the models to load at the start, with the models of their steps; *: all
    strict_readiness: bool = True  # the server is ready when all of its loaded models are
    batch_sizes: dict[str, int] = {}  # model → max_batch_size that a client has set while loading it
    server_name: str = "stoker"  # in the metadata of the server
    trace: dict[str, Any] = {}  # trace settings at the start, as in tracing/settings.py

    def __post_init__(self) -> None:
        check_range("max_beam_width", self.max_beam_width, 1, 1024)
        check_choice("decoding_mode", self.decoding_mode, DECODING_MODES)
        check_choice("model_control", self.model_control, CONTROL_MODES)

    def is_loaded_at_start(self, name: str) -> bool:
        """Whether a model is loaded at the start."""
        all_models = self.model_control != "explicit" or "*" in self.load_models
        return all_models or any(name in self.with_steps(loaded) for loaded in self.load_models)

    def with_steps(self, name: str) -> list[str]:
        """The name of a model and those of the models that it runs as an ensemble."""
        return [name, *(step.model_name for model in self.models if model.name == name for step in model.steps)]

    def of_kind(self, kind: str) -> TritonModel | None:
        """The first model of this kind, if there is one."""
        return next((m for m in self.models if m.kind == kind), None)


def tensors(kind: str, era: Era = "0.18") -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(inputs, outputs) of a kind of model in the templates of the release `era`."""
    inputs, outputs = TENSORS[kind]
    return tuple(_declare(inputs, era, inputs=True)), tuple(_declare(outputs, era, inputs=False))


def tensors_of_all_releases(kind: str) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(inputs, outputs) of release 0.18, then those that only 1.x has or that it names differently."""
    (old_inputs, old_outputs), (new_inputs, new_outputs) = tensors(kind), tensors(kind, "1.x")
    return _merge(old_inputs, new_inputs), _merge(old_outputs, new_outputs)


def _merge(old: tuple[Tensor, ...], new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """`old`, and the tensors of `new` whose names do not occur in it."""
    names = {tensor.name for tensor in old}
    return (*old, *(tensor for tensor in new if tensor.name not in names))


def _declare(rows: Iterable[TensorRow], era: Era, *, inputs: bool) -> Iterable[Tensor]:
    """The tensors that the templates of release `era` declare. Inputs that are not required are optional."""
    for row in rows:
        dims = row.dims[era]
        if dims is not None:
            yield Tensor(
                name=row.name_in(era),
                dtype=row.dtype,
                dims=dims,
                optional=inputs and not row.required,
                ragged=row.layout == "ragged",
                scalar=row.layout == "scalar",
                role=row.name,
            )
