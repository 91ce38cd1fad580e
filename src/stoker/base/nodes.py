"""Settings of an engine whose ranks are on several nodes, and the mapping of ranks to nodes.

A node is one Stoker process that starts ranks: usually one per host, in an MPI job one per MPI process. Node 0 serves requests and holds
the leader rank; the others only run ranks.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from pathlib import Path

import msgspec

from stoker.base import env
from stoker.base.config import Mapping, check_range
from stoker.base.errors import ConfigError

MAX_NODES = 1024
MIN_TOKEN_BYTES, MAX_TOKEN_BYTES = 16, 4096
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?)*\.?")
_NUMBERS = re.compile(r"[0-9.]+")  # only of addresses, which 10.0.0.256 is not


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes of an engine, and the position of this process among them."""

    num_nodes: int = 1
    """Processes that start ranks of the engine."""

    node_rank: int = 0
    """Index of this process. Node 0 serves requests."""

    rendezvous: str = ""
    """HOST:PORT at which node 0 listens for the other nodes."""

    token_file: str | None = None
    """File with the shared secret of the nodes. None: the variable STOKER_CLUSTER_TOKEN."""

    rendezvous_timeout_s: float = 300.0
    """Seconds within which all nodes must have joined."""

    num_hosts: int = 1
    """Hosts of the nodes."""

    local_rank: int = 0
    """Index of this process among those of the job on the same host, which selects its GPUs."""

    def __post_init__(self) -> None:
        check_range("nnodes", self.num_nodes, 1, MAX_NODES)
        if not 0 <= self.node_rank < self.num_nodes:
            raise ConfigError(f"node_rank={self.node_rank} is refused: nnodes is {self.num_nodes}.", cure=f"Use 0 to {self.num_nodes - 1}.")
        if self.num_nodes > 1 and not self.rendezvous:
            raise ConfigError(f"nnodes={self.num_nodes} requires a rendezvous.", cure="Add --rendezvous HOST:PORT, an address of node 0.")
        if self.rendezvous:
            parse_rendezvous(self.rendezvous)
        if not 1.0 <= self.rendezvous_timeout_s <= 86400.0:
            raise ConfigError(f"rendezvous_timeout_s={self.rendezvous_timeout_s} is refused.", cure="Use seconds, from 1 to 86400.")

    @property
    def address(self) -> tuple[str, int]:
        """The host and port of the rendezvous."""
        return parse_rendezvous(self.rendezvous)

    @property
    def is_first(self) -> bool:
        """Whether this is node 0, which serves requests."""
        return self.node_rank == 0

    def read_token(self) -> bytes:
        """The shared secret. Raises ConfigError if there is none, or if it is too short."""
        origin, token = "STOKER_CLUSTER_TOKEN", env.cluster_token().encode()
        if self.token_file is not None:
            origin = f"cluster_token_file={self.token_file}"
            try:
                with Path(self.token_file).expanduser().open("rb") as file:
                    token = file.read(MAX_TOKEN_BYTES + 1).strip()
            except OSError as error:
                raise ConfigError(f"{origin} cannot be read: {error.strerror}.", cure="Correct the path.") from None
        if not token:
            raise ConfigError(
                f"nnodes={self.num_nodes} requires a shared secret, and STOKER_CLUSTER_TOKEN is not set.",
                cure="Set it to the same value on all nodes, such as the output of: openssl rand -hex 32.",
            )
        if not MIN_TOKEN_BYTES <= len(token) <= MAX_TOKEN_BYTES:
            raise ConfigError(
                f"{origin} has {len(token)} bytes, and a shared secret has {MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES}.",
                cure="Use the output of: openssl rand -hex 32.",
            )
        return hmac.digest(b"stoker cluster", token, "sha256")


def parse_rendezvous(text: str) -> tuple[str, int]:
    """The host and port of HOST:PORT or [IPV6]:PORT. Raises ConfigError."""
    if (address := split_address(text)) is None or not address[1]:
        raise ConfigError(f"rendezvous={text!r} is refused.", cure="Write HOST:PORT, such as 10.0.0.1:29400 or [fd00::1]:29400.")
    return address


def split_address(text: str) -> tuple[str, int] | None:
    """The host and port, 0 to 65535, of HOST:PORT or [IPV6]:PORT; None if the text is neither."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        return None
    if not host or not (port.isascii() and port.isdigit() and len(port) < 6 and int(port) < 65536):
        return None
    return host, int(port)


def is_host(text: str) -> bool:
    """Whether the text is an IP address or has the form of a host name."""
    try:
        ipaddress.ip_address(text)
        return True
    except ValueError:
        return len(text) < 254 and _HOST_NAME.fullmatch(text) is not None and not _NUMBERS.fullmatch(text)


def leader(mapping: Mapping) -> int:
    """The rank that plans steps and samples: the first rank of the last stage, which computes the logits."""
    return (mapping.pipeline_parallel - 1) * mapping.stage_size


def ranks_per_node(mapping: Mapping, num_nodes: int) -> int:
    """The number of ranks of each node. Raises ConfigError unless the ranks can be divided evenly."""
    size = mapping.world_size
    if size % num_nodes:
        divisors = [str(count) for count in range(1, size + 1) if size % count == 0]
        raise ConfigError(
            f"nnodes={num_nodes} is refused: the engine has {mapping.ranks}, which cannot be divided evenly.",
            cure=f"Use one of: {', '.join(divisors)}, or build the engine for another number of ranks.",
        )
    return size // num_nodes


def place_ranks(mapping: Mapping, num_nodes: int) -> tuple[int, ...]:
    """The node of each rank. Raises ConfigError unless the ranks can be divided evenly.

    A node has consecutive ranks, so that the ranks of a stage are on one node if they fit. Node 0 has the last stage, whose first rank is
    the leader; the first stage follows on node 1.
    """
    size = ranks_per_node(mapping, num_nodes)
    first = leader(mapping) // size
    return tuple((rank // size - first) % num_nodes for rank in range(mapping.world_size))


def describe_placement(mapping: Mapping, nodes: tuple[int, ...], hosts: tuple[str, ...] = ()) -> list[str]:
    """Lines that show the stages, ranks and tensor-parallel groups of each node. `hosts`: the host of each rank, if it is known."""
    tp, num_nodes = mapping.tensor_parallel, max(nodes) + 1
    crosses = any(len(set(nodes[start : start + tp])) > 1 for start in range(0, len(nodes), tp))
    kind = "pipeline across nodes, tensor within a node"
    if crosses:
        kind = "tensor across nodes" if mapping.pipeline_parallel == 1 else "tensor and pipeline across nodes"
    lines = [f"{mapping.world_size} ranks on {num_nodes} nodes: {kind}"]
    for node in range(num_nodes):
        ranks = [rank for rank, place in enumerate(nodes) if place == node]
        stages = sorted({rank // tp for rank in ranks})
        names = [f"{rank} (leader)" if rank == leader(mapping) else str(rank) for rank in ranks]
        place = f"node {node}" + (f" ({hosts[ranks[0]]})" if hosts else "")
        lines.append(f"  {place}: {_numbered('stage', stages)}, {_numbered('rank', names)}")
    if crosses:
        lines.append("  The ranks of a stage are on several nodes, so that each layer waits for the network twice.")
    return lines


def _numbered(noun: str, values: list[int] | list[str]) -> str:
    """ "stage 1", or "ranks 2, 3"."""
    return f"{noun}{'s' if len(values) > 1 else ''} {', '.join(map(str, values))}"
