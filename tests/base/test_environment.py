"""Environment variables: the table is complete, documented, and values are parsed strictly."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stoker.base import env
from stoker.base.errors import ConfigError
from stoker.deploy.lmi import environment as lmi

ROOT = Path(__file__).parents[2]


def test_the_page_matches_the_table() -> None:
    rows = [f"| `{v.name}` | {v.default or '-'} | {v.description} |" for v in env.VARIABLES.values()]
    page = (ROOT / "docs" / "environment.md").read_text().split("\n## ")[0]
    assert [line for line in page.splitlines() if line.startswith("| `")] == rows


def test_every_variable_of_the_source_is_in_the_table() -> None:
    """STOKER_ADDRESS and STOKER_PYTHON belong to the Truss template, which runs without Stoker."""
    source = "\n".join(path.read_text() for path in (ROOT / "src" / "stoker").rglob("*.py"))
    named = set(re.findall(r"\bSTOKER_[A-Z_]+\b", source)) | set(re.findall(r"env\.(?:text|flag)\([\"'](\w+)", source))
    assert named <= set(env.VARIABLES)


def test_every_variable_of_a_deployment_is_documented() -> None:
    """Deployment formats receive the environment as an argument. docs/sagemaker.md has the table of LMI's variables."""
    source = "\n".join(path.read_text() for path in (ROOT / "src" / "stoker").rglob("*.py"))
    named = set(re.findall(r"environment(?:\.get\(|\[)\"(\w+)\"", source)) | set(lmi.ENVIRONMENT) | set(lmi.OVERRIDES)
    assert len(named) > 10
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("environment.md", "sagemaker.md"))
    assert {name for name in named if f"`{name}`" not in pages} == set()


def test_a_variable_that_is_not_in_the_table_cannot_be_read() -> None:
    with pytest.raises(KeyError, match="STOKER_SURPRISE"):
        env.text("STOKER_SURPRISE")


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("TRUE", True), (" yes ", True), ("0", False), ("off", False), ("", True)])
def test_flags(value: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_NATIVE", value)
    assert env.native() is expected


@pytest.mark.parametrize(("stoker", "omp", "expected"), [("3", "7", 3), ("", "7", 7), ("", "2,1", 2)])
def test_threads(stoker: str, omp: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_THREADS", stoker)
    monkeypatch.setenv("OMP_NUM_THREADS", omp)
    assert env.num_threads() == expected


@pytest.mark.parametrize("value", ["0", "-1", "many", "4097", "1.5", "٣"])
def test_wrong_numbers_of_threads_are_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_THREADS", value)
    with pytest.raises(ConfigError, match=r"STOKER_THREADS=.* is refused\. Use a whole number from 1 to 4096, or unset it\."):
        env.num_threads()


def test_the_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("STOKER_CACHE", raising=False)
    assert env.cache_dir() == tmp_path / "stoker" and env.kernel_cache() == tmp_path / "stoker" / "kernels"
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    assert env.cache_dir() == tmp_path / "own" and env.kernel_cache() == tmp_path / "triton"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 1, True)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (1, 2, True)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (1, 4, False)),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}, (3, 4, True)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_NNODES": "1"}, (1, 2, True)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_NNODES": "2"}, (1, 2, False)),
        ({"SLURM_PROCID": "7", "SLURM_NTASKS": "8", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, (0, 1, True)),
        ({"PMI_RANK": "-1", "PMI_SIZE": "4"}, (0, 1, True)),
    ],
)
def test_ranks_of_jobs(variables: dict[str, str], expected: tuple[int, int, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in env.VARIABLES:
        if name.startswith(("OMPI_", "PMI_", "SLURM_", "MPI_")):
            monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    process = env.job_process()
    assert (process.rank, process.size, process.one_host) == expected
