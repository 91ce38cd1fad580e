"""Messages between node 0 and another node, and the comparison of what two nodes run."""

from __future__ import annotations

import hashlib
import platform
from typing import Any, TypeVar

import msgspec
import torch

import stoker
from stoker.base.config import RuntimeConfig
from stoker.engine.config import content_address
from stoker.engine.reader import Engine
from stoker.runtime.worker_group.hosts.link import LinkError

# Kinds of frames. JOIN, STATUS and FAILED are sent to node 0; the others by node 0.
JOIN, STATUS, FAILED, REJECTED, JOINED, RECORD, BEAT, STOP = range(8)

MAX_TEXT = 16 << 10  # characters of a failure or its log
# Settings that may differ between nodes, because each node reads its own.
OWN_SETTINGS = ("devices", "num_threads")

T = TypeVar("T")


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal on all nodes, by name as in messages."""

    version: str
    torch: str
    engine: str  # digest of its content
    device: str  # model of the GPU, or the architecture of the CPU
    num_nodes: int
    settings: dict[str, Any]


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of a node."""

    node_rank: int
    name: str  # host name, for messages
    facts: Facts


class JoinAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of node 0 when all nodes have joined."""

    hosts: tuple[str, ...]  # address of each rank
    address: str  # of the rendezvous store of the collectives
    port: int
    store_prefix: str
    record_size: int  # of the plan channel
    step_timeout_s: float


class NodeStatus(msgspec.Struct, frozen=True):
    """The progress of a node; also its heartbeat."""

    num_reported: int  # states that all of its ranks have reported
    released: int  # records that all of its ranks have processed


class Failure(msgspec.Struct, frozen=True):
    """A failed rank of a node."""

    message: str
    log: str  # end of the rank's output
    is_cause: bool  # False if the failure of another rank may be the reason


def describe_node(engine: Engine, config: RuntimeConfig, devices: list[torch.device], num_nodes: int) -> Facts:
    """The facts of this process. `devices` are those of its own ranks."""
    settings = {name: value for name, value in msgspec.to_builtins(config).items() if name not in OWN_SETTINGS}
    names = {torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})" for device in devices}
    return Facts(
        version=stoker.__version__, torch=str(torch.__version__), engine=_engine_digest(engine), device=", ".join(sorted(names)),
        num_nodes=num_nodes, settings=settings,
    )  # fmt: skip


def find_difference(first: Facts, other: Facts) -> str | None:
    """The end of a sentence with the first difference and both values; None if the nodes can run together."""
    labels = {"version": "Stoker", "torch": "PyTorch", "engine": "the engine", "device": "the device", "num_nodes": "nnodes"}
    for field, label in labels.items():
        ours, theirs = getattr(first, field), getattr(other, field)
        if ours != theirs:
            return f"{label} is {theirs} there, and {ours} on node 0"
    for name in sorted(first.settings.keys() | other.settings.keys()):
        ours, theirs = first.settings.get(name), other.settings.get(name)
        if ours != theirs:
            return f"{name} is {theirs} there, and {ours} on node 0"
    return None


def encode(message: msgspec.Struct) -> bytes:
    """The body of a frame."""
    return msgspec.msgpack.encode(message)


def decode(body: bytes | bytearray, kind: type[T]) -> T:
    """The message of a frame's body. Raises LinkError if it is malformed."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise LinkError(f"sent a malformed message ({error})") from None


def _engine_digest(engine: Engine) -> str:
    """A digest of the settings and of the rank files of an engine. Tuning files and compiled kernels may differ."""
    files = engine.config.files
    ranks = [f"{name} {files[name].sha256}" for name in sorted(files) if name.startswith("rank")]
    return hashlib.sha256("\n".join([content_address(engine.config), *ranks]).encode()).hexdigest()[:16]
