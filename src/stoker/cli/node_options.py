"""The options of an engine whose ranks are on several nodes, and the nodes that they or a Slurm or MPI job describe."""

from __future__ import annotations

import msgspec

from stoker.base import env
from stoker.base.env import JobProcess
from stoker.base.errors import ConfigError
from stoker.base.nodes import NodeSettings
from stoker.cli.options import struct_options
from stoker.deploy.deployment import RequiredNodes
from stoker.runtime.worker_group.hosts.listener import listen

DEFAULT_PORT = 29400  # of a rendezvous in a Slurm job, plus a number of the job so that jobs on the same hosts do not meet
NUM_JOB_PORTS = 500


class NodeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says about nodes. None: not set."""

    nnodes: int | None = None
    node_rank: int | None = None
    rendezvous: str | None = None
    cluster_token_file: str | None = None
    rendezvous_timeout_s: float = NodeSettings().rendezvous_timeout_s


NODE_HELP = {
    "nnodes": "Number of hosts that run ranks of the engine, each with this command. Default: the processes of the MPI or Slurm job.",
    "node_rank": "Index of this host among them. Node 0 serves, and the others only run ranks. Default: the rank in the MPI or Slurm job.",
    "rendezvous": "HOST:PORT at which node 0 listens for the other nodes. Default: STOKER_RENDEZVOUS.",
    "cluster_token_file": "File with the shared secret of the nodes. Default: the variable STOKER_CLUSTER_TOKEN.",
    "rendezvous_timeout_s": "Seconds within which all nodes must have joined.",
}
node_options = struct_options(NodeOptions, "node_options", NODE_HELP)


def read_nodes(options: NodeOptions) -> NodeSettings:
    """The nodes of this process's engine. Raises ConfigError for options that contradict each other, and without a shared secret."""
    rendezvous, job = options.rendezvous or env.text("STOKER_RENDEZVOUS"), env.job_process()
    nnodes, node_rank, local_rank, num_hosts = options.nnodes, options.node_rank, 0, options.nnodes or 1
    if nnodes is None and node_rank is not None:
        raise ConfigError(f"node_rank={node_rank} requires the number of nodes.", cure="Add --nnodes.")
    if nnodes is None:
        if not rendezvous:
            return NodeSettings()
        if not job.variable:
            raise ConfigError(
                f"rendezvous={rendezvous} requires the number of nodes outside of a Slurm or MPI job.", cure="Add --nnodes and --node-rank."
            )
        nnodes, node_rank, local_rank, num_hosts = job.size, job.rank, job.local_rank, job.num_hosts
    elif node_rank is None and nnodes > 1:
        if job.size != nnodes:
            raise ConfigError(f"nnodes={nnodes} requires the rank of this node.", cure="Add --node-rank, 0 on the host that serves.")
        node_rank, local_rank, num_hosts = job.rank, job.local_rank, job.num_hosts
    nodes = NodeSettings(
        num_nodes=nnodes, node_rank=node_rank or 0, rendezvous=rendezvous, token_file=options.cluster_token_file, num_hosts=num_hosts,
        rendezvous_timeout_s=options.rendezvous_timeout_s, local_rank=local_rank,
    )  # fmt: skip
    return _checked(nodes)


def job_nodes(job: JobProcess, required: RequiredNodes) -> NodeSettings | None:
    """The nodes of a job of several processes that `stoker tritonserver` was started in; None for a process that holds no rank.

    The participants are the processes that hold ranks, in this order, by default all. Raises ConfigError.
    """
    participants = required.participants or tuple(range(job.size))
    if job.rank not in participants:
        return None
    rendezvous = env.text("STOKER_RENDEZVOUS") or _slurm_rendezvous()
    if not rendezvous:
        raise ConfigError(
            f"the {job.size} processes of this job are on several hosts, and STOKER_RENDEZVOUS is not set.",
            cure="Set it to HOST:PORT, an address of the host of process 0, such as with mpirun -x STOKER_RENDEZVOUS=HOST:29400.",
        )
    nodes = NodeSettings(
        num_nodes=len(participants), node_rank=participants.index(job.rank), rendezvous=rendezvous, local_rank=job.local_rank,
        num_hosts=job.num_hosts,
    )  # fmt: skip
    return _checked(nodes)


def check_required_nodes(
    required: RequiredNodes, nodes: NodeSettings, *, job: JobProcess | None = None, num_ranks: int | None = None
) -> None:
    """Raise ConfigError unless the nodes are those that a deployment requires.

    `job`: its participants select among the processes of this job; None: they are the nodes, or with one node its `num_ranks` ranks.
    """
    if required.num_nodes not in (None, nodes.num_hosts):
        raise ConfigError(
            f"{required.origin}: num_nodes={required.num_nodes}, and the number of hosts is {nodes.num_hosts}.",
            cure=f"Start it on {required.num_nodes} hosts with --nnodes, srun or mpirun, or change num_nodes.",
        )
    participants = required.participants
    if participants is None:
        return
    shown = f"{required.origin}: participant_ids={','.join(map(str, participants))}"
    if participants[0] != 0:
        raise ConfigError(f"{shown} is refused: process 0 serves and holds the leader rank.", cure="Begin with 0, such as 0,1.")
    if job is not None:
        if max(participants) >= job.size:
            raise ConfigError(f"{shown}, and the number of processes is {job.size}.", cure=f"Use ids from 0 to {job.size - 1}.")
        return
    size = nodes.num_nodes if nodes.num_nodes > 1 else num_ranks or len(participants)
    if participants != tuple(range(size)):
        noun = "nodes" if nodes.num_nodes > 1 else "ranks"
        ids = ",".join(map(str, range(size)))
        raise ConfigError(
            f"{shown}, and the number of {noun} is {size}.", cure=f"Use {ids}, or stoker tritonserver in a job on several hosts."
        )


def check_orchestrator(job: JobProcess) -> None:
    """Raise ConfigError for an orchestrator mode of TensorRT-LLM that cannot take effect.

    With TRTLLM_ORCHESTRATOR=1 one process serves and starts the ranks, as Stoker does on one host.
    """
    if not env.flag("TRTLLM_ORCHESTRATOR"):
        return
    if not env.flag("TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES", True):
        raise ConfigError(
            "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES=0 is refused: the process that serves also holds the leader rank.",
            cure="Unset both variables, and start one process per rank, or unset only this one to let Stoker start the ranks.",
        )
    if not job.one_host:
        raise ConfigError(
            f"TRTLLM_ORCHESTRATOR=1 is refused: an orchestrator starts its ranks on one host, and this job has {job.num_hosts}.",
            cure="Unset it: process 0 is then the leader, and the others hold ranks.",
        )


def _checked(nodes: NodeSettings) -> NodeSettings:
    """The nodes. Raises ConfigError without a shared secret, and on node 0 if the address of the rendezvous cannot be used."""
    if nodes.num_nodes > 1:
        nodes.read_token()
        if nodes.is_first:
            listen(nodes).close()
    return nodes


def _slurm_rendezvous() -> str:
    """The rendezvous of a Slurm job: its first host, and a port that depends on the job. Empty outside of a job."""
    names, job = env.text("SLURM_STEP_NODELIST") or env.text("SLURM_JOB_NODELIST"), env.text("SLURM_JOB_ID")
    return f"{first_host(names)}:{DEFAULT_PORT + int(job) % NUM_JOB_PORTS}" if names and job.isdigit() else ""


def first_host(names: str) -> str:
    """The first host of a Slurm list of hosts, such as gpu01 of gpu[01-04,07],big1."""
    prefix, bracket, rest = names.partition("[")
    if "," in prefix or not bracket:
        return prefix.partition(",")[0]
    inside, _, suffix = rest.partition("]")
    return prefix + inside.partition(",")[0].partition("-")[0] + suffix.partition(",")[0]
