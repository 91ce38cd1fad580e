"""The nodes that options, jobs of MPI and Slurm, and Triton repositories describe."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from free_ports import free_port

from stoker.base import env
from stoker.base.config import Mapping, RuntimeConfig
from stoker.base.env import JobProcess
from stoker.base.errors import ConfigError
from stoker.base.nodes import NodeSettings
from stoker.cli.node_options import NodeOptions, check_orchestrator, check_required_nodes, first_host, job_nodes, read_nodes
from stoker.cli.serve_arguments import with_default_mapping
from stoker.deploy.deployment import BuildOptions, Deployment, EngineSource, RequiredNodes

OPEN_MPI = {"RANK": 1, "SIZE": 2, "LOCAL_SIZE": 2, "LOCAL_RANK": 1}
TWO_HOSTS = JobProcess(rank=3, size=4, variable="OMPI_COMM_WORLD_RANK", num_hosts=2, local_rank=1)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in env.VARIABLES:
        if name.startswith(("OMPI_", "PMI_", "SLURM_", "MPI_", "TRTLLM_")):
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("STOKER_CLUSTER_TOKEN", "0123456789abcdef")


def in_job(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_without_options_there_is_one_node() -> None:
    assert read_nodes(NodeOptions()) == NodeSettings() == read_nodes(NodeOptions(nnodes=1))


def test_options_name_the_nodes() -> None:
    nodes = read_nodes(NodeOptions(nnodes=2, node_rank=1, rendezvous="gpu01:29400", rendezvous_timeout_s=60.0))
    assert (nodes.num_nodes, nodes.node_rank, nodes.num_hosts, nodes.address) == (2, 1, 2, ("gpu01", 29400))
    assert nodes.rendezvous_timeout_s == 60.0 and not nodes.is_first


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_NNODES": "2", "SLURM_LOCALID": "0"}, (2, 1, 2, 0)),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_LOCALID": "1"}, (4, 3, 2, 1)),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            },
            (2, 1, 1, 1),
        ),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}, (4, 3, 2, 1)),  # MPICH, Intel MPI
    ],
)
def test_a_job_names_the_nodes(variables: dict[str, str], expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    in_job(monkeypatch, STOKER_RENDEZVOUS="gpu01:29400", **variables)
    nodes = read_nodes(NodeOptions())
    assert (nodes.num_nodes, nodes.node_rank, nodes.num_hosts, nodes.local_rank) == expected
    with_number = read_nodes(NodeOptions(nnodes=expected[0]))
    assert (with_number.node_rank, with_number.local_rank) == (expected[1], expected[3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"node_rank": 1}, "node_rank=1 requires the number of nodes. Add --nnodes."),
        ({"rendezvous": "a:1"}, "rendezvous=a:1 requires the number of nodes outside of a Slurm or MPI job"),
        ({"nnodes": 2, "rendezvous": "a:1"}, "nnodes=2 requires the rank of this node"),
        ({"nnodes": 2, "node_rank": 0}, "nnodes=2 requires a rendezvous"),
        ({"nnodes": 2, "node_rank": 2, "rendezvous": "a:1"}, "node_rank=2 is refused: nnodes is 2"),
        (
            {"nnodes": 2, "node_rank": 1, "rendezvous": "a:1", "cluster_token_file": "/nowhere"},
            "cluster_token_file=/nowhere cannot be read",
        ),
    ],
)
def test_options_that_contradict_each_other_are_rejected(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_nodes(NodeOptions(**options))  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_the_address_of_the_rendezvous_is_checked_on_node_0() -> None:
    with socket.create_server(("", 0)) as taken:
        rendezvous = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"rendezvous={rendezvous} cannot be used: Address already in use"):
            read_nodes(NodeOptions(nnodes=2, node_rank=0, rendezvous=rendezvous))
        assert read_nodes(NodeOptions(nnodes=2, node_rank=1, rendezvous=rendezvous)).node_rank == 1
    with pytest.raises(ConfigError, match=r"rendezvous=no\.host\.invalid:1 is refused"):
        read_nodes(NodeOptions(nnodes=2, node_rank=0, rendezvous="no.host.invalid:1"))
    with pytest.raises(ConfigError, match=r"rendezvous=203\.0\.113\.7:29400 is refused: 203\.0\.113\.7 is no address of this host"):
        read_nodes(NodeOptions(nnodes=2, node_rank=0, rendezvous="203.0.113.7:29400"))
    assert read_nodes(NodeOptions(nnodes=2, node_rank=1, rendezvous="203.0.113.7:29400")).node_rank == 1


@pytest.mark.parametrize("host", ["0.0.0.0", "localhost", socket.gethostname()])
def test_any_address_of_the_host_is_accepted_on_node_0(host: str) -> None:
    port = free_port("")
    assert read_nodes(NodeOptions(nnodes=2, node_rank=0, rendezvous=f"{host}:{port}")).address == (host, port)


def test_a_shared_secret_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOKER_CLUSTER_TOKEN")
    with pytest.raises(ConfigError, match="nnodes=2 requires a shared secret"):
        read_nodes(NodeOptions(nnodes=2, node_rank=0, rendezvous="a:1"))


@pytest.mark.parametrize(
    ("names", "host"),
    [
        ("gpu01", "gpu01"),
        ("gpu01,gpu02", "gpu01"),
        ("gpu[01-04,07],big1", "gpu01"),
        ("d[3,5]", "d3"),
        ("a1,b[2-3]", "a1"),
        ("r[1-2]n0", "r1n0"),
    ],
)
def test_the_first_host_of_slurms_lists(names: str, host: str) -> None:
    assert first_host(names) == host


def test_processes_of_a_job_on_several_hosts_are_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="STOKER_RENDEZVOUS is not set"):
        job_nodes(TWO_HOSTS, RequiredNodes())
    in_job(monkeypatch, SLURM_JOB_NODELIST="gpu[01-02]", SLURM_JOB_ID="1234")
    nodes = job_nodes(TWO_HOSTS, RequiredNodes())
    assert nodes is not None and (nodes.num_nodes, nodes.node_rank, nodes.local_rank, nodes.num_hosts) == (4, 3, 1, 2)
    assert nodes.address == ("gpu01", 29400 + 1234 % 500)
    monkeypatch.setenv("STOKER_RENDEZVOUS", "10.0.0.1:5000")
    nodes = job_nodes(TWO_HOSTS, RequiredNodes(participants=(0, 3)))
    assert nodes is not None and (nodes.num_nodes, nodes.node_rank, nodes.address) == (2, 1, ("10.0.0.1", 5000))
    assert job_nodes(TWO_HOSTS, RequiredNodes(participants=(0, 1))) is None


@pytest.mark.parametrize(
    ("required", "context", "message"),
    [
        (RequiredNodes(num_nodes=3), {"job": TWO_HOSTS}, "num_nodes=3, and the number of hosts is 2"),
        (RequiredNodes(participants=(1, 2)), {"job": TWO_HOSTS}, "participant_ids=1,2 is refused: process 0 serves and holds the leader"),
        (
            RequiredNodes(participants=(0, 4)),
            {"job": TWO_HOSTS},
            "participant_ids=0,4, and the number of processes is 4. Use ids from 0 to 3.",
        ),
        (RequiredNodes(participants=(0,)), {}, "participant_ids=0, and the number of nodes is 2. Use 0,1"),
        (RequiredNodes(participants=(0, 2)), {}, "participant_ids=0,2, and the number of nodes is 2"),
    ],
)
def test_requirements_of_repositories_are_checked(required: RequiredNodes, context: dict[str, Any], message: str) -> None:
    nodes = NodeSettings(num_nodes=2, num_hosts=2, rendezvous="a:1")
    with pytest.raises(ConfigError) as caught:
        check_required_nodes(required, nodes, **context)
    assert message in str(caught.value) and caught.value.cure
    for fitting in (RequiredNodes(), RequiredNodes(num_nodes=2, participants=(0, 1))):
        check_required_nodes(fitting, nodes, **context)


def test_participants_of_one_node_are_its_ranks() -> None:
    check_required_nodes(RequiredNodes(num_nodes=1, participants=(0, 1)), NodeSettings(), num_ranks=2)
    with pytest.raises(ConfigError, match="participant_ids=0,1, and the number of ranks is 4"):
        check_required_nodes(RequiredNodes(participants=(0, 1)), NodeSettings(), num_ranks=4)
    with pytest.raises(ConfigError, match="num_nodes=2, and the number of hosts is 1"):
        check_required_nodes(RequiredNodes(num_nodes=2), NodeSettings(), num_ranks=4)


def test_an_engine_without_nodes_runs_on_one_host() -> None:
    RequiredNodes().check_one_host()
    with pytest.raises(ConfigError, match="repo: num_nodes=2, and the engine would run on one host"):
        RequiredNodes(num_nodes=2, origin="repo").check_one_host()


def test_orchestrator_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    check_orchestrator(TWO_HOSTS)
    monkeypatch.setenv("TRTLLM_ORCHESTRATOR", "1")
    check_orchestrator(JobProcess())
    with pytest.raises(ConfigError, match="TRTLLM_ORCHESTRATOR=1 is refused: an orchestrator starts its ranks on one host"):
        check_orchestrator(TWO_HOSTS)
    monkeypatch.setenv("TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES", "0")
    with pytest.raises(ConfigError, match="TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES=0 is refused"):
        check_orchestrator(JobProcess())


def test_the_default_mapping_is_pipeline_across_hosts_and_tensor_within(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.deploy.devices.visible_gpus", lambda environment: 4)
    nodes = NodeSettings(num_nodes=2, num_hosts=2, rendezvous="a:1")

    def mapping_of(deployment: Deployment, nodes: NodeSettings) -> Mapping:
        source = with_default_mapping(deployment, nodes).source
        assert isinstance(source, BuildOptions)
        return source.mapping

    checkpoint = Deployment(format="checkpoint", path="x", source=BuildOptions(checkpoint="x"))
    assert mapping_of(checkpoint, nodes) == Mapping(tensor_parallel=4, pipeline_parallel=2)
    assert mapping_of(checkpoint, NodeSettings()) == Mapping()
    assert mapping_of(checkpoint, NodeSettings(num_nodes=8, num_hosts=2, rendezvous="a:1")) == Mapping(
        tensor_parallel=4, pipeline_parallel=2
    )
    on_cpu = Deployment(format="checkpoint", path="x", source=BuildOptions(checkpoint="x"), runtime=RuntimeConfig(device="cpu"))
    assert mapping_of(on_cpu, nodes) == Mapping(pipeline_parallel=2)
    chosen = Deployment(format="checkpoint", path="x", source=BuildOptions(checkpoint="x", mapping=Mapping(tensor_parallel=2)))
    assert mapping_of(chosen, nodes) == Mapping(tensor_parallel=2)
    engine = Deployment(format="engine", path="x", source=EngineSource(location="x"))
    assert with_default_mapping(engine, nodes) is engine
